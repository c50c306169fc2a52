// What AMX multiplies: bfloat16 as it is, float32 as three bfloat16 parts. `Terms` are 32 neighbouring terms of a row,
// `Pairs` two neighbouring terms, one in each half of a lane.
#pragma once
#include <immintrin.h>

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

  // Are all numbers of the item fit for the parts? See SplitParts.
  struct Check {
    bool passed() const { return true; }
  };

  static SPATTN_INLINE void terms(const Row* row, float sign, Bits (&parts)[kParts], Check&) {
    parts[0] = load<Bits>(row);
    if (sign != 1.0f) parts[0] = Paired::times(parts[0], sign);
  }
  static SPATTN_INLINE void pairs(const Row* even, const Row* odd, Bits (&parts)[kParts], Check&) {
    parts[0] = Paired::widen(reinterpret_cast<const char*>(even)) |
               Paired::widen(reinterpret_cast<const char*>(odd)) << 16;
  }
  // Weights of two neighbouring keys; `total` takes in what they were rounded to: see Paired::join().
  static SPATTN_INLINE void join(Vec<float> even, Vec<float> odd, Bits (&parts)[kParts], Vec<float>& total) {
    parts[0] = alternate(_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
    total += even_terms(parts[0]) + odd_terms(parts[0]);
  }
  static float* normaliser(Scratch<float>& s) { return s.weight_sum; }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
