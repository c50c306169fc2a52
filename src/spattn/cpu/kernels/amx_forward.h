// One work item by AMX. A step is a key tile and a column of sixteen queries: S' = K Q', then the softmax, then
// O' += V' P'. Three steps are in work, so that both products read operands that have been there for a while.
#pragma once
#include "amx_pack.h"
#include "amx_softmax.h"
#include "forward.h"

namespace spattn {
namespace SPATTN_ISA {

struct Step {
  PackedTile tile;
  int64_t entry, column, begin, end;  // queries from `column` on; the keys, whole steps of products, they attend to
  int buffer;                         // of two
  bool moved;                         // multiply O' by `rescale` first
  Vec<float> rescale;
};

template <class Path> void multiply_keys(const Step& step, const AmxScratch<Path>& s) {
  TileFactor keys = step.tile.keys;
  keys.data = keys.at(int(step.begin / kTileRows), 0, 0);
  const TileFactor queries = {s.query_column(step.column / kTileColumns), kTileBytes, 0, kTileSize,
                              s.key_steps * kTileSize};
  column_product<Path::kParts>((step.end - step.begin) / kTileRows, keys, queries, s.key_steps, false,
                               s.score_tiles[step.buffer]);
}

template <class Path> void weigh(const Plan& plan, Step& step, float factor, AmxScratch<Path>& s) {
  const Mask mask(plan, step.entry);
  float* scores = reinterpret_cast<float*>(s.score_tiles[step.buffer]);
  const auto largest = mask ? largest_scores<true>(mask, step.column, step.begin, step.end, scores)
                            : largest_scores<false>(mask, step.column, step.begin, step.end, scores);
  step.moved = move_column(step.column, largest, factor, s);
  if (step.moved) step.rescale = load<Vec<float>>(s.rescale + step.column);
  weigh_column(scores, step.column, step.end - step.begin, factor, step.moved, s.weight_tiles[step.buffer], s);
}

template <class Path> void rescale_output(const Step& step, AmxScratch<Path>& s) {
  if (!step.moved) return;
  float* out = s.output_column(step.column / kTileColumns);
  for (int64_t i = 0; i < s.value_tiles * kTileSize / 4; i += kTileColumns) {
    store(out + i, load<Vec<float>>(out + i) * step.rescale);
  }
}

// V' P': added to O' by the tile unit, or left in s.product.
template <class Path> void multiply_values(const Step& step, AmxScratch<Path>& s) {
  TileFactor values = step.tile.values;
  values.data = values.at(0, step.begin / kTileTerms, 0);
  const TileFactor weights = {s.weight_tiles[step.buffer], kTileBytes, 0, kTileSize, s.tile_steps * kTileSize};
  if (Path::kAddsInPlace) rescale_output(step, s);
  column_product<Path::kParts>(s.value_tiles, values, weights, (step.end - step.begin) / kTileTerms,
                               Path::kAddsInPlace,
                               Path::kAddsInPlace ? s.output_column(step.column / kTileColumns) : s.product);
}

// Where the accuracy of O asks for it, the products of a tile are summed up before they meet it: see output_block().
template <class Path> void add_product(const Step& step, AmxScratch<Path>& s) {
  if (Path::kAddsInPlace) return;
  rescale_output(step, s);
  float* out = s.output_column(step.column / kTileColumns);
  for (int64_t i = 0; i < s.value_tiles * kTileSize / 4; i += kTileColumns) {
    store(out + i, load<Vec<float>>(out + i) + load<Vec<float>>(s.product + i));
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
    for (int64_t column = 0; column < cells; column += kTileColumns) {
      int64_t begin = 0, end = round_up(tile.cells(), kTileTerms);
      if (mask) {
        mask.reach(column, kTileColumns, begin, end);
        begin = begin / kTileTerms * kTileTerms, end = round_up(end, kTileTerms);
        if (begin == end) continue;
      }
      if (!found) {
        packed = find_tile<Path>(call, pair, view, plan.indices[e], tile, keys, values, s);
        leave_to_exact(packed, mask, cells, s);
        found = true;
      }
      steps[number % 3] = Step{packed, e, column, begin, end, int(number % 2), false, Vec<float>{}};
      ++number;
      advance(plan, step(number - 1), step(number - 2), step(number - 3), factor, s);
    }
  }
  advance(plan, nullptr, step(number - 1), step(number - 2), factor, s);
  advance(plan, nullptr, nullptr, step(number - 1), factor, s);
}

// s.output = O, rows of ld_value, from the columns of O'.
template <class Path> void transpose_output(int64_t cells, AmxScratch<Path>& s) {
  for (int64_t column = 0; column < cells; column += kTileColumns) {
    const float* from = s.output_column(column / kTileColumns);
    for (int64_t d = 0; d < s.ld_value; d += kTileRows, from += kTileSize / 4) {
      Vec<float> block[kTileRows];
      SPATTN_UNROLL
      for (int i = 0; i < kTileRows; ++i) block[i] = load<Vec<float>>(from + i * kTileColumns);
      transpose<float>(block);
      SPATTN_UNROLL
      for (int i = 0; i < kTileRows; ++i) store(s.output + (column + i) * s.ld_value + d, block[i]);
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
  const int64_t columns = (cells + kTileColumns - 1) / kTileColumns;
  memset(s.exact, 0, size_t(columns * kTileColumns) * sizeof *s.exact);
  pack_queries<Path>(queries, cells, scale.sign, call, s);
  reset_softmax(columns, s);
  memset(s.origin, 0, size_t(columns * kTileBytes));
  memset(s.output_tiles, 0, size_t(columns * s.value_tiles * kTileSize));
  take_entries<Path>(call, batch * heads_kv + head_kv, item, keys, values, cells, scale.factor, s);
  transpose_output(cells, s);
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (s.exact[cell]) s.output[cell * s.ld_value] = __builtin_nanf("");  // what sends a row to the exact path
  }
  finish_item<E>(call, batch, head, item, cells, queries, keys, values, scale, s.row_sum, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
