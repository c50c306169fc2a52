// Forward of a work item with one query per vector lane: O = softmax(scale * Q K' + mask) V of a query tile and a range
// of its key tile list.
#pragma once
#include "finish/exact.h"
#include "finish/finish.h"
#include "forward/products.h"
#include "forward/scratch.h"
#include "kernels.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/prefetch.h"
#include "tile/product.h"

namespace spattn {
namespace SPATTN_ISA {

// Drops weights P' of the keys `blocks` of the tile whose positions are in s.position.key.
template <class Path, class T = typename Path::T>
__attribute__((noinline)) void drop_tile(const Item& item, Keys blocks, int64_t vectors, ForwardScratch<T>& s) {
  s.dropout.list_keys(item.batch, item.head, s.position.key, blocks.end);
  const int64_t queries = vectors * kLanes<T>, ld = s.width.query;
  if constexpr (Path::kTerms == 2) {
    s.dropout.template drop_pairs<1>(blocks.begin, blocks.end, 0, queries, reinterpret_cast<uint32_t*>(s.scores), ld);
  } else {
    s.dropout.drop_queries(blocks.begin, blocks.end, queries, T(1), s.scores, ld);
  }
}

// Adds the terms of a key tile to O and updates the row statistics.
template <class Path, class T = typename Path::T>
void add_tile(const Item& item, const Listed& at, const Head& keys, const Head& values, int64_t cells, Logits<T> logits,
              ForwardScratch<T>& s) {
  const Call& call = item.call;
  const Tile tile = item.key_tile(at);
  const Mask mask = item.mask(at);
  const int64_t vectors = (cells + kLanes<T> - 1) / kLanes<T>;
  const int64_t key_cells = tile.cells(), rows = round_up(key_cells, kKeyRows);
  CachedTile<T> cached = {};
  if (!Path::keys_in_place(keys, tile, rows, call) || !Path::values_in_place(values, tile, call)) {
    cached = s.tiles.find(item.kv_number(), item.key_view(at), at.tile);
  }
  const auto k = Path::key_operand(keys, tile, rows, call, cached, s);
  const auto v = Path::value_operand(values, tile, call, cached, s);
  const Keys reached = mask ? s.mask.expand(mask, cells, key_cells) : Keys{0, key_cells};
  const Keys blocks = {reached.begin / kKeyRows * kKeyRows, round_up(reached.end, kKeyRows)};
  if (s.score || s.dropout) list_padded(tile, rows, s.position.key);
  compute_scores<Path>(k, v, blocks, call.head_dim, vectors, bool(mask), s);
  exponentiate<Path>(blocks.begin, blocks.end, vectors, logits, s.scores, s.width.query, s.rows);
  if (s.dropout) drop_tile<Path>(item, blocks, vectors, s);
  accumulate_output<Path>(v, reached, cells, mask, at.number == item.work.begin, s);
}

// Writes (sign * Q)' of the cells [0, cells) to s.query, zero-padded to the vector length.
template <class Path, class T = typename Path::T>
void pack_query(const Item& item, int64_t cells, T sign, ForwardScratch<T>& s) {
  constexpr int64_t L = kLanes<T>;
  const int64_t width = item.call.head_dim, depth = (width + Path::kTerms - 1) / Path::kTerms, ld = round_up(depth, L);
  for (int64_t first = 0; first < cells; first += L) {
    gather_queries<typename Path::Raw>(item.queries(), first, L, cells, width, Path::kTerms * ld, s.position.query,
                                       reinterpret_cast<typename Path::Raw::Compute*>(s.staged));
    transpose_rows<Path>(reinterpret_cast<typename Path::Element*>(s.staged), ld, L, depth, sign, s.query + first,
                         s.width.query);
  }
}

template <class Path> struct VectorForward {
  using T = typename Path::T;
  using Scratch = ForwardScratch<T>;

  static void run(const Item& item, Scratch& s) {
    const int64_t cells = list_padded(item.query_tile(), s.width.query, s.position.query);
    s.score.begin(item.batch, item.head);
    if (s.dropout) s.dropout.list_queries(item.batch, item.head, s.position.query, s.width.query);
    const Head keys = item.keys(), values = item.values();
    const Logits<T> logits(item.call);
    pack_query<Path>(item, cells, logits.sign, s);
    s.rows.reset((cells + kLanes<T> - 1) / kLanes<T>);
    leave_marked(item, cells, s.position.key, s.exact);
    Ahead ahead(item, sizeof(typename Path::E::Storage), !kPrefetches<Path>);
    for (Listed at = item.first(); at.number < item.work.end; at = item.after(at)) {
      ahead.run(item.work.end - item.work.begin);
      add_tile<Path>(item, at, keys, values, cells, logits, s);
    }
    finish_item<typename Path::E>(
        item, cells, logits, Path::divisor(s.rows), s.position, s.rows, s.width.value,
        [&](int64_t cell) { return s.output + cell * s.width.value; }, s.exact);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
