// Operands of the AMX backward: their layout, the packing of queries (once per item) and keys (once per tile), and the
// conversion of S' and dP' to P' and dS', which are bfloat16 operands of the next products.
#pragma once
#include <immintrin.h>

#include "amx/tiles.h"
#include "backward/queries.h"
#include "backward/scratch.h"
#include "forward/paired.h"
#include "kernels.h"
#include "simd/bfloat16.h"
#include "softmax/dropout.h"
#include "softmax/logits.h"
#include "softmax/score.h"
#include "softmax/weights.h"
#include "tile/item.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Operands are zero-padded to multiples of kTileTerms in the dimension over which a product sums. S', dP', P' and dS'
// have one row per key. A block has kTileTerms keys; its keys i and i + kTileRows form a pair in dQ' = K' dS'.
struct TileBackwardScratch {
  Widths<float> width;
  int64_t depth_key, depth_value;  // head_dim and head_dim_v, rounded up to multiples of kTileTerms
  int64_t terms;                   // width.query, rounded up to a multiple of kTileTerms
  int64_t blocks;                  // blocks per tile

  GradientRows<float> rows;
  QueryRows<uint16_t> raw;                 // bfloat16 rows of depth_key or depth_value features
  uint32_t *query_columns, *dout_columns;  // (depth / 2, width.query): pairs of features
  uint32_t *query_pairs, *dout_pairs;      // (terms / 2, width.key or width.value): pairs of queries
  uint16_t *key_rows, *value_rows;         // (block_kv, depth): copies of K and V that are not read in place
  uint16_t* key_columns;                   // (depth_key, block_kv): K', the keys of a pair adjacent
  float *scores, *score_gradients;         // (kTileTerms, width.query): S' and dP' of a block
  Score<float> score;
  Dropout<float> dropout;               // its keys are those of a block
  uint32_t* allowed;                    // (width.query): mask of a block, one bit per key
  uint16_t *weights, *gradients;        // (kTileTerms, terms): P' and dS' of a block
  uint32_t* gradient_pairs;             // (block_kv / 2, width.query): dS' of a key tile, pairs of keys
  int64_t *first_active, *last_active;  // (blocks): KeyBlock::begin and end of each block
  float* dq_columns;                    // (depth_key, width.query): dQ'
  float* partial;                       // (kTileTerms, width.key or width.value): dK or dV of a block, or O dO'

  TileBackwardScratch(const Call& call, Arena& arena)
      : width(call), depth_key(round_up(call.head_dim, kTileTerms)), depth_value(round_up(call.head_dim_v, kTileTerms)),
        terms(round_up(width.query, kTileTerms)), blocks(call.plan.block_kv / kTileTerms), rows(call, width, arena),
        raw(width.query, depth_key, depth_value, arena), score(call, kTileTerms, width.query, 1, arena),
        dropout(call, width.query, kTileTerms, arena) {
    const int64_t block_kv = call.plan.block_kv;
    query_columns = arena.array<uint32_t>(depth_key / 2 * width.query);
    dout_columns = arena.array<uint32_t>(depth_value / 2 * width.query);
    query_pairs = arena.array<uint32_t>(terms / 2 * width.key);
    dout_pairs = arena.array<uint32_t>(terms / 2 * width.value);
    key_rows = arena.array<uint16_t>(block_kv * depth_key);
    value_rows = arena.array<uint16_t>(block_kv * depth_value);
    key_columns = arena.array<uint16_t>(depth_key * block_kv);
    scores = arena.array<float>(kTileTerms * width.query);
    score_gradients = arena.array<float>(kTileTerms * width.query);
    allowed = arena.array<uint32_t>(width.query);
    weights = arena.array<uint16_t>(kTileTerms * terms);
    gradients = arena.array<uint16_t>(kTileTerms * terms);
    gradient_pairs = arena.array<uint32_t>(block_kv / 2 * width.query);
    first_active = arena.array<int64_t>(blocks);
    last_active = arena.array<int64_t>(blocks);
    dq_columns = arena.array<float>(depth_key * width.query);
    partial = arena.array<float>(kTileTerms * (width.key > width.value ? width.key : width.value));
  }

  // Returns dS' of a block as the right operand of dQ' += K' dS'.
  uint32_t* pairs_of(int64_t block) const { return gradient_pairs + block * kTileTerms / 2 * width.query; }
};

constexpr int64_t kPairRows = kTileTerms / 2;  // rows of a tile of B, each of which holds pairs of terms

// Interleaves pairs of rows: row p of `to` holds, for each feature, rows 2 p and 2 p + 1 of `from`. Pads with zeros.
inline void pack_pairs(const uint16_t* from, int64_t depth, int64_t rows, uint32_t* to, int64_t ld, int64_t terms) {
  for (int64_t row = 0; row < rows; row += 2, from += 2 * depth, to += ld) {
    for (int64_t j = 0; j < ld; j += kLanes<float>) {
      const char *even = reinterpret_cast<const char*>(from + j), *odd = even + 2 * depth;
      store(to + j, side_by_side(even, odd));
    }
  }
  clear(to, (terms - rows) / 2 * ld);
}

// Packs the rows of an item and computes delta, the diagonal of O dO'. The same instructions compute dP' = V dO', so
// that a row with a single key, where O = V, has dS = 0 exactly.
inline void pack_queries(const Item& item, const Tile& tile, TileBackwardScratch& s) {
  const int64_t ld = s.width.query;
  const QueryRows<uint16_t>& raw = s.raw;
  s.score.begin(item.batch, item.head);
  gather_item<RawBfloat16>(item, tile, raw, s.rows);
  if (s.dropout) s.dropout.list_queries(item.batch, item.head, s.rows.position.query, ld);
  const auto pack_columns = [&](const uint16_t* from, int64_t depth, float sign, uint32_t* to) {
    transpose_rows<Paired>(reinterpret_cast<const uint32_t*>(from), depth / 2, ld, depth / 2, sign, to, ld);
  };
  pack_columns(raw.query, s.depth_key, Logits<float>(item.call).sign, s.query_columns);
  pack_columns(raw.dout, s.depth_value, 1, s.dout_columns);
  pack_pairs(raw.query, s.depth_key, ld, s.query_pairs, s.width.key, s.terms);
  pack_pairs(raw.dout, s.depth_value, ld, s.dout_pairs, s.width.value, s.terms);
  for (int64_t first = 0; first < ld; first += kTileRows) {
    const TileFactor out = {raw.out + first * s.depth_value, 2 * s.depth_value, 0, kTileBytes, 0};
    const TileFactor dout = {s.dout_columns + first, 4 * ld, 0, kPairRows * 4 * ld, 0};
    tile_product<1, 1>(out, dout, s.depth_value / kTileTerms, false, s.partial, kTileBytes);
    for (int i = 0; i < kTileRows; ++i) s.rows.delta[first + i] = s.partial[i * kTileColumns + i];
  }
  subtract_dlse(item, tile.cells(), 1.0f, s.rows);
}

// Computes s.key_columns = K' for the block of keys from `key` on. Transposes 16 x 16 elements of 32 bits, each of
// which holds one feature of both keys of a pair.
inline void pack_key_columns(Operand<uint16_t> keys, int64_t key, int64_t ld, TileBackwardScratch& s) {
  constexpr int L = kLanes<float>;
  using Vector = BitsVec<float>;
  const auto pairs = [&](int64_t row, int64_t d) { return load<Vector>(keys.data + (key + row) * keys.ld + d); };
  for (int64_t d = 0; d < s.depth_key; d += kTileTerms) {
    uint16_t* out = s.key_columns + d * ld + key;
    Vec<float> even[L], odd[L];
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) even[i] = (Vec<float>)((pairs(i, d) & 0xffff) | pairs(L + i, d) << 16);
    transpose<float>(even);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) store(out + 2 * i * ld, even[i]);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) odd[i] = (Vec<float>)(pairs(i, d) >> 16 | (pairs(L + i, d) & 0xffff0000));
    transpose<float>(odd);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) store(out + (2 * i + 1) * ld, odd[i]);
  }
}

// Stores the halves of a register, sixteen bfloat16 each, to two rows.
SPATTN_INLINE void store_halves(__m512i both, uint16_t* low, uint16_t* high) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_castsi512_si256(both));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_extracti64x4_epi64(both, 1));
}

constexpr int kStretch = 4;  // pairs of keys per call of weigh_rows()

// Computes P' and dS' for one vector of queries, and for the keys [row, row + kStretch) and the same range shifted by
// kTileRows. With a score function, also writes dS' with respect to its results, in place of dP', and reads the
// derivatives of a tile whose first column is `first`. Ignores the low parts of lse2 and the factor, which matter less
// than the rounding to bfloat16.
template <bool kMasked, bool kScored, bool kDrops>
void weigh_rows(int64_t row, int64_t column, Logits<float> logits, float scale, uint32_t* pairs, int64_t first,
                const TileBackwardScratch& s) {
  const int64_t ld = s.width.query, terms = s.terms;
  const Vec<float> lse2 = load<Vec<float>>(s.rows.lse2 + column), delta = load<Vec<float>>(s.rows.delta + column);
  // The weights of skipped rows may be NaN: an infinite K times their zero query.
  const __mmask16 present = _mm512_cmp_ps_mask((__m512)lse2, (__m512)splat(kInfinity<float>), _CMP_NEQ_UQ);
  const BitsVec<float> allowed = load<BitsVec<float>>(s.allowed + column) >> uint32_t(row);
  Source<float> derivative = {};
  if constexpr (kScored) derivative = s.score.derivative();
  SPATTN_UNROLL
  for (int i = 0; i < kStretch; ++i) {
    const auto weigh = [&](int half, __m512& weight, __m512& gradient) {
      const __m512i bit = (__m512i)splat_bits<float>(1u << (half * kTileRows + i));
      const __mmask16 keep = kMasked ? _mm512_mask_test_epi32_mask(present, (__m512i)allowed, bit) : present;
      const int64_t at = (row + half * kTileRows + i) * ld + column;
      weight = keep_weight(exp2<float, CoarseExp2>(logits.exponent(load<Vec<float>>(s.scores + at), lse2)), keep);
      Vec<float> product = load<Vec<float>>(s.score_gradients + at);
      [[maybe_unused]] IntVec<float> kept;
      if constexpr (kDrops) {
        kept = s.dropout.queries(column)(s.dropout.one_key(row + half * kTileRows + i));
        product = kept ? product * s.dropout.factor() : Vec<float>{};
      }
      Vec<float> difference = product - delta;
      if constexpr (kScored) {
        store(s.score_gradients + at, score_gradient(weight, difference));
        const float* const factor = derivative.data + (row + half * kTileRows + i) * derivative.step;
        difference *= derivative.vector ? load<Vec<float>>(factor + column - first) : splat(*factor);
      }
      gradient = score_gradient(weight, difference * scale);
      if constexpr (kDrops) weight = (__m512)(kept ? (Vec<float>)weight * s.dropout.factor() : Vec<float>{});
    };
    __m512 weight[2], gradient[2];
    weigh(0, weight[0], gradient[0]);
    weigh(1, weight[1], gradient[1]);
    const __m512i weights = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1], weight[0]));
    const __m512i gradients = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(gradient[1], gradient[0]));
    const int64_t low = (row + i) * terms + column, high = low + kTileRows * terms;
    store_halves(weights, s.weights + low, s.weights + high);
    store_halves(gradients, s.gradients + low, s.gradients + high);
    store(pairs + (row + i) * ld + column, alternate(gradients));
  }
}

// Clears P' and dS' of a block, the left operands of dV and dK, for one vector of queries.
inline void clear_weights(int64_t vector, const TileBackwardScratch& s) {
  constexpr int L = kLanes<float>;
  for (int64_t key = 0; key < kTileTerms; ++key) {
    clear(s.weights + key * s.terms + vector * L, L);
    clear(s.gradients + key * s.terms + vector * L, L);
  }
}

// Clears dS' of a block, the right operand of dQ', for one vector of queries.
inline void clear_pairs(uint32_t* pairs, int64_t vector, const TileBackwardScratch& s) {
  for (int64_t row = 0; row < kTileRows; ++row) {
    store(pairs + row * s.width.query + vector * kLanes<float>, Vec<float>{});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
