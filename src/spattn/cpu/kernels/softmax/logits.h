// Scores, their maxima and exponents.
//
// Without a score function (score.h), variables named *score* hold sign(scale) * q.k, so that the maximum of the scores
// is the maximum of the scaled scores. Vectorized kernels apply the sign when they pack Q. The scaled score would be
// natural * score (factor * score in base 2), but it is never computed: `factor` multiplies score - max, which is small
// and nearly exact. The AMX kernel for bfloat16 computes exponents in integers: WholeParts::Weigh in amx/parts.h.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/element.h"
#include "simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace spattn {
namespace SPATTN_ISA {

// Returns the natural logarithm of a normal number, within 2 ulp; unspecified for others. It has no branches or calls,
// so that loops over rows vectorize. Splits x = 2^n m with m between sqrt(1/2) and sqrt(2), and computes
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

// Returns the factor of the scores in the softmax: 1 with a score function, whose results are scaled already.
inline double softmax_scale(const Call& call) { return call.score ? 1 : call.scale; }

template <class T> struct Logits {
  T sign, factor;
  double natural;  // |scale|; `factor` is its base-2 counterpart, |scale| * log2(e)

  // If the factor rounds to 0, sets sign = 0, which zeroes the scores, and factor = 1, because 0 * -inf is NaN.
  explicit Logits(const Call& call) : natural(softmax_scale(call)) {
    sign = natural < 0 ? T(-1) : T(1), natural = natural < 0 ? -natural : natural;
    factor = T(natural * 1.4426950408889634074);  // log2(e)
    if (factor == T(0)) sign = T(0), factor = T(1), natural = 1;
  }

  // Returns -inf for masked pairs, whose lanes of `allowed` are 0, else the score.
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
  // Returns what exponent() subtracts: the scaled maximum, or 0 for rows without an allowed key, as exp2(-inf - 0) = 0.
  // From 2^28 on (2^57 for double), the rounding error of the scaled maximum could exceed the range of exp2; returns
  // NaN, which sends the row to the float64 fallback.
  SPATTN_INLINE Vec<T> reference(Vec<T> row_max) const {
    constexpr T kFar = sizeof(T) == 4 ? T(0x1p28) : T(0x1p57);
    Vec<T> start = row_max;
    if (kFused) {
      start = row_max * factor;
      start = start * start < kFar * kFar ? start : splat(T(__builtin_nan("")));
    }
    return row_max == -kInfinity<T> ? Vec<T>{} : start;
  }

  // Returns the base-2 logarithms of the weights. With FMA, `reference` is factor * row_max, rounded; the rounding
  // error is the same for all keys of a row, and lse() corrects it. Without FMA, `reference` is row_max.
  SPATTN_INLINE Vec<T> exponent(Vec<T> score, Vec<T> reference) const {
    if constexpr (kFused) return multiply_subtract(score, splat(factor), reference);
    return (score - reference) * factor;
  }

  double scalar_exponent(double score, double reference) const { return (score - reference) * natural; }

  double lse(T row_max, T reference, T sum) const {
    const double ours = logarithm(double(sum));
    if (!kFused) return double(row_max) * natural + ours;
    const double error = __builtin_fma(-double(row_max), double(factor), double(reference));
    return __builtin_fma(double(row_max), natural, error * 0.69314718055994530942) + ours;
  }
};

// A number stored as high + low.
template <class T> struct Split {
  T high, low;
};

// Returns x * log2(e): converts a natural logarithm to base 2.
template <class T> Split<T> to_base_2(double x) {
  constexpr double kLog2e = 1.4426950408889634074, kRest = 2.0355273740931033e-17;
  const double product = x * kLog2e, rest = __builtin_fma(x, kLog2e, -product) + x * kRest;
  const T high = T(product);
  return {high, T(product - double(high) + rest)};
}

// Computes the exponents of the backward, relative to the log-sum-exp, with a factor of twice the precision.
template <class T> struct SplitLogits {
  Split<T> factor;

  // Rounds `high` down, so that `low` is positive and a score of -inf stays -inf. As in Logits, a factor that rounds to
  // 0 becomes 1.
  explicit SplitLogits(const Call& call) : factor(to_base_2<T>(::fabs(softmax_scale(call)))) {
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
