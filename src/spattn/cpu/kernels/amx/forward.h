// AMX forward of a work item: for each key tile and panel of queries, S' = K Q', the softmax, then O' += V' P'.
//
// There is no software pipelining, because tile and vector instructions do not overlap on the measured processors:
// pipelining over two or three key tiles made an iteration a third slower (docs/decisions/007-amx.md).
#pragma once
#include "amx/pack.h"
#include "amx/softmax.h"
#include "finish/finish.h"
#include "forward/plain.h"
#include "tile/prefetch.h"
#include "tile/product.h"

namespace spattn {
namespace SPATTN_ISA {

// The queries and keys of a panel and a key tile that contain allowed pairs.
struct Block {
  int64_t first, columns;  // cell of the first query; number of tile columns, 16 queries each
  int64_t begin, end;      // range of keys, rounded to multiples of kTileTerms
};

// Returns the block of the panel at cell `first` and a key tile of `rows` keys; it has no columns if no pair is
// allowed.
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

// Computes s.panel_scores = K Q'.
template <class Path> void multiply_keys(const Block& block, TileFactor keys, AmxScratch<Path>& s) {
  keys.data = keys.at(int(block.begin / kTileRows), 0, 0);
  const int64_t steps = s.counts.key_steps;
  const TileFactor queries = {s.query_column(block.first), kPanelBytes, kTileBytes, kPanelSize, steps * kPanelSize};
  multiply<Path>(block, (block.end - block.begin) / kTileRows, keys, queries, steps, false, s.panel_scores);
}

template <class Path>
void score_block(const Block& block, AmxScratch<Path>& s) {
  s.score.template apply<false>(s.position.key + block.begin, block.end - block.begin, s.position.query + block.first,
                                block.columns * kTileColumns, s.panel_scores, kPanel);
}

// Computes s.weight_tiles = P', and rescales O' where the running maximum changes.
template <class Path>
void weigh_block(const Block& block, const Mask& mask, Logits<float> logits, AmxScratch<Path>& s) {
  for (int64_t column = 0; column < block.columns; ++column) {
    const int64_t first = block.first + column * kTileColumns;
    float* scores = s.panel_scores + column * kTileColumns;
    const auto largest = mask ? largest_scores<true>(mask, first, block.begin, block.end, scores)
                              : largest_scores<false>(mask, first, block.begin, block.end, scores);
    const bool moved = move_column<Path>(first, largest, logits, s.rows, s.exact);
    weigh_column<Path>(scores, first, block.end - block.begin, logits, s.weight_tiles + column * kTileBytes,
                       s.weight_part(), s.rows);
    if (!moved) continue;
    const auto rescale = load<Vec<float>>(s.rows.rescale + first);
    float* out = s.output_column(first);
    for (int64_t i = 0; i < s.counts.value_tiles * kTileRows * kPanel; i += kPanel) {
      store(out + i, load<Vec<float>>(out + i) * rescale);
    }
  }
}

// Drops weights P' of a key tile whose positions are in s.position.key.
template <class Path>
__attribute__((noinline)) void drop_block(const Item& item, const Block& block, AmxScratch<Path>& s) {
  const int64_t keys = block.end - block.begin;
  s.dropout.list_keys(item.batch, item.head, s.position.key + block.begin, keys);
  for (int64_t column = 0; column < block.columns; ++column) {
    auto* const weights = reinterpret_cast<uint32_t*>(s.weight_tiles + column * kTileBytes);
    s.dropout.template drop_pairs<Path::kParts>(0, keys, block.first + column * kTileColumns, kTileColumns, weights,
                                                kPanelBytes / 4, s.weight_part() / 4);
  }
}

// Computes O' += V' P'. Unless kAddsInPlace, sums the terms of a key tile in s.product first, for accuracy, as
// output_block() does.
template <class Path> void multiply_values(const Block& block, TileFactor values, AmxScratch<Path>& s) {
  values.data = values.at(0, block.begin / kTileTerms, 0);
  const TileFactor weights = {s.weight_tiles, kPanelBytes, kTileBytes, kPanelSize, s.weight_part()};
  float* out = s.output_column(block.first);
  const int64_t steps = (block.end - block.begin) / kTileTerms;
  multiply<Path>(block, s.counts.value_tiles, values, weights, steps, Path::kAddsInPlace,
                 Path::kAddsInPlace ? out : s.product);
  if (Path::kAddsInPlace) return;
  for (int64_t i = 0; i < s.counts.value_tiles * kTileRows * kPanel; i += kPanel) {
    for (int64_t j = i; j < i + block.columns * kTileColumns; j += kTileColumns) {
      store(out + j, load<Vec<float>>(out + j) + load<Vec<float>>(s.product + j));
    }
  }
}

// Sends the queries that may attend to a key that fails Path::Check to the float64 fallback.
template <class Path> void leave_unfit(const Item& item, const Head& keys, int64_t cells, AmxScratch<Path>& s) {
  leave_to_fallback(item, cells, s.position.key, s.exact, [&](int64_t position) {
    typename Path::Check check;
    read_row<typename Path::Raw>(keys.row(position), keys.feature, item.call.head_dim, s.staged);
    check.look_at(s.staged, item.call.head_dim);
    return !check.passed();
  });
}

// Adds all key tiles of the item to O' and the row statistics. Takes as many key tiles at a time as fit the tile cache
// and processes them panel by panel: the matrices of a panel stay in the L1 cache while the key tiles stream through.
template <class Path>
void add_entries(const Item& item, int64_t cells, Logits<float> logits, Ahead& ahead, AmxScratch<Path>& s) {
  [[maybe_unused]] const TileSession session;
  const Work& work = item.work;
  const Head keys = item.keys(), values = item.values();
  const int64_t steps = (work.end - work.begin) * ((cells + kPanel - 1) / kPanel);
  const bool back = work.query_tile % 2;  // alternate direction, for cache reuse
  Listed at = back ? item.last() : item.first();
  bool unfit = false;
  for (int64_t i = work.begin; i < work.end;) {
    int64_t count = 0;
    for (; count < s.tiles.capacity && i < work.end; ++count, ++i) {
      s.entries[count] = {find_tile<Path>(item, at, keys, values, s), item.mask(at), at};
      at = back ? item.before(at) : item.after(at);
      unfit |= s.entries[count].tile.unfit;
    }
    for (int64_t first = 0; first < cells; first += kPanel) {
      for (const Entry* entry = s.entries; entry < s.entries + count; ++entry) {
        const Block block = reached(entry->mask, first, cells, entry->tile.rows);
        ahead.run(steps);
        if (block.columns == 0) continue;
        multiply_keys(block, entry->tile.keys, s);
        if (s.score || s.dropout) list_padded(item.key_tile(entry->at), block.end, s.position.key);
        if (s.score) score_block(block, s);
        weigh_block(block, entry->mask, logits, s);
        if (s.dropout) drop_block(item, block, s);
        multiply_values(block, entry->tile.values, s);
      }
    }
  }
  if (unfit) leave_unfit(item, keys, cells, s);
}

template <class Path> void transpose_output(int64_t cells, int64_t ld, AmxScratch<Path>& s) {
  for (int64_t first = 0; first < cells; first += kTileColumns) {
    transpose_rows<Plain<Float32>>(s.output_column(first), kPanel, ld, kTileColumns, 1.0f, s.output + first * ld, ld);
  }
}

template <class Path> struct TileForward {
  using Scratch = AmxScratch<Path>;

  static void run(const Item& item, Scratch& s) {
    using E = typename Path::E;
    const Tile tile = item.query_tile();
    prefetch_rows(item.queries(), tile, item.call.head_dim * int64_t(sizeof(typename E::Storage)));
    const int64_t cells = list_padded(tile, s.width.query, s.position.query);
    s.score.begin(item.batch, item.head);
    if (s.dropout) s.dropout.list_queries(item.batch, item.head, s.position.query, s.width.query);
    const int64_t columns = (cells + kTileColumns - 1) / kTileColumns, panels = (columns + 1) / 2;
    const Logits<float> logits(item.call);
    leave_marked(item, cells, s.position.key, s.exact);
    pack_queries<Path>(item, cells, logits.sign, s);
    s.rows.reset(columns);
    memset(s.output_tiles, 0, size_t(panels * s.counts.value_tiles * kPanelSize));
    Ahead ahead(item, sizeof(typename E::Storage), true);
    add_entries<Path>(item, cells, logits, ahead, s);
    const int64_t ld = s.counts.value_width();
    transpose_output(cells, ld, s);
    finish_item<E>(
        item, cells, logits, s.rows.row_sum, s.position, s.rows, ld, [&](int64_t cell) { return s.output + cell * ld; },
        s.exact);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
