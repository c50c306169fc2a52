// One work item by AMX: for each key tile and panel of queries S' = K Q', then the softmax, then O' += V' P'.
//
// One after the other: tile and vector instructions do not overlap on the processors measured, and with two or three
// key tiles in work at a time, so that no product reads what has only just been written, a step took a third longer
// (docs/decisions/007-amx.md).
#pragma once
#include "amx/pack.h"
#include "amx/softmax.h"
#include "forward/forward.h"

namespace spattn {
namespace SPATTN_ISA {

// The part of a key tile and a panel of queries that is computed.
struct Block {
  int64_t first, columns;  // of queries: the first one's cell, how many vectors of them
  int64_t begin, end;      // the keys, whole steps of products
};

// The columns from cell `first` on, at most a panel, with the keys that any of them attends to; no columns: none.
inline Block reached(const Mask& mask, int64_t first, int64_t cells, int64_t rows) {
  Block block = {first, 0, rows, 0};
  for (int64_t column = first; column < cells && column < first + kPanel; column += kTileColumns) {
    int64_t begin = 0, end = rows;
    if (mask) mask.reach(column, kTileColumns, begin, end);
    if (begin == end) continue;
    if (block.columns == 0) block.first = column;
    block.columns = (column - block.first) / kTileColumns + 1;
    block.begin = begin < block.begin ? begin : block.begin;
    block.end = end > block.end ? end : block.end;
  }
  block.begin = block.begin / kTileTerms * kTileTerms, block.end = round_up(block.end, kTileTerms);
  return block;
}

template <class Path>
void multiply(const Block& block, int64_t rows, const TileFactor& a, const TileFactor& b, int64_t steps, bool add,
              float* c) {
  char* out = reinterpret_cast<char*>(c);
  if (block.columns == 2) panel_product<Path::kParts, 2>(rows, a, b, steps, add, out);
  if (block.columns == 1) panel_product<Path::kParts, 1>(rows, a, b, steps, add, out);
}

// s.panel_scores = K Q'.
template <class Path> void multiply_keys(const Block& block, TileFactor keys, AmxScratch<Path>& s) {
  keys.data = keys.at(int(block.begin / kTileRows), 0, 0);
  const TileFactor queries = {s.query_column(block.first), kPanelBytes, kTileBytes, kPanelSize,
                              s.key_steps * kPanelSize};
  multiply<Path>(block, (block.end - block.begin) / kTileRows, keys, queries, s.key_steps, false, s.panel_scores);
}

// s.weight_tiles = P'. Where the origin of a row's exponents moves O' follows.
template <class Path> void weigh(const Block& block, const Mask& mask, float factor, AmxScratch<Path>& s) {
  for (int64_t column = 0; column < block.columns; ++column) {
    const int64_t first = block.first + column * kTileColumns;
    float* scores = s.panel_scores + column * kTileColumns;
    const auto largest = mask ? largest_scores<true>(mask, first, block.begin, block.end, scores)
                              : largest_scores<false>(mask, first, block.begin, block.end, scores);
    const bool moved = move_column(first, largest, factor, s);
    weigh_column(scores, first, block.end - block.begin, factor, moved, s.weight_tiles + column * kTileBytes, s);
    if (!moved) continue;
    const auto rescale = load<Vec<float>>(s.rescale + first);
    float* out = s.output_column(first);
    for (int64_t i = 0; i < s.value_tiles * kTileRows * kPanel; i += kPanel) {
      store(out + i, load<Vec<float>>(out + i) * rescale);
    }
  }
}

// O' += V' P', by the tile unit, or, where the accuracy of O asks for the products of a tile to be summed up before they
// meet it, through s.product: see output_block().
template <class Path> void multiply_values(const Block& block, TileFactor values, AmxScratch<Path>& s) {
  values.data = values.at(0, block.begin / kTileTerms, 0);
  const TileFactor weights = {s.weight_tiles, kPanelBytes, kTileBytes, kPanelSize, s.tile_steps * kPanelSize};
  float* out = s.output_column(block.first);
  multiply<Path>(block, s.value_tiles, values, weights, (block.end - block.begin) / kTileTerms, Path::kAddsInPlace,
                 Path::kAddsInPlace ? out : s.product);
  if (Path::kAddsInPlace) return;
  for (int64_t i = 0; i < s.value_tiles * kTileRows * kPanel; i += kPanel) {
    for (int64_t j = i; j < i + block.columns * kTileColumns; j += kTileColumns) {
      store(out + j, load<Vec<float>>(out + j) + load<Vec<float>>(s.product + j));
    }
  }
}

// Leaves queries that may attend to keys which do not pass the check to the exact path.
template <class Path>
void leave_unfit(const Call& call, const Work& item, const Head& keys, int64_t cells, AmxScratch<Path>& s) {
  leave_to_exact(call, item, cells, s, [&](int64_t position) {
    typename Path::Check check;
    read_row<typename Path::Raw>(keys.data + position * keys.position, keys.feature, call.head_dim, s.staged);
    check.look_at(s.staged, call.head_dim);
    return !check.passed();
  });
}

// O', row_max and the sums over the entries of the item. As many tiles as may stay packed at a time are taken by one
// panel after the other: a panel's own matrices then stay in the first-level cache, and the tiles pass through it.
template <class Path>
void take_entries(const Call& call, int64_t pair, const Work& item, const Head& keys, const Head& values, int64_t cells,
                  float factor, Ahead& ahead, AmxScratch<Path>& s) {
  [[maybe_unused]] const TileSession session;
  const Plan& plan = call.plan;
  const int64_t first_view = plan.components[item.component].key_view;
  const int64_t steps = (item.end - item.begin) * ((cells + kPanel - 1) / kPanel);
  bool unfit = false;
  for (int64_t i = item.begin; i < item.end;) {
    int64_t count = 0;
    for (; count < s.slots && i < item.end; ++count, ++i) {
      const int64_t e = item.query_tile % 2 ? item.begin + item.end - 1 - i : i;  // to and fro, for the cache's sake
      const int64_t view = first_view + plan.key_view[e];
      const Tile tile = locate(plan.views[view], plan.indices[e]);
      s.entries[count] = {find_tile<Path>(call, pair, view, plan.indices[e], tile, keys, values, s), Mask(plan, e)};
      unfit |= s.entries[count].tile.unfit;
    }
    for (int64_t first = 0; first < cells; first += kPanel) {
      for (const Entry* entry = s.entries; entry < s.entries + count; ++entry) {
        const Block block = reached(entry->mask, first, cells, entry->tile.rows);
        ahead.run(steps);
        if (block.columns == 0) continue;
        multiply_keys(block, entry->tile.keys, s);
        weigh(block, entry->mask, factor, s);
        multiply_values(block, entry->tile.values, s);
      }
    }
  }
  if (unfit) leave_unfit(call, item, keys, cells, s);
}

// s.output = O, rows of ld_value, from the columns of O'.
template <class Path> void transpose_output(int64_t cells, AmxScratch<Path>& s) {
  for (int64_t first = 0; first < cells; first += kTileColumns) {
    const float* from = s.output_column(first);
    for (int64_t d = 0; d < s.ld_value; d += kTileRows, from += kTileRows * kPanel) {
      Vec<float> block[kTileRows];
      SPATTN_UNROLL
      for (int i = 0; i < kTileRows; ++i) block[i] = load<Vec<float>>(from + i * kPanel);
      transpose<float>(block);
      SPATTN_UNROLL
      for (int i = 0; i < kTileRows; ++i) store(s.output + (first + i) * s.ld_value + d, block[i]);
    }
  }
}

template <class Path>
void amx_forward(const Call& call, int64_t batch, int64_t head, const Work& item, char* scratch) noexcept {
  using E = typename Path::E;
  AmxScratch<Path> s(call, scratch);
  const Plan& plan = call.plan;
  const Component& component = plan.components[item.component];
  const int64_t heads_kv = call.heads_q / call.group, head_kv = head / call.group;
  const Head queries(call.q, batch, head), keys(call.k, batch, head_kv), values(call.v, batch, head_kv);
  const Tile tile = locate(plan.views[component.query_view], item.query_tile);
  prefetch_rows(queries, tile, call.head_dim * int64_t(sizeof(typename E::Storage)));
  const int64_t cells = list_positions(tile, s.query_position);
  const Scale<float> scale(call.scale);
  const int64_t columns = (cells + kTileColumns - 1) / kTileColumns, panels = (columns + 1) / 2;
  leave_marked(call, batch, head, item, cells, s);
  pack_queries<Path>(queries, cells, scale.sign, call, s);
  reset_softmax(columns, s);
  memset(s.origin, 0, size_t(columns * kTileBytes));
  memset(s.output_tiles, 0, size_t(panels * s.value_tiles * kPanelSize));
  Ahead ahead(call, item, Head(call.out, batch, head), queries, keys, values, sizeof(typename E::Storage), true);
  take_entries<Path>(call, batch * heads_kv + head_kv, item, keys, values, cells, scale.factor, ahead, s);
  transpose_output(cells, s);
  finish_item<E>(call, batch, head, item, cells, scale, s.row_sum, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
