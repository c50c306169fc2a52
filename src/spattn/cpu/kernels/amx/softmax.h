// The online softmax of one column of a panel, sixteen queries: see softmax.h, whose rules it follows.
#pragma once
#include "amx/parts.h"
#include "amx/scratch.h"
#include "tile/mask.h"
#include "softmax/softmax.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kColumnChains = 4;  // independent maxima and sums; several short sums round less than a long one

// Which of kTileTerms keys the queries of a column may attend to, a few keys at a time.
struct ColumnMask {
  const char* words;  // of the first query
  __m512i offset;     // of the other ones, in bytes
  __mmask16 real;     // queries that the mask has
  __m512i bits{};     // the next keys, from the lowest bit on

  ColumnMask(const Mask& mask, int64_t row)
      : words(mask ? reinterpret_cast<const char*>(mask.bits + row * mask.words) : nullptr) {
    const __m512i rows = (__m512i)(BitsVec<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    offset = _mm512_mullo_epi32(rows, _mm512_set1_epi32(int(mask.words * 8)));
    real = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(int(mask.rows - row)), rows);
  }

  SPATTN_INLINE void start(int64_t key) {
    bits = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), real, offset, words + key / 8, 1);
  }
  SPATTN_INLINE void skip(int keys) { bits = _mm512_srli_epi32(bits, unsigned(keys)); }

  // Scores of the next key but `ahead`, -inf where a pair is not allowed.
  SPATTN_INLINE Vec<float> keep(Vec<float> score, int ahead) const {
    const __mmask16 allowed = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << ahead));
    return (Vec<float>)_mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity<float>), allowed, (__m512)score);
  }
};

// The largest score of each query of a column among the keys [begin, end), whole steps, with which `scores` begins.
// Pairs that are not allowed become -inf.
template <bool kMasked>
inline Vec<float> largest_scores(const Mask& mask, int64_t row, int64_t begin, int64_t end, float* scores) {
  using V = Vec<float>;
  V largest[kColumnChains];
  for (auto& x : largest) x = splat(-kInfinity<float>);
  ColumnMask allowed(mask, row);
  for (int64_t key = begin; key < end; key += kTileTerms) {
    if (kMasked) allowed.start(key);
    for (int step = 0; step < kTileTerms; step += kColumnChains, scores += kColumnChains * kPanel) {
      SPATTN_UNROLL
      for (int i = 0; i < kColumnChains; ++i) {
        V score = load<V>(scores + i * kPanel);
        if (kMasked) store(scores + i * kPanel, score = allowed.keep(score, i));
        largest[i] = larger(score, largest[i]);
      }
      if (kMasked) allowed.skip(kColumnChains);
    }
  }
  return larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
}

// Updates row_max and the origin of the exponents of the column that starts at cell `first`; true: sums and O have to
// be multiplied by s.rescale first. Rows that no origin suits are left to the exact path.
template <class Path> bool move_column(int64_t first, Vec<float> tile_max, float factor, AmxScratch<Path>& s) {
  using V = Vec<float>;
  const V before = load<V>(s.row_max + first);
  const IntVec<float> moved = (tile_max - before) * factor > float(kSlack);  // -inf - -inf: NaN, not greater
  if (_mm512_test_epi32_mask((__m512i)moved, (__m512i)moved) == 0) return false;
  const V row_max = moved ? tile_max : before, origin = Path::origin(row_max, factor);
  const V change = load<V>(s.origin + first) - origin;
  store(s.rescale + first, exp2_floor(before == -kInfinity<float> ? before : change, Path::kRescale));
  store(s.row_max + first, row_max);
  store(s.origin + first, origin);
  for (int i = 0; i < kTileColumns; ++i) s.exact[first + i] |= origin[i] != origin[i];
  return true;
}

// `out` = P' of `keys` keys, whole steps, from the scores of a column; updates its sums.
template <class Path>
void weigh_column(const float* scores, int64_t first, int64_t keys, float factor, bool moved, char* out,
                  AmxScratch<Path>& s) {
  using V = Vec<float>;
  const typename Path::Weigh weigh(load<V>(s.origin + first), factor);
  const int64_t part = s.tile_steps * kPanelSize;
  V sum[kColumnChains] = {};
  for (int64_t key = 0; key < keys; key += 2 * kColumnChains) {
    SPATTN_UNROLL
    for (int i = 0; i < kColumnChains; ++i, scores += 2 * kPanel, out += kPanelBytes) {
      typename Path::Bits parts[Path::kParts];
      weigh(load<V>(scores), load<V>(scores + kPanel), parts, sum[i]);
      for (int p = 0; p < Path::kParts; ++p) store(out + p * part, parts[p]);
    }
  }
  const V before = load<V>(s.row_sum + first);
  store(s.row_sum + first, (moved ? before * load<V>(s.rescale + first) : before) + add_up<kColumnChains>(sum));
}

}  // namespace SPATTN_ISA
}  // namespace spattn
