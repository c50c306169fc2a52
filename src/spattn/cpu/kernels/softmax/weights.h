// Softmax weights: exp2 of scores, their row sum, and the score gradient. Dropout would apply to the result of weigh(),
// not to its sum, and to dP in score_gradient().
//
// The AMX forward multiplies weights as parts of bfloat16 and computes two keys at a time: Weigh in amx/parts.h.
#pragma once
#include <math.h>

#include "simd/exp2.h"
#include "simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spattn {
namespace SPATTN_ISA {

// The weights of a vector of pairs, with the accuracy of `Spec`.
template <class T, class Spec = Exp2<T>> SPATTN_INLINE Vec<T> weigh(Vec<T> exponent, Vec<T>& sum) {
  const Vec<T> weight = exp2<T, Spec>(exponent);
  sum += weight;
  return weight;
}

// The weight of one pair, from a natural exponent.
inline double scalar_weight(double exponent) { return ::exp(exponent); }

// Normalized weights of the backward, whose exponents are relative to the log-sum-exp. 0 for skipped rows, whose K may
// be infinite: 0 * inf is NaN.
template <class T> SPATTN_INLINE Vec<T> normalised_weight(Vec<T> exponent, Vec<T> lse2) {
  const Vec<T> weight = exp2<T>(exponent);
  return lse2 != kInfinity<T> ? weight : Vec<T>{};
}

// Zero for masked pairs, where all bits of `allowed` are 0.
template <class T> SPATTN_INLINE Vec<T> masked_weight(Vec<T> weight, BitsVec<T> allowed) {
  return allowed != 0 ? weight : Vec<T>{};
}

// The score gradient weight * (dP - delta), given the difference. 0 for weight 0: V of a masked pair may be NaN.
template <class T> SPATTN_INLINE Vec<T> score_gradient(Vec<T> weight, Vec<T> difference) {
  return weight != T(0) ? weight * difference : Vec<T>{};
}

#if defined(__AVX512F__)
// The weight where `keep` is set (the row exists and the pair is allowed), else 0.
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
