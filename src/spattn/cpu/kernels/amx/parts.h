// AMX operand formats: bfloat16 as is, float16 as the sum of two bfloat16 parts, high and low.
//
// terms() loads 32 adjacent terms of a row; pairs() interleaves two rows, one in each half of a lane. reference() is
// the counterpart of Logits::reference(), and Weigh converts the scores of two adjacent keys to weights. float32 would
// need three parts and six products, which are slower than multiply-adds: docs/decisions/007-amx.md.
#pragma once
#include <immintrin.h>

#include "amx/tiles.h"
#include "simd/bfloat16.h"
#include "softmax/softmax.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns 2^x: VREDUCE computes f = x - floor(x), a minimax polynomial 2^f, and VSCALEF multiplies it by 2^floor(x).
// 2^-inf is 0, NaN stays NaN.
template <int N> SPATTN_INLINE Vec<float> exp2_floor(Vec<float> x, const float (&coefficients)[N]) {
  const Vec<float> f = (Vec<float>)_mm512_reduce_ps((__m512)x, 9);  // 9: round down, suppress exceptions
  Vec<float> power = splat(coefficients[0]);
  SPATTN_UNROLL
  for (int i = 1; i < N; ++i) power = power * f + coefficients[i];
  return (Vec<float>)_mm512_scalef_ps((__m512)power, (__m512)x);
}

SPATTN_INLINE Vec<float> even_terms(BitsVec<float> pairs) { return (Vec<float>)(pairs << 16); }
SPATTN_INLINE Vec<float> odd_terms(BitsVec<float> pairs) { return (Vec<float>)(pairs & 0xffff0000); }

// Operand format of bfloat16. The AMX instructions flush subnormals to 0.
struct WholeParts {
  using E = Bfloat16;
  using Raw = RawBfloat16;
  using Row = uint16_t;
  using Bits = BitsVec<float>;
  static constexpr int kParts = 1;
  static constexpr bool kAddsInPlace = true;  // accumulate O' in the tile registers
  static constexpr float kRescale[] = {
      2.17022549e-4f, 1.24396884e-3f, 9.67884064e-3f, 5.54833412e-2f, 2.40229830e-1f, 6.93147004e-1f, 1.0f};

  // Detects queries and keys that are non-finite, or so large that a score may overflow: integer weights can represent
  // neither NaN nor infinity.
  struct Check {
    static constexpr int kLimit = 0x5d80;  // 2^60
    __mmask32 failed = 0;

    SPATTN_INLINE void look_at(Bits x) {
      const __m512i magnitude = _mm512_and_si512((__m512i)x, _mm512_set1_epi16(0x7fff));
      failed |= _mm512_cmpge_epi16_mask(magnitude, _mm512_set1_epi16(kLimit));
    }
    void look_at(const Row* row, int64_t count) {
      for (int64_t i = 0; i < count; ++i) failed |= (row[i] & 0x7fff) >= kLimit;
    }
    bool passed() const { return failed == 0; }
  };

  static SPATTN_INLINE void terms(const Row* row, float sign, Bits (&parts)[kParts], Check& check) {
    parts[0] = load<Bits>(row);
    check.look_at(parts[0]);
    if (sign != 1.0f) parts[0] = times_sign(parts[0], sign);
  }
  static SPATTN_INLINE void pairs(const Row* even, const Row* odd, Bits (&parts)[kParts]) {
    parts[0] = side_by_side(even, odd);
  }

  // Exponents are multiples of 1 / kSteps. So are references, which exceed the scaled maximum by kSlack so that no
  // exponent is positive. From kFar on, float32 has too few bits for such multiples: reference() returns NaN.
  static constexpr float kSteps = 512, kFar = 4096;
  static SPATTN_INLINE Vec<float> reference(Vec<float> row_max, Logits<float> logits) {
    const Vec<float> scaled = row_max * logits.factor + float(kSlack);
    const Vec<float> whole = (Vec<float>)_mm512_roundscale_ps((__m512)scaled, 9 << 4 | 8);  // to 9 binary places
    const Vec<float> near = whole * whole < kFar * kFar ? whole : splat(__builtin_nanf(""));
    return row_max == -kInfinity<float> ? Vec<float>{} : near;
  }

  // Computes weights with integer arithmetic. The bits of a bfloat16 x, read as an integer, are 128 * (log2(x) + 127)
  // with log2 interpolated linearly between powers of 2; kTable corrects the interpolation error. A multiply-add writes
  // 512 * exponent to the low half of a lane, then two keys share a lane. The maximum error exceeds that of rounding to
  // bfloat16 by at most 0.25 %, and the RMS error equals it. `sum` adds the rounded weights, so that the weights of the
  // output sum to 1.
  struct Weigh {
    // kTable[j] = 512 (f - (2^f - 1)) for f = (j - 1/8) / 128 modulo 1, rounded up to compensate the truncated index j.
    alignas(64) static constexpr uint8_t kTable[128] = {
        1,  2,  3,  4,  5,  6,  7,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 24, 25, 26,
        27, 28, 29, 29, 30, 31, 32, 32, 33, 34, 34, 35, 35, 36, 37, 37, 38, 38, 39, 39, 40, 40, 40, 41, 41, 42,
        42, 42, 43, 43, 43, 43, 44, 44, 44, 44, 44, 44, 44, 44, 45, 45, 45, 45, 45, 44, 44, 44, 44, 44, 44, 44,
        43, 43, 43, 43, 42, 42, 42, 41, 41, 40, 40, 40, 39, 38, 38, 37, 37, 36, 36, 35, 34, 33, 33, 32, 31, 30,
        29, 29, 28, 27, 26, 25, 24, 23, 22, 21, 19, 18, 17, 16, 15, 13, 12, 11, 9,  8,  7,  5,  4,  2};
    static constexpr float kMagic = 12582912.0f;  // x + 1.5 * 2^23 has the integer x, below 2^22, in its low bits
    static constexpr float kNone = kMagic + 1;    // lower bound; the weight is then 0
    __m512 factor, start;
    __m512i low, high;

    SPATTN_INLINE Weigh(Vec<float> reference, Logits<float> logits)
        : factor(_mm512_set1_ps(logits.factor * kSteps)),
          start((__m512)(kMagic + 127 * kSteps + 2 - reference * kSteps)),  // + 2 rounds the final shift by 2 bits
          low(_mm512_load_si512(kTable)), high(_mm512_load_si512(kTable + 64)) {}

    SPATTN_INLINE void operator()(Vec<float> even, Vec<float> odd, Bits (&parts)[kParts], Vec<float>& sum) const {
      const auto exponent = [&](Vec<float> score) {
        const __m512 found = _mm512_fmadd_ps((__m512)score, factor, start);
        return _mm512_castps_si512(_mm512_max_ps(found, _mm512_set1_ps(kNone)));
      };
      const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi32(0x01000000, 0x05040000, 0x09080000, 0x0d0c0000));
      const __m512i both = _mm512_mask_shuffle_epi8(exponent(even), 0xcccccccccccccccc, exponent(odd), up);
      const __m512i excess = _mm512_maskz_permutex2var_epi8(0x5555555555555555, low, _mm512_srli_epi16(both, 2), high);
      parts[0] = (Bits)_mm512_srli_epi16(_mm512_sub_epi16(both, excess), 2);
      sum = add_pairs(sum, parts[0]);
    }
  };
};

// Operand format of float16: two bfloat16 parts represent all 11 bits of an element, and 16 bits of a weight. The
// kernel omits the product of two low parts.
struct TwoParts {
  using E = Float16;
  using Raw = Float16;
  using Row = float;
  using Bits = BitsVec<float>;
  static constexpr int kParts = 2;
  static constexpr bool kAddsInPlace = false;
  static constexpr float kExp2[] = {
      2.17022549e-4f, 1.24396884e-3f, 9.67884064e-3f, 5.54833412e-2f, 2.40229830e-1f, 6.93147004e-1f, 1.0f};
  static constexpr const auto& kRescale = kExp2;

  // Checks nothing: a non-finite number has a NaN part, which makes the sum of its row NaN.
  struct Check {
    void look_at(const Row*, int64_t) {}
    bool passed() const { return true; }
  };

  // Splits a and b. Calls visit(p, both, mixed) for each part: `both` holds part p of a, then of b, `mixed` has them
  // interleaved.
  template <class Visit> static SPATTN_INLINE void split(Vec<float> a, Vec<float> b, Visit visit) {
    SPATTN_UNROLL
    for (int p = 0; p < kParts; ++p) {
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      const Bits mixed = alternate(bit_cast<__m512i>(both));
      a -= even_terms(mixed), b -= odd_terms(mixed);
      visit(p, both, mixed);
    }
  }

  static SPATTN_INLINE void terms(const Row* row, float sign, Bits (&parts)[kParts], Check&) {
    const Vec<float> a = load<Vec<float>>(row), b = load<Vec<float>>(row + kTileColumns);
    split(a * sign, b * sign, [&](int p, __m512bh both, Bits) { parts[p] = bit_cast<Bits>(both); });
  }
  static SPATTN_INLINE void pairs(const Row* even, const Row* odd, Bits (&parts)[kParts]) {
    const Vec<float> a = load<Vec<float>>(even), b = load<Vec<float>>(odd);
    split(a, b, [&](int p, __m512bh, Bits mixed) { parts[p] = mixed; });
  }

  static SPATTN_INLINE Vec<float> reference(Vec<float> row_max, Logits<float> logits) {
    return logits.reference(row_max);
  }

  struct Weigh {
    Vec<float> reference;
    Logits<float> logits;

    SPATTN_INLINE Weigh(Vec<float> reference, Logits<float> logits) : reference(reference), logits(logits) {}

    // Truncates the parts instead of rounding: cheaper, and as accurate.
    SPATTN_INLINE void operator()(Vec<float> even, Vec<float> odd, Bits (&parts)[kParts], Vec<float>& sum) const {
      even = exp2_floor(logits.exponent(even, reference), kExp2);
      odd = exp2_floor(logits.exponent(odd, reference), kExp2);
      sum += even + odd;
      SPATTN_UNROLL
      for (int p = 0; p < kParts; ++p) {
        const Bits of_even = (Bits)even & 0xffff0000, of_odd = (Bits)odd & 0xffff0000;
        parts[p] = (Bits)even >> 16 | of_odd;
        even -= (Vec<float>)of_even, odd -= (Vec<float>)of_odd;
      }
    }
  };
};

}  // namespace SPATTN_ISA
}  // namespace spattn
