// Logits policy: how products of queries and keys become logits. Every path, forward and backward, on vectors, tiles or
// single pairs, passes its products through score(), scalar_score() where it has one pair: there a function of a logit
// and the positions of its query and key would be applied. Callers know both cells, and so their Positions.
//
// A *score* is sign(scale) * q.k, so that the largest one always has the largest logit. Paths that multiply vectors
// give Q the sign when they pack it. A logit is `natural` times a score, `factor` times in base 2, but is not formed
// itself: the factor multiplies differences of scores, which are small and nearly exact, so that large logits lose
// nothing. bfloat16 on AMX computes exponents in the integers instead: WholeParts::Weigh in amx/parts.h.
#pragma once
#include <math.h>

#include "simd/element.h"
#include "simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spattn {
namespace SPATTN_ISA {

// The natural logarithm of a normal number, within 2 ulp, and something for others; without a branch or a call, so
// that loops over rows are vectorised. x = 2^n m with m between sqrt(1/2) and sqrt(2), and
// log(m) = 2 artanh((m - 1) / (m + 1)).
SPATTN_INLINE double logarithm(double x) {
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  const uint64_t above = bit_cast<uint64_t>(x) - kRootHalf;
  const double n = double(int64_t(above) >> 52);
  const double m = bit_cast<double>((above & 0xfffffffffffff) + kRootHalf);
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 1.0 / 21;
  SPATTN_UNROLL
  for (int i = 19; i > 1; i -= 2) sum = sum * square + 1.0 / i;
  return n * 0.69314718055994530942 + 2 * (s + s * square * sum);
}

template <class T> struct Logits {
  T sign, factor;
  double natural;  // what a score of 1 is as a natural logarithm

  // A scale that is or rounds to 0 makes all scores 0 instead: the factor can always meet -inf.
  explicit Logits(double scale) : sign(scale < 0 ? T(-1) : T(1)), natural(scale < 0 ? -scale : scale) {
    factor = T(natural * 1.4426950408889634074);  // log2(e)
    if (factor == T(0)) sign = T(0), factor = T(1), natural = 1;
  }

  // The scores of a vector of pairs.
  static SPATTN_INLINE Vec<T> score(Vec<T> product) { return product; }
  // -inf where a pair is not allowed, which is where all its bits are 0.
  static SPATTN_INLINE Vec<T> masked(Vec<T> score, BitsVec<T> allowed) {
    return allowed != 0 ? score : splat(-kInfinity<T>);
  }
#if defined(__AVX512F__)
  static SPATTN_INLINE Vec<float> masked(Vec<float> score, __mmask16 allowed) {
    return (Vec<float>)_mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity<float>), allowed, (__m512)score);
  }
  static SPATTN_INLINE Vec<double> masked(Vec<double> score, __mmask8 allowed) {
    return (Vec<double>)_mm512_mask_mov_pd(_mm512_set1_pd(-kInfinity<double>), allowed, (__m512d)score);
  }
#endif
  // The score of one pair, whose query has not been given the sign.
  double scalar_score(double product) const { return product * double(sign); }

  // Where the exponents of a row start: at 0 as long as nothing is allowed, for exp2(-inf - 0) = 0. From 2^28 on (2^57
  // for double) a product's rounding error could leave the range of exp2: NaN, so that the exact path takes the row.
  SPATTN_INLINE Vec<T> reference(Vec<T> row_max) const {
    constexpr T kFar = sizeof(T) == 4 ? T(0x1p28) : T(0x1p57);
    Vec<T> start = row_max;
    if (kFused) {
      start = row_max * factor;
      start = start * start < kFar * kFar ? start : splat(T(__builtin_nan("")));
    }
    return row_max == -kInfinity<T> ? Vec<T>{} : start;
  }

  // The logarithms of weights to base 2. With a fused multiply-add, factor * score - reference where `reference` is
  // factor * row_max rounded: its error is the same for all keys of a row, and lse() takes it back. Without one, the
  // difference comes first.
  SPATTN_INLINE Vec<T> exponent(Vec<T> score, Vec<T> reference) const {
    if constexpr (kFused) return multiply_subtract(score, splat(factor), reference);
    return (score - reference) * factor;
  }

  // The natural logarithm of a weight.
  double scalar_exponent(double score, double reference) const { return (score - reference) * natural; }

  // The log-sum-exp of a row whose weights add up to `sum`.
  double lse(T row_max, T reference, T sum) const {
    const double ours = logarithm(double(sum));
    if (!kFused) return double(row_max) * natural + ours;
    const double error = __builtin_fma(-double(row_max), double(factor), double(reference));
    return __builtin_fma(double(row_max), natural, error * 0.69314718055994530942) + ours;
  }
};

// A number as a sum of two.
template <class T> struct Split {
  T high, low;
};

// x * log2(e), the logarithm or logits of base e to base 2.
template <class T> Split<T> to_base_2(double x) {
  constexpr double kLog2e = 1.4426950408889634074, kRest = 2.0355273740931033e-17;
  const double product = x * kLog2e, rest = __builtin_fma(x, kLog2e, -product) + x * kRest;
  const T high = T(product);
  return {high, T(product - double(high) + rest)};
}

// The logits of the backward, which counts exponents from the log-sum-exp itself: the factor has twice the digits.
template <class T> struct SplitLogits {
  Split<T> factor;

  // The first part is rounded down, so that the second is positive and a logit of -inf stays -inf. As Logits has it, a
  // scale that rounds to 0 makes the logits 0 and the factor 1.
  explicit SplitLogits(double scale) : factor(to_base_2<T>(scale < 0 ? -scale : scale)) {
    if (factor.high == T(0)) {
      factor = {T(1), T(0)};
    } else if (!(factor.low > T(0))) {
      const T below = bit_cast<T>(Word<T>(bit_cast<Word<T>>(factor.high) - 1));
      factor = {below, factor.low + (factor.high - below)};
    }
  }

  SPATTN_INLINE Vec<T> exponent(Vec<T> score, Vec<T> lse2, Vec<T> lse2_low) const {
    return (score * factor.high - lse2) + (score * factor.low - lse2_low);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
