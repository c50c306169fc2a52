// What AMX multiplies: bfloat16 as it is, float16 as two bfloat16 parts. `terms` are 32 neighbouring terms of a row,
// `pairs` two rows' terms side by side, one in each half of a lane. float32 would need three parts and six products, which is
// slower than multiply-adds: see docs/decisions/007-amx.md.
#pragma once
#include <immintrin.h>

#include "amx.h"
#include "exp2.h"
#include "pairs.h"

namespace spattn {
namespace SPATTN_ISA {

// 2^x by the processor's own splitting of x: f = x - floor(x) and a multiplication by 2^floor(x). A minimax polynomial
// on [0, 1]; 2^-inf is 0, NaN stays NaN.
template <int N> SPATTN_INLINE Vec<float> exp2_floor(Vec<float> x, const float (&coefficients)[N]) {
  const Vec<float> f = (Vec<float>)_mm512_reduce_ps((__m512)x, 9);  // down, without a flag for inexact results
  Vec<float> power = splat(coefficients[0]);
  SPATTN_UNROLL
  for (int i = 1; i < N; ++i) power = power * f + coefficients[i];
  return (Vec<float>)_mm512_scalef_ps((__m512)power, (__m512)x);
}

// a0 b0 a1 b1 ... of two vectors of bfloat16 in one, first all of a.
SPATTN_INLINE BitsVec<float> alternate(__m512bh both) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (BitsVec<float>)_mm512_permutexvar_epi16((__m512i)kOrder, bit_cast<__m512i>(both));
}

SPATTN_INLINE Vec<float> even_terms(BitsVec<float> pairs) { return (Vec<float>)(pairs << 16); }
SPATTN_INLINE Vec<float> odd_terms(BitsVec<float> pairs) { return (Vec<float>)(pairs & 0xffff0000); }

// bfloat16. The instructions take subnormal numbers for 0.
struct WholeParts {
  using E = Bfloat16;
  using Raw = RawBfloat16;  // rows as they are packed from
  using Row = uint16_t;
  using Bits = BitsVec<float>;
  static constexpr int kParts = 1;
  static constexpr bool kAddsInPlace = true;  // O' += V' P' on the tiles
  static constexpr float kExp2[] = {1.35341668e-2f, 5.20114638e-2f, 2.41442755e-1f, 6.93003833e-1f, 1.0000026f};

  // Finds numbers that are not finite.
  struct Check {
    __mmask32 failed = 0;

    SPATTN_INLINE void look_at(Bits x) {
      const __m512i exponent = _mm512_set1_epi16(0x7f80);
      failed |= _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)x, exponent), exponent);
    }
    void look_at(const Row* row, int64_t count) {
      for (int64_t i = 0; i < count; ++i) failed |= (row[i] & 0x7f80) == 0x7f80;
    }
    bool passed() const { return failed == 0; }
  };

  static SPATTN_INLINE void terms(const Row* row, float sign, Bits (&parts)[kParts], Check& check) {
    parts[0] = load<Bits>(row);
    check.look_at(parts[0]);
    if (sign != 1.0f) parts[0] = Paired::times(parts[0], sign);
  }
  static SPATTN_INLINE void pairs(const Row* even, const Row* odd, Bits (&parts)[kParts], Check& check) {
    parts[0] = Paired::widen(reinterpret_cast<const char*>(even)) |
               Paired::widen(reinterpret_cast<const char*>(odd)) << 16;
    check.look_at(parts[0]);
  }
  // Weights of two neighbouring keys.
  static SPATTN_INLINE void join(Vec<float> even, Vec<float> odd, Bits (&parts)[kParts]) {
    parts[0] = alternate(_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
  }
};

// float16, whose 11 bits two bfloat16 parts hold; weights keep 16 bits. The product of the low parts is left out.
struct TwoParts {
  using E = Float16;
  using Raw = Float16;
  using Row = float;
  using Bits = BitsVec<float>;
  static constexpr int kParts = 2;
  static constexpr bool kAddsInPlace = false;
  static constexpr float kExp2[] = {2.17022549e-4f, 1.24396884e-3f, 9.67884064e-3f, 5.54833412e-2f,
                                    2.40229830e-1f, 6.93147004e-1f, 1.0f};

  struct Check {
    __mmask16 failed = 0;

    SPATTN_INLINE void look_at(Vec<float> x) { failed |= _mm512_fpclass_ps_mask((__m512)x, 0x99); }  // infinite, NaN
    void look_at(const Row* row, int64_t count) {
      for (int64_t i = 0; i < count; i += kTileColumns) look_at(load<Vec<float>>(row + i));
    }
    bool passed() const { return failed == 0; }
  };

  // visit(part, both) for every part of two vectors, `both` as a conversion leaves them.
  template <class Visit> static SPATTN_INLINE void split(Vec<float> a, Vec<float> b, Visit visit) {
    SPATTN_UNROLL
    for (int p = 0; p < kParts; ++p) {
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      const Bits mixed = alternate(both);
      a -= even_terms(mixed), b -= odd_terms(mixed);
      visit(p, both, mixed);
    }
  }

  static SPATTN_INLINE void terms(const Row* row, float sign, Bits (&parts)[kParts], Check& check) {
    const Vec<float> a = load<Vec<float>>(row), b = load<Vec<float>>(row + kTileColumns);
    check.look_at(a), check.look_at(b);
    split(a * sign, b * sign, [&](int p, __m512bh both, Bits) { parts[p] = bit_cast<Bits>(both); });
  }
  static SPATTN_INLINE void pairs(const Row* even, const Row* odd, Bits (&parts)[kParts], Check& check) {
    const Vec<float> a = load<Vec<float>>(even), b = load<Vec<float>>(odd);
    check.look_at(a), check.look_at(b);
    split(a, b, [&](int p, __m512bh, Bits mixed) { parts[p] = mixed; });
  }
  static SPATTN_INLINE void join(Vec<float> even, Vec<float> odd, Bits (&parts)[kParts]) {
    split(even, odd, [&](int p, __m512bh, Bits mixed) { parts[p] = mixed; });
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
