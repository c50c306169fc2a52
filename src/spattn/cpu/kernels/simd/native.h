// Intrinsics for operations that vector extensions lack, or for which compilers miss the instruction.
#pragma once
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns a > b ? a : b in each lane, hence b where either is NaN.
#if defined(__AVX512F__)
SPATTN_INLINE Vec<float> larger(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b); }
SPATTN_INLINE Vec<double> larger(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
}
#elif defined(__AVX2__)
SPATTN_INLINE Vec<float> larger(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b); }
SPATTN_INLINE Vec<double> larger(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
}
#elif defined(__SSE2__)
SPATTN_INLINE Vec<float> larger(Vec<float> a, Vec<float> b) { return (Vec<float>)_mm_max_ps((__m128)a, (__m128)b); }
SPATTN_INLINE Vec<double> larger(Vec<double> a, Vec<double> b) {
  return (Vec<double>)_mm_max_pd((__m128d)a, (__m128d)b);
}
#else
template <class V> SPATTN_INLINE V larger(V a, V b) { return a > b ? a : b; }
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
