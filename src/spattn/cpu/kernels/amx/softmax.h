// Online softmax of one tile column, sixteen queries; same algorithm as softmax/softmax.h.
#pragma once
#include "amx/parts.h"
#include "amx/panel.h"
#include "tile/mask.h"
#include "softmax/softmax.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kColumnChains = 4;  // independent maxima and sums; short sums have a smaller rounding error

// Mask of kTileTerms keys by the queries of a tile column.
struct ColumnMask {
  const char* words;  // mask row of the first query
  __m512i offset;     // bytes from it to the row of each query
  __mmask16 real;     // queries that have a mask row
  __m512i bits{};     // bits of the next keys, lowest first

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

  // Returns the queries that may attend to the key at bit `ahead`.
  SPATTN_INLINE __mmask16 allowed(int ahead) const {
    return _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << ahead));
  }
};

// Returns the maximum score of each query in a tile column over the keys [begin, end), which are multiples of
// kTileTerms, and writes -inf to masked pairs. `scores` starts at key `begin`.
template <bool kMasked>
inline Vec<float> largest_scores(const Mask& mask, int64_t row, int64_t begin, int64_t end, float* scores) {
  using V = Vec<float>;
  V largest[kColumnChains];
  for (auto& x : largest) x = splat(-kInfinity<float>);
  ColumnMask column(mask, row);
  for (int64_t key = begin; key < end; key += kTileTerms) {
    if (kMasked) column.start(key);
    for (int step = 0; step < kTileTerms; step += kColumnChains, scores += kColumnChains * kPanel) {
      SPATTN_UNROLL
      for (int i = 0; i < kColumnChains; ++i) {
        V score = load<V>(scores + i * kPanel);
        if (kMasked) store(scores + i * kPanel, score = Logits<float>::masked(score, column.allowed(i)));
        largest[i] = larger(score, largest[i]);
      }
      if (kMasked) column.skip(kColumnChains);
    }
  }
  return larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
}

// Updates row_max and `reference`, and rescales row_sum, of the tile column at cell `first`. Returns whether O must be
// multiplied by `rescale`. Rows with a NaN reference take the float64 fallback.
template <class Path>
bool move_column(int64_t first, Vec<float> tile_max, Logits<float> logits, const RowStatistics<float>& rows,
                 const FallbackRowBuffer& exact) {
  using V = Vec<float>;
  const V before = load<V>(rows.row_max + first);
  const IntVec<float> moved = (tile_max - before) * logits.factor > float(kSlack);  // false if both are -inf: NaN
  if (_mm512_test_epi32_mask((__m512i)moved, (__m512i)moved) == 0) return false;
  const V row_max = moved ? tile_max : before, reference = Path::reference(row_max, logits);
  const V change = load<V>(rows.reference + first) - reference;
  const V rescale = exp2_floor(before == -kInfinity<float> ? before : change, Path::kRescale);
  store(rows.rescale + first, rescale);
  store(rows.row_sum + first, load<V>(rows.row_sum + first) * rescale);
  store(rows.row_max + first, row_max);
  store(rows.reference + first, reference);
  for (int i = 0; i < kTileColumns; ++i) exact.chosen[first + i] |= reference[i] != reference[i];
  return true;
}

// Computes P' from the scores of one tile column, writes it to `out` with its parts `part_bytes` apart, and adds it to
// row_sum. `keys` is a multiple of kTileTerms.
template <class Path>
void weigh_column(const float* scores, int64_t first, int64_t keys, Logits<float> logits, char* out, int64_t part_bytes,
                  const RowStatistics<float>& rows) {
  using V = Vec<float>;
  const typename Path::Weigh weigh(load<V>(rows.reference + first), logits);
  V sum[kColumnChains] = {};
  for (int64_t key = 0; key < keys; key += 2 * kColumnChains) {
    SPATTN_UNROLL
    for (int i = 0; i < kColumnChains; ++i, scores += 2 * kPanel, out += kPanelBytes) {
      typename Path::Bits parts[Path::kParts];
      weigh(load<V>(scores), load<V>(scores + kPanel), parts, sum[i]);
      for (int p = 0; p < Path::kParts; ++p) store(out + p * part_bytes, parts[p]);
    }
  }
  store(rows.row_sum + first, load<V>(rows.row_sum + first) + add_up<kColumnChains>(sum));
}

}  // namespace SPATTN_ISA
}  // namespace spattn
