// 2^x for x <= 64, the range of the softmax.
//
// Splits x = n + f with n integral and |f| <= 1/2. A minimax polynomial gives 2^f with a relative error below 2.4e-9
// (float) or 3.1e-18 (double) before rounding; adding n to the exponent field multiplies by 2^n. The result is within
// 1 ulp, 1.25 without FMA. Results below the normal range are exactly 0, as 2^-inf is for masked pairs. NaN stays NaN.
#pragma once
#include "simd/native.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct Exp2;

template <> struct Exp2<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr float kLowest = -127.0f;
  static constexpr float kRound = 12582912.0f + 127.0f;  // x + 1.5 * 2^23 + bias has n + bias in its low bits
  static constexpr float kCoefficients[] = {1.5345812e-4f,  1.3399931e-3f,  9.6184890e-3f, 5.5503288e-2f,
                                            2.40226469e-1f, 6.93147206e-1f, 1.0f};
};

template <> struct Exp2<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr double kLowest = -1023.0;
  static constexpr double kRound = 6755399441055744.0 + 1023.0;
  static constexpr double kCoefficients[] = {
      4.4352809446103361611e-10, 7.0741056262456593708e-9, 1.0178198033328527662e-7, 1.3215433089594629037e-6,
      1.52527334899608046e-5,    1.5403530462514613026e-4, 1.3333558146789950323e-3, 9.6181291075883350833e-3,
      5.5504108664819921483e-2,  2.4022650695910156205e-1, 6.9314718055994533046e-1, 1.0};
};

template <class T, class Spec = Exp2<T>> SPATTN_INLINE Vec<T> exp2(Vec<T> x) {
  x = larger(splat(Spec::kLowest), x);  // keeps NaN
  const Vec<T> shifted = x + Spec::kRound;
  const Vec<T> f = x - (shifted - Spec::kRound);
  Vec<T> power = splat(Spec::kCoefficients[0]);
  SPATTN_UNROLL
  for (int i = 1; i < int(sizeof Spec::kCoefficients / sizeof(T)); ++i) power = power * f + Spec::kCoefficients[i];
  return power * (Vec<T>)((BitsVec<T>)shifted << Spec::kMantissaBits);
}

#if defined(__AVX512F__)
// As accurate with fewer instructions: x = n / 16 + f with |f| <= 1/32, and one register is a table of 2^(i / 16). The
// entries have i << 19 subtracted, so that adding n << 19 sets the exponent.
template <> SPATTN_INLINE Vec<float> exp2<float, Exp2<float>>(Vec<float> x) {
  constexpr BitsVec<float> kPowers = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                                      0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                      0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  constexpr float kRound = 786432.0f;                                                           // 1.5 * 2^19
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);  // true for NaN
  const Vec<float> shifted = x + kRound, f = x - (shifted - kRound);
  const BitsVec<float> entry = (BitsVec<float>)_mm512_permutexvar_epi32((__m512i)shifted, (__m512i)kPowers);
  const Vec<float> power = (Vec<float>)(entry + ((BitsVec<float>)shifted << 19));
  const Vec<float> slope = (5.55054098e-2f * f + 2.40233555e-1f) * f + 6.93147182e-1f;  // (2^f - 1) / f
  return (Vec<float>)_mm512_maskz_fmadd_ps(normal, (__m512)(slope * f), (__m512)power, (__m512)power);
}
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
