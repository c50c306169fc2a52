// One work item by AMX. A step is a key tile and up to a panel of queries: S' = K Q', then the softmax, then
// O' += V' P'. Three steps are in work, so that both products read operands that have been there for a while.
#pragma once
#include "amx_pack.h"
#include "amx_softmax.h"
#include "forward.h"

namespace spattn {
namespace SPATTN_ISA {

struct Step {
  PackedTile tile;
  int64_t entry, first, columns;  // of queries: the first one's cell, how many vectors of them
  int64_t begin, end;             // the keys, whole steps of products, they attend to
  int buffer;                     // of two
  bool moved[2];                  // multiply the column's O' by `rescale` first
  Vec<float> rescale[2];
};

// C = A B for whole panels or one column of them, any even number of tiles of C below each other and perhaps one more.
template <int kParts>
void panel_product(int64_t tiles, TileFactor a, const TileFactor& b, int64_t columns, int64_t steps, bool add,
                   float* c) {
  constexpr int64_t kTwo = 2 * kTileRows * kPanel;
  for (; tiles > 1; tiles -= 2, a.data = a.at(2, 0, 0), c += kTwo) {
    if (columns == 2) tile_product<2, 2, kParts>(a, b, steps, add, c, kPanelBytes);
    if (columns == 1) tile_product<2, 1, kParts>(a, b, steps, add, c, kPanelBytes);
  }
  if (tiles && columns == 2) tile_product<1, 2, kParts>(a, b, steps, add, c, kPanelBytes);
  if (tiles && columns == 1) tile_product<1, 1, kParts>(a, b, steps, add, c, kPanelBytes);
}

template <class Path> void multiply_keys(const Step& step, const AmxScratch<Path>& s) {
  TileFactor keys = step.tile.keys;
  keys.data = keys.at(int(step.begin / kTileRows), 0, 0);
  const TileFactor queries = {s.query_column(step.first), kPanelBytes, kTileBytes, kPanelSize,
                              s.key_steps * kPanelSize};
  panel_product<Path::kParts>((step.end - step.begin) / kTileRows, keys, queries, step.columns, s.key_steps, false,
                              s.scores_of[step.buffer]);
}

template <class Path> void weigh(const Plan& plan, Step& step, float factor, AmxScratch<Path>& s) {
  const Mask mask(plan, step.entry);
  for (int64_t column = 0; column < step.columns; ++column) {
    const int64_t first = step.first + column * kTileColumns;
    float* scores = s.scores_of[step.buffer] + column * kTileColumns;
    const auto largest = mask ? largest_scores<true>(mask, first, step.begin, step.end, scores)
                              : largest_scores<false>(mask, first, step.begin, step.end, scores);
    const bool moved = step.moved[column] = move_column(first, largest, factor, s);
    if (moved) step.rescale[column] = load<Vec<float>>(s.rescale + first);
    weigh_column(scores, first, step.end - step.begin, factor, moved,
                 s.weight_tiles[step.buffer] + column * kTileBytes, s);
  }
}

template <class Path> void rescale_output(const Step& step, AmxScratch<Path>& s) {
  for (int64_t column = 0; column < step.columns; ++column) {
    if (!step.moved[column]) continue;
    float* out = s.output_column(step.first + column * kTileColumns);
    for (int64_t i = 0; i < s.value_tiles * kTileRows * kPanel; i += kPanel) {
      store(out + i, load<Vec<float>>(out + i) * step.rescale[column]);
    }
  }
}

// V' P': added to O' by the tile unit, or left in s.product.
template <class Path> void multiply_values(const Step& step, AmxScratch<Path>& s) {
  TileFactor values = step.tile.values;
  values.data = values.at(0, step.begin / kTileTerms, 0);
  const TileFactor weights = {s.weight_tiles[step.buffer], kPanelBytes, kTileBytes, kPanelSize,
                              s.tile_steps * kPanelSize};
  if (Path::kAddsInPlace) rescale_output(step, s);
  panel_product<Path::kParts>(s.value_tiles, values, weights, step.columns, (step.end - step.begin) / kTileTerms,
                              Path::kAddsInPlace, Path::kAddsInPlace ? s.output_column(step.first) : s.product);
}

// Where the accuracy of O asks for it, the products of a tile are summed up before they meet it: see output_block().
template <class Path> void add_product(const Step& step, AmxScratch<Path>& s) {
  if (Path::kAddsInPlace) return;
  rescale_output(step, s);
  float* out = s.output_column(step.first);
  for (int64_t i = 0; i < s.value_tiles * kTileRows * kPanel; i += kPanel) {
    for (int64_t j = i; j < i + step.columns * kTileColumns; j += kTileColumns) {
      store(out + j, load<Vec<float>>(out + j) + load<Vec<float>>(s.product + j));
    }
  }
}

// Starts a step and brings the two before it, as far as there are such, one further.
template <class Path>
void advance(const Plan& plan, const Step* first, Step* second, const Step* third, float factor, AmxScratch<Path>& s) {
  if (first) multiply_keys(*first, s);
  if (third) multiply_values(*third, s);
  if (second) weigh(plan, *second, factor, s);
  if (third) add_product(*third, s);
}

// Leaves queries of an entry, which are `cells`, to the exact path if they attend to keys that are not finite.
template <class Path>
void leave_to_exact(const PackedTile& tile, const Mask& mask, int64_t cells, AmxScratch<Path>& s) {
  if (!tile.unfit) return;
  for (int64_t cell = 0; cell < cells; ++cell) {
    for (int64_t word = 0; word * 64 < tile.rows; ++word) {
      if (tile.unfit[word] & (mask ? mask.bits[cell * mask.words + word] : ~uint64_t(0))) s.exact[cell] = true;
    }
  }
}

// The columns from cell `first` on, at most a panel, that attend to any key of an entry, and whole steps of keys they
// attend to; no columns: none.
inline Step reached(const Mask& mask, int64_t first, int64_t cells, int64_t rows) {
  Step step = {};
  step.first = first, step.end = rows;
  step.columns = cells - first > kTileColumns ? 2 : 1;
  if (!mask) return step;
  int64_t begin[2], end[2], least = rows, most = 0, idle = 0;
  for (int64_t column = 0; column < step.columns; ++column) {
    begin[column] = 0, end[column] = rows;
    mask.reach(first + column * kTileColumns, kTileColumns, begin[column], end[column]);
    if (begin[column] == end[column]) {
      idle |= 1 << column;
      continue;
    }
    least = begin[column] < least ? begin[column] : least;
    most = end[column] > most ? end[column] : most;
  }
  if (idle == 1) step.first += kTileColumns;
  step.columns = most == 0 ? 0 : idle ? 1 : step.columns;
  step.begin = least / kTileTerms * kTileTerms, step.end = round_up(most, kTileTerms);
  return step;
}

// O', row_max and the sums over the entries of the item.
template <class Path>
void take_entries(const Call& call, int64_t pair, const Work& item, const Head& keys, const Head& values, int64_t cells,
                  float factor, AmxScratch<Path>& s) {
  [[maybe_unused]] const TileSession session;
  const Plan& plan = call.plan;
  const int64_t first_view = plan.components[item.component].key_view;
  Step steps[3];
  int64_t number = 0;
  const auto step = [&](int64_t i) { return i >= 0 && i < number ? steps + i % 3 : nullptr; };
  for (int64_t i = item.begin; i < item.end; ++i) {
    const int64_t e = item.query_tile % 2 ? item.begin + item.end - 1 - i : i;  // to and fro, for the cache's sake
    const int64_t view = first_view + plan.key_view[e];
    const Tile tile = locate(plan.views[view], plan.indices[e]);
    const Mask mask(plan, e);
    PackedTile packed;
    bool found = false;
    for (int64_t first = 0; first < cells; first += kPanel) {
      Step next = reached(mask, first, cells, round_up(tile.cells(), kTileTerms));
      if (next.columns == 0) continue;
      if (!found) {
        packed = find_tile<Path>(call, pair, view, plan.indices[e], tile, keys, values, s);
        leave_to_exact(packed, mask, cells, s);
        found = true;
      }
      next.tile = packed, next.entry = e, next.buffer = int(number % 2);
      steps[number % 3] = next;
      ++number;
      advance(plan, step(number - 1), step(number - 2), step(number - 3), factor, s);
    }
  }
  advance(plan, nullptr, step(number - 1), step(number - 2), factor, s);
  advance(plan, nullptr, nullptr, step(number - 1), factor, s);
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
  memset(s.exact, 0, size_t(columns * kTileColumns) * sizeof *s.exact);
  pack_queries<Path>(queries, cells, scale.sign, call, s);
  reset_softmax(columns, s);
  memset(s.origin, 0, size_t(columns * kTileBytes));
  memset(s.output_tiles, 0, size_t(panels * s.value_tiles * kPanelSize));
  take_entries<Path>(call, batch * heads_kv + head_kv, item, keys, values, cells, scale.factor, s);
  transpose_output(cells, s);
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (s.exact[cell]) s.output[cell * s.ld_value] = __builtin_nanf("");  // what sends a row to the exact path
  }
  finish_item<E>(call, batch, head, item, cells, queries, keys, values, scale, s.row_sum, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
