// From S' and dP' of a block of keys to P' = exp2(factor * S' - lse2) and dS' = scale * P' o (dP' - delta), rounded to
// bfloat16 and laid out as factors of the products that follow.
#pragma once
#include <immintrin.h>

#include "amx/backward_scratch.h"
#include "simd/exp2.h"
#include "forward/paired.h"

namespace spattn {
namespace SPATTN_ISA {

// Sixteen bfloat16 of one row each.
SPATTN_INLINE void store_halves(__m512i both, uint16_t* low, uint16_t* high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_castsi512_si256(both));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_extracti64x4_epi64(both, 1));
}

// Where the matrices of a block of keys start.
struct WeightBlock {
  const float *scores, *score_gradients;  // S' and dP', rows of ld_query
  uint16_t *weights, *gradients;          // P' and dS', rows of `terms`
  uint32_t* pairs;                        // dS' by pairs of keys, rows of ld_query
};

constexpr int kStretch = 4;  // pairs of keys weighed between two products

// The keys [row, row + kStretch) and those kTileRows after them, for the vector of queries that starts at `column`. The
// rounding to bfloat16 hides what one part of lse2 and of the factor leave out: as much as the rounding of lse itself.
template <bool kMasked>
void weigh_rows(WeightBlock block, int64_t row, int64_t column, float factor, float scale,
                const TileBackwardScratch& s) {
  typedef uint16_t Halves __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const int64_t ld = s.ld_query, terms = s.terms;
  const Vec<float> lse2 = load<Vec<float>>(s.lse2 + column), delta = load<Vec<float>>(s.delta + column);
  // Where a row is left out K may be infinite, and 0 * inf is NaN.
  const __mmask16 present = _mm512_cmp_ps_mask((__m512)lse2, (__m512)splat(kInfinity<float>), _CMP_NEQ_UQ);
  const BitsVec<float> allowed = load<BitsVec<float>>(s.allowed + column) >> uint32_t(row);
  SPATTN_UNROLL
  for (int i = 0; i < kStretch; ++i) {
    const auto weigh = [&](int half, __m512& weight, __m512& gradient) {
      const __m512i bit = (__m512i)splat_bits<float>(1u << (half * kTileRows + i));
      const __mmask16 keep = kMasked ? _mm512_mask_test_epi32_mask(present, (__m512i)allowed, bit) : present;
      const int64_t at = (row + half * kTileRows + i) * ld + column;
      const Vec<float> score = load<Vec<float>>(block.scores + at);
      weight = _mm512_maskz_mov_ps(keep, (__m512)Paired::exp2(score * factor - lse2));
      const Vec<float> slope = load<Vec<float>>(block.score_gradients + at) - delta;
      // Where a pair is not allowed V may be NaN, and 0 * NaN is NaN.
      const __mmask16 matters = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      gradient = _mm512_maskz_mul_ps(matters, (__m512)(slope * scale), weight);
    };
    __m512 weight[2], gradient[2];
    weigh(0, weight[0], gradient[0]);
    weigh(1, weight[1], gradient[1]);
    const __m512i weights = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1], weight[0]));
    const __m512i gradients = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(gradient[1], gradient[0]));
    const int64_t low = (row + i) * terms + column, high = low + kTileRows * terms;
    store_halves(weights, block.weights + low, block.weights + high);
    store_halves(gradients, block.gradients + low, block.gradients + high);
    store(block.pairs + (row + i) * ld + column, _mm512_permutexvar_epi16((__m512i)kOrder, gradients));
  }
}

// Zeros for a vector of queries of P' and dS' of a block, as factors of dV and dK.
inline void clear_weights(const WeightBlock& block, int64_t vector, const TileBackwardScratch& s) {
  constexpr int L = kLanes<float>;
  for (int64_t key = 0; key < kTileTerms; ++key) {
    clear(block.weights + key * s.terms + vector * L, L);
    clear(block.gradients + key * s.terms + vector * L, L);
  }
}

// The same of dS' as a factor of dQ'.
inline void clear_pairs(uint32_t* pairs, int64_t vector, const TileBackwardScratch& s) {
  for (int64_t row = 0; row < kTileRows; ++row) {
    store(pairs + row * s.ld_query + vector * kLanes<float>, Vec<float>{});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
