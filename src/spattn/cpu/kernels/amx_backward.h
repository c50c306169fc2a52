// One work item of the bfloat16 backward on AMX tiles: the five products of backward.h, block by block of keys.
//
// S' = K Q' and dP' = V dO' take K and V as they lie; P' and dS' come out as the left factors of dV += P' dO and
// dK += dS' Q, which are added to the unit's sums where they lie, and dS' also as the right factor of dQ' += K' dS'.
#pragma once
#include "amx.h"
#include "amx_backward_rows.h"
#include "amx_backward_scratch.h"
#include "amx_backward_weights.h"
#include "backward.h"

namespace spattn {
namespace SPATTN_ISA {

// C = A B, or C += A B, for 2 by `columns` tiles of C.
SPATTN_INLINE void multiply_strip(const TileFactor& a, TileFactor b, int64_t steps, bool add, float* c, int64_t ld,
                                  int64_t columns) {
  for (; columns >= 2; columns -= 2, c += 2 * kTileColumns) {
    tile_product<1, 2, 2>(a, b, steps, add, c, ld);
    b.data = b.at(2, 0, 0);
  }
  if (columns) tile_product<1, 2, 1>(a, b, steps, add, c, ld);
}

// One entry of the list.
struct TileEntry {
  Tile place;
  KeyRows keys, values;
  int64_t rows;   // key cells, rounded up to whole blocks
  int64_t cells;  // query cells
  Mask mask;

  bool straight() const { return place.even() && rows == place.cells(); }  // keys evenly spaced, none of them padding
};

// to = rows * columns of a block of keys, for the vectors of queries [begin, end).
inline void multiply_keys(KeyRows rows, int64_t key, int64_t depth, const uint32_t* columns, int64_t begin, int64_t end,
                          float* to, const TileBackwardScratch& s) {
  const int64_t ld = 4 * s.ld_query;
  const TileFactor a = {rows.data + key * rows.ld, rows.ld, kTileRows * rows.ld, kTileBytes, 0};
  const TileFactor b = {columns + begin * kTileColumns, ld, kTileBytes, kPairRows * ld, 0};
  multiply_strip(a, b, depth / kTileTerms, false, to + begin * kTileColumns, ld, end - begin);
}

// dK or dV of a block += left * right, over the vectors of queries [begin, end), rounded outwards to whole steps.
inline void add_to_keys(const TileEntry& entry, int64_t key, const uint16_t* left, const uint32_t* right, int64_t width,
                        int64_t begin, int64_t end, char* sums, int64_t ld_sums, int64_t origin,
                        const TileBackwardScratch& s) {
  const int64_t step = begin / 2, steps = (end + 1) / 2 - step;
  const TileFactor a = {left + step * kTileTerms, 2 * s.terms, kTileRows * 2 * s.terms, kTileBytes, 0};
  const TileFactor b = {right + step * kPairRows * width, 4 * width, kTileBytes, kPairRows * 4 * width, 0};
  float* out = reinterpret_cast<float*>(sums);
  if (entry.straight()) {
    const int64_t first = entry.place.start + key * entry.place.stride[2] - origin;
    multiply_strip(a, b, steps, true, out + first * ld_sums, entry.place.stride[2] * ld_sums * 4, width / kTileColumns);
    return;
  }
  multiply_strip(a, b, steps, false, s.partial, 4 * width, width / kTileColumns);
  for (int64_t i = 0; i < kTileTerms && key + i < entry.place.cells(); ++i) {
    const int64_t position = s.key_position[key + i];
    if (position != kPadding) add(out + (position - origin) * ld_sums, s.partial + i * width, width);
  }
}

// Vectors of queries, of `vectors`, from the first to the last one that attends to a block.
inline void find_active(const TileEntry& entry, int64_t block, int64_t& begin, int64_t& end) {
  constexpr int L = kLanes<float>;
  const auto idle = [&](int64_t at) { return !entry.mask.any(at * L, L, block * kTileTerms, kTileTerms); };
  begin = 0, end = (entry.cells + L - 1) / L;
  if (!entry.mask) return;
  while (begin < end && idle(begin)) ++begin;
  while (begin < end && idle(end - 1)) --end;
}

// P' and dS' of a block, for the vectors of queries [begin, end).
inline void find_gradients(const Call& call, const TileEntry& entry, int64_t block, int64_t begin, int64_t end,
                           TileBackwardScratch& s) {
  const int64_t key = block * kTileTerms, vectors = (entry.cells + kLanes<float> - 1) / kLanes<float>;
  const float factor = Scale<float>(call.scale).factor, scale = float(call.scale);
  multiply_keys(entry.keys, key, s.depth_key, s.query_columns, begin, end, s.scores, s);
  multiply_keys(entry.values, key, s.depth_value, s.dout_columns, begin, end, s.score_gradients, s);
  if (!entry.mask) return weigh_block<false>(block, begin, end, factor, scale, s);
  weigh_block<true>(block, begin, end, factor, scale, s);
  if (begin % 2) clear_rows(begin - 1, s);
  if (end % 2 && end < vectors) clear_rows(end, s);
}

// dQ' += K' dS' of a tile, over the blocks that each pair of vectors of queries attends to.
inline void add_to_queries(const TileEntry& entry, int64_t ld, TileBackwardScratch& s) {
  const int64_t vectors = (entry.cells + kLanes<float> - 1) / kLanes<float>;
  for (int64_t at = 0; at < vectors; at += 2) {
    const int64_t columns = vectors - at < 2 ? 1 : 2;
    const auto idle = [&](int64_t block) {
      return s.first_active[block] >= at + columns || s.last_active[block] <= at;
    };
    int64_t begin = 0, end = entry.rows / kTileTerms;
    while (begin < end && idle(begin)) ++begin;
    while (begin < end && idle(end - 1)) --end;
    if (begin == end) continue;
    const uint32_t* right = s.gradient_pairs + begin * kPairRows * s.ld_query + at * kTileColumns;
    const TileFactor b = {right, 4 * s.ld_query, kTileBytes, kPairRows * 4 * s.ld_query, 0};
    for (int64_t d = 0; d < s.depth_key; d += 2 * kTileRows) {
      const TileFactor a = {s.key_columns + d * ld + begin * kTileTerms, 2 * ld, kTileRows * 2 * ld, kTileBytes, 0};
      float* sum = s.dq_columns + d * s.ld_query + at * kTileColumns;
      multiply_strip(a, b, end - begin, true, sum, 4 * s.ld_query, columns);
    }
  }
}

// One entry of the list: what its pairs add to s.dq_columns and, where `sums` is given, to dK and dV.
inline void take_tile(const Call& call, const Component& component, int64_t number, const Head& keys,
                      const Head& values, int64_t cells, const Sums* sums, TileBackwardScratch& s) {
  const Plan& plan = call.plan;
  const int64_t ld = plan.block_kv;
  const Tile place = locate(plan.views[component.key_view + plan.key_view[number]], plan.indices[number]);
  const int64_t rows = round_up(place.cells(), kTileTerms);
  const TileEntry entry = {
      place, tile_rows(keys, place, rows, call.head_dim, s.depth_key, s.key_position, s.keys),
      tile_rows(values, place, rows, call.head_dim_v, s.depth_value, s.key_position, s.values), rows, cells,
      Mask(plan, number)};
  if (!entry.straight()) list_positions(place, s.key_position);
  if (entry.mask) unpack<float>(entry.mask, cells, s);
  pack_key_columns(entry.keys, rows, s, ld);
  if (!sums) drop_nonfinite_keys(entry.keys, place.cells(), cells, entry.mask, ld, s);
  for (int64_t block = 0; block < rows / kTileTerms; ++block) {
    int64_t &begin = s.first_active[block], &end = s.last_active[block];
    find_active(entry, block, begin, end);
    for (int64_t vector = 0; vector < (cells + kLanes<float> - 1) / kLanes<float>; ++vector) {
      if (vector < begin || vector >= end) clear_pairs(block, vector, s);
    }
    if (begin == end) continue;
    find_gradients(call, entry, block, begin, end, s);
    if (!sums) continue;
    const int64_t key = block * kTileTerms;
    const int64_t origin = sums->begin;
    add_to_keys(entry, key, s.weight_rows, s.dout_pairs, s.ld_value, begin, end, sums->dv, sums->ld_dv, origin, s);
    add_to_keys(entry, key, s.gradient_rows, s.query_pairs, s.ld_key, begin, end, sums->dk, sums->ld_dk, origin, s);
  }
  add_to_queries(entry, ld, s);
}

// s.dq from s.dq_columns; returns whether all of it is finite.
inline bool transpose_dq(TileBackwardScratch& s) {
  transpose_rows(s.dq_columns, s.ld_query, s.ld_key, s.ld_query, 1.0f, s.dq, s.ld_key);
  return all_finite(s.dq, s.ld_query * s.ld_key);
}

// A key with NaN or an infinity also reaches dQ of rows that may not attend to it, as 0 * NaN. The sum is then done
// again without such keys, so that these rows come out as if the keys were finite.
inline void tile_backward(const Call& call, int64_t batch, int64_t head, const Work& item, const Sums& sums,
                          char* scratch) noexcept {
  TileBackwardScratch s(call, scratch);
  const TileSession session;
  const Component& component = call.plan.components[item.component];
  const Head keys(call.k, batch, head / call.group), values(call.v, batch, head / call.group);
  const Tile place = locate(call.plan.views[component.query_view], item.query_tile);
  const int64_t cells = place.cells(), vectors = (cells + kLanes<float> - 1) / kLanes<float>;
  pack_queries(call, batch, head, place, s);
  if (vectors % 2) clear_rows(vectors, s);
  const auto take_all = [&](const Sums* to) {
    clear(s.dq_columns, s.depth_key * s.ld_query);
    for (int64_t e = item.begin; e < item.end; ++e) take_tile(call, component, e, keys, values, cells, to, s);
    return transpose_dq(s);
  };
  if (!take_all(&sums)) take_all(nullptr);
  write_query_gradients<Bfloat16>(call, batch, head, item, place, sums, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
