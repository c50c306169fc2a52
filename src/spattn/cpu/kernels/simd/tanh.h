// tanh(x), within 2 ulp; NaN stays NaN. Uses the polynomial or rational function of Cephes for small |x|, else
// 1 - 2 E / (1 + E) with E = exp(-2 |x|) and the sign of x.
#pragma once
#include <math.h>

#include "simd/exp2.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// Coefficients of tanh(x) = x + x z P(z) / Q(z), z = x^2, |x| < 0.625; the highest power comes first.
template <class T> struct Tanh;

template <> struct Tanh<float> {
  static constexpr float kNumerator[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                                         -3.33332819422e-1f};
  static constexpr float kDenominator[] = {1.0f};
};

template <> struct Tanh<double> {
  static constexpr double kNumerator[] = {-9.64399179425052238628e-1, -9.92877231001918586564e1,
                                          -1.61468768441708447952e3};
  static constexpr double kDenominator[] = {1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
                                            4.84406305325125486048e3};
};

template <class T, int N> SPATTN_INLINE Vec<T> polynomial(Vec<T> x, const T (&coefficients)[N]) {
  Vec<T> sum = splat(coefficients[0]);
  SPATTN_UNROLL
  for (int i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// Returns a / b for b from 1 to 2.
template <class V> SPATTN_INLINE V quotient(V a, V b) { return a / b; }
#if defined(__AVX512F__)
// Within 2^-27: an estimate of 14 bits and one step of Newton's method, in a third of the time of a division.
SPATTN_INLINE Vec<float> quotient(Vec<float> a, Vec<float> b) {
  const Vec<float> estimate = (Vec<float>)_mm512_rcp14_ps((__m512)b);
  const __m512 error = _mm512_fnmadd_ps((__m512)b, (__m512)estimate, _mm512_set1_ps(1.0f));
  return a * (Vec<float>)_mm512_fmadd_ps((__m512)estimate, error, (__m512)estimate);
}
#endif

template <class T> SPATTN_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> size = x < Vec<T>{} ? -x : x, square = x * x;
  Vec<T> ratio = polynomial<T>(square, Tanh<T>::kNumerator);
  if constexpr (sizeof Tanh<T>::kDenominator > sizeof(T)) ratio /= polynomial<T>(square, Tanh<T>::kDenominator);
  const Vec<T> power = exp2<T>(size * T(-2.8853900817779268147));  // -2 log2(e)
  const Vec<T> large = T(1) - quotient(power + power, T(1) + power);
  return size < T(0.625) ? x + x * (square * ratio) : x < Vec<T>{} ? -large : large;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
