// Weights policy: how exponents become weights, what the sum of a row takes in of them, what meets V, and what the
// backward makes of them. Dropout would be applied here: to what weigh() returns, not to what it adds up, and to dP in
// score_gradient().
//
// The forward on AMX multiplies weights as parts of bfloat16 and weighs two keys at a time: its weigh() is Weigh in
// amx/parts.h.
#pragma once
#include <math.h>

#include "simd/exp2.h"
#include "simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spattn {
namespace SPATTN_ISA {

// The weights of a vector of pairs, as exact as `Spec` makes them.
template <class T, class Spec = Exp2<T>> SPATTN_INLINE Vec<T> weigh(Vec<T> exponent, Vec<T>& sum) {
  const Vec<T> weight = exp2<T, Spec>(exponent);
  sum += weight;
  return weight;
}

// Of one pair, from a natural exponent.
inline double scalar_weight(double exponent) { return ::exp(exponent); }

// In the backward exponents are relative to the log-sum-exp, so that weights are normalised. They are 0 where the row
// is left out, whose K may be infinite, for 0 * inf is NaN.
template <class T> SPATTN_INLINE Vec<T> normalised_weight(Vec<T> exponent, Vec<T> lse2) {
  const Vec<T> weight = exp2<T>(exponent);
  return lse2 != kInfinity<T> ? weight : Vec<T>{};
}

// 0 where a pair is not allowed, which is where all its bits are 0.
template <class T> SPATTN_INLINE Vec<T> masked_weight(Vec<T> weight, BitsVec<T> allowed) {
  return allowed != 0 ? weight : Vec<T>{};
}

// The gradient of a score, weight * (dP - delta), given the difference. Where a pair is not allowed V may be NaN, and
// 0 * NaN is NaN.
template <class T> SPATTN_INLINE Vec<T> score_gradient(Vec<T> weight, Vec<T> difference) {
  return weight != T(0) ? weight * difference : Vec<T>{};
}

#if defined(__AVX512F__)
// The same where `keep` says that a row is there and the pair allowed.
SPATTN_INLINE __m512 keep_weight(Vec<float> weight, __mmask16 keep) {
  return _mm512_maskz_mov_ps(keep, (__m512)weight);
}
SPATTN_INLINE __m512 score_gradient(__m512 weight, Vec<float> difference) {
  const __mmask16 matters = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_maskz_mul_ps(matters, (__m512)difference, weight);
}
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
