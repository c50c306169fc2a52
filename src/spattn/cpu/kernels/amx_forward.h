// One work item by AMX. A step is a key tile and a column of sixteen queries: S' = K Q', softmax, O' += V' P'. The
// scores of a step are asked for before the softmax of the one before, so that the tile unit works meanwhile.
#pragma once
#include "amx_pack.h"
#include "amx_softmax.h"
#include "forward.h"

namespace spattn {
namespace SPATTN_ISA {

struct Step {
  PackedTile tile;
  Mask mask;
  int64_t column, begin, end;  // queries from `column` on; the keys, whole steps of products, that they attend to
  char* scores;
};

template <class Path> void ask_for_scores(const Step& step, const AmxScratch<Path>& s) {
  TileFactor keys = step.tile.keys;
  keys.data = keys.at(int(step.begin / kTileRows), 0, 0);
  const TileFactor queries = {s.query_column(step.column / kTileColumns), kTileBytes, 0, kTileSize,
                              s.key_steps * kTileSize};
  column_product<Path::kParts>((step.end - step.begin) / kTileRows, keys, queries, s.key_steps, false, step.scores);
}

// O' = rescale * O' of a column.
template <class Path> void rescale_output(int64_t column, AmxScratch<Path>& s) {
  const Vec<float> rescale = load<Vec<float>>(s.rescale + column);
  float* out = s.output_column(column / kTileColumns);
  for (int64_t d = 0; d < s.value_tiles * kTileRows; ++d, out += kTileColumns) store(out, load<Vec<float>>(out) * rescale);
}

// O' += the product of an earlier step: by now the tile unit is done with it.
template <class Path> void add_product(AmxScratch<Path>& s) {
  if (!s.awaiting) return;
  for (int64_t i = 0; i < s.value_tiles * kTileSize / 4; i += kTileColumns) {
    store(s.awaiting + i, load<Vec<float>>(s.awaiting + i) + load<Vec<float>>(s.product + i));
  }
  s.awaiting = nullptr;
}

template <class Path> void finish_step(const Step& step, float factor, AmxScratch<Path>& s) {
  const int64_t begin = step.begin, end = step.end, column = step.column;
  float* scores = reinterpret_cast<float*>(step.scores);
  const auto largest = step.mask ? largest_scores<true>(step.mask, column, begin, end, scores)
                                 : largest_scores<false>(step.mask, column, begin, end, scores);
  const bool moved = move_column(column, largest, factor, s);
  weigh_column(scores, column, end - begin, factor, moved, s);
  add_product(s);
  if (moved) rescale_output(column, s);
  TileFactor values = step.tile.values;
  values.data = values.at(0, begin / kTileTerms, 0);
  const TileFactor weights = {s.weight_tiles, kTileBytes, 0, kTileSize, s.tile_steps * kTileSize};
  float* out = s.output_column(column / kTileColumns);
  // The products of a tile are summed up before they meet O where its accuracy asks for it: see output_block().
  if (!Path::kAddsInPlace) s.awaiting = out;
  column_product<Path::kParts>(s.value_tiles, values, weights, (end - begin) / kTileTerms, Path::kAddsInPlace,
                               Path::kAddsInPlace ? out : s.product);
}

// Does any query of an entry, which are `cells`, attend to a key that the products cannot take?
inline bool attends_to_unfit(const PackedTile& tile, const Mask& mask, int64_t cells) {
  for (int64_t word = 0; tile.unfit && word * 64 < tile.rows; ++word) {
    if (tile.unfit[word] & (mask ? mask.merged(0, cells, word) : ~uint64_t(0))) return true;
  }
  return false;
}

// O', row_max and the sums over the entries of the item. False: the products cannot take some number.
template <class Path>
bool take_entries(const Call& call, int64_t pair, const Work& item, const Head& keys, const Head& values, int64_t cells,
                  float factor, AmxScratch<Path>& s) {
  [[maybe_unused]] const TileSession session;
  const Plan& plan = call.plan;
  const int64_t first_view = plan.components[item.component].key_view;
  Step steps[2] = {{{}, Mask(plan, item.begin), 0, 0, 0, s.score_tiles[0]},
                   {{}, Mask(plan, item.begin), 0, 0, 0, s.score_tiles[1]}};
  Step *next = steps, *last = nullptr;
  for (int64_t i = item.begin; i < item.end; ++i) {
    const int64_t e = item.query_tile % 2 ? item.begin + item.end - 1 - i : i;  // to and fro, for the cache's sake
    const PackedTile tile = find_tile<Path>(call, pair, first_view + plan.key_view[e], plan.indices[e], keys, values, s);
    const Mask mask(plan, e);
    if (attends_to_unfit(tile, mask, cells)) return false;
    for (int64_t column = 0; column < cells; column += kTileColumns) {
      next->tile = tile, next->mask = mask, next->column = column;
      next->begin = 0, next->end = tile.rows;
      if (next->mask) {
        next->mask.reach(column, kTileColumns, next->begin, next->end);
        next->begin = next->begin / kTileTerms * kTileTerms, next->end = round_up(next->end, kTileTerms);
        if (next->begin == next->end) continue;
      }
      ask_for_scores(*next, s);
      if (last) finish_step(*last, factor, s);
      last = next;
      next = steps + (next == steps);
    }
  }
  if (last) finish_step(*last, factor, s);
  add_product(s);
  return true;
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
  const int64_t cells = list_positions(locate(plan.views[component.query_view], item.query_tile), s.query_position);
  const Scale<float> scale(call.scale);
  bool done = pack_queries<Path>(queries, cells, scale.sign, call, s);
  if (done) {
    const int64_t columns = (cells + kTileColumns - 1) / kTileColumns;
    reset_softmax(columns, s);
    memset(s.origin, 0, size_t(columns * kTileBytes));
    memset(s.output_tiles, 0, size_t(columns * s.value_tiles * kTileSize));
    done = take_entries<Path>(call, batch * heads_kv + head_kv, item, keys, values, cells, scale.factor, s);
  }
  if (!done) {
    forward<typename Path::Instead>(call, batch, head, item, scratch + s.offset());
    return;
  }
  transpose_output(cells, s);
  finish_item<E>(call, batch, head, item, cells, queries, keys, values, scale, Path::normaliser(s), s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
