// Pairs of bfloat16, adjacent features or keys, in 32-bit lanes: the operands of `vdpbf16ps` and AMX.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "simd/element.h"
#include "simd/exp2.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// bfloat16 as stored bits.
struct RawBfloat16 {
  using Storage = uint16_t;
  using Compute = uint16_t;
  static SPATTN_INLINE uint16_t decode(uint16_t x) { return x; }
};

template <> inline void read_row<RawBfloat16>(const char* from, int64_t stride, int64_t count, uint16_t* out) {
  if (stride == 2) {
    memcpy(out, from, size_t(2 * count));
  } else {
    read_strided<RawBfloat16>(from, stride, count, out);
  }
}

// Relative error below 2.7e-6: rounding the weights to bfloat16 costs 2^-9.
struct CoarseExp2 : Exp2<float> {
  static constexpr float kCoefficients[] = {9.57010191e-3f, 5.59178603e-2f, 2.40247448e-1f, 6.93121815e-1f,
                                            9.99999261e-1f};
};

typedef uint16_t Halves __attribute__((vector_size(SPATTN_VECTOR_BYTES)));

// Interleaves two vectors of bfloat16, all of a followed by all of b, to a0 b0 a1 b1 ...
SPATTN_INLINE BitsVec<float> alternate(__m512i both) {
  constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (BitsVec<float>)_mm512_permutexvar_epi16((__m512i)kOrder, both);
}

// Sixteen bfloat16, each in the low half of a lane.
SPATTN_INLINE BitsVec<float> widen(const char* halves) {
  return (BitsVec<float>)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

// Interleaves sixteen features of two rows.
SPATTN_INLINE BitsVec<float> side_by_side(const void* even, const void* odd) {
  return widen(static_cast<const char*>(even)) | widen(static_cast<const char*>(odd)) << 16;
}

// Multiplies both halves by -1, 0 or 1.
SPATTN_INLINE BitsVec<float> times_sign(BitsVec<float> pairs, float sign) {
  using Vector = BitsVec<float>;
  const Vector low = (Vector)((Vec<float>)(pairs << 16) * sign);
  const Vector high = (Vector)((Vec<float>)(pairs & 0xffff0000) * sign);
  return low >> 16 | (high & 0xffff0000);
}

// Adds the exact products of both halves to float32 sums.
SPATTN_INLINE Vec<float> multiply_pairs(Vec<float> sum, BitsVec<float> a, BitsVec<float> b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
}

// `sum` plus both halves.
SPATTN_INLINE Vec<float> add_pairs(Vec<float> sum, BitsVec<float> pairs) {
  return multiply_pairs(sum, pairs, splat_bits<float>(0x3f803f80));  // times (1, 1)
}

}  // namespace SPATTN_ISA
}  // namespace spattn
#endif
