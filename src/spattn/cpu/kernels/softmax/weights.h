// Softmax weights P, their row sums, and the score gradient dS. Dropout (dropout.h) applies to the result of weigh(),
// not to its sum, and to dP in score_gradient(). The AMX forward has its own functions: Weigh in amx/parts.h.
#pragma once
#include <math.h>

#include "simd/exp2.h"
#include "simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spattn {
namespace SPATTN_ISA {

// Returns the weights exp2(exponent) and adds them to `sum`; `Spec` sets the accuracy.
template <class T, class Spec = Exp2<T>> SPATTN_INLINE Vec<T> weigh(Vec<T> exponent, Vec<T>& sum) {
  const Vec<T> weight = exp2<T, Spec>(exponent);
  sum += weight;
  return weight;
}

// Returns the weight of one pair, given its natural exponent.
inline double scalar_weight(double exponent) { return ::exp(exponent); }

// Returns the normalized weights of the backward, given exponents relative to the log-sum-exp. Returns 0 for skipped
// rows: an infinite K times their zero query is NaN.
template <class T> SPATTN_INLINE Vec<T> normalised_weight(Vec<T> exponent, Vec<T> lse2) {
  const Vec<T> weight = exp2<T>(exponent);
  return lse2 != kInfinity<T> ? weight : Vec<T>{};
}

// Returns 0 for masked pairs, whose lanes of `allowed` are 0, else the weight.
template <class T> SPATTN_INLINE Vec<T> masked_weight(Vec<T> weight, BitsVec<T> allowed) {
  return allowed != 0 ? weight : Vec<T>{};
}

// Returns dS = weight * difference, where `difference` is dP - delta. Returns 0 for weight 0, as V of a masked pair may
// be NaN.
template <class T> SPATTN_INLINE Vec<T> score_gradient(Vec<T> weight, Vec<T> difference) {
  return weight != T(0) ? weight * difference : Vec<T>{};
}

#if defined(__AVX512F__)
// Returns the weight where `keep` is set, else 0.
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
