// Work items of few query rows, as in decoding, where reading K and V once is all that should take time.
//
// Vectors hold features and keys instead of queries, so that one row keeps all lanes busy: S = Q K' by dot products
// along the features, softmax along the keys, O += P V by adding up multiples of V's rows. K and V are read in place,
// as they are stored. The query heads that share K and V go through a tile together, as rows of one matrix.
//
//   rows of S, P, O: head after head of the task, the cells of the query tile within
//   floor: bytes of K and V / memory bandwidth; measured by benchmarks/decode_cpu.py
#pragma once
#include "decode/products.h"
#include "decode/weights.h"
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "simd/element.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct DecodeScratch {
  Widths<T> width;
  Positions position;
  RowStatistics<T> rows;
  ExactRowBuffer exact;
  KeyStaging<T> staging;
  T* query;   // (width.query, width.key): Q, times the sign of the scale
  T* scores;  // (width.query, block_kv): S, then the weights
  OutputBlock<T> output;

  DecodeScratch(const Call& call, Arena& arena)
      : width(call), position(call, arena), rows(width.query, arena), exact(width.query, call.head_dim_v, arena),
        staging(call, width, arena), query(arena.array<T>(width.query * width.key)),
        scores(arena.array<T>(width.query * call.plan.block_kv)), output(width.query, width.value, arena) {}
};

// How far to prefetch ahead, in bytes, where tiles follow each other: K and V together stay in a first-level cache.
constexpr int64_t kAhead = 8192;

// visit(element type, rows) of the keys of a tile, `count` of them: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_rows(const Head& head, const Tile& tile, const Tile& next, int64_t count, int64_t width,
                              int64_t ld, int64_t* position, typename E::Compute* copy, Visit visit) {
  if (tile.even() && tile.cells() == count && width == ld && head.feature == int64_t(sizeof(typename E::Storage))) {
    const int64_t stride = tile.stride[2] * head.position, onwards = (next.start - tile.start) * head.position;
    const int64_t ahead = onwards == count * stride && onwards > kAhead ? kAhead : onwards;
    visit(E{}, Rows{head.data + tile.start * head.position, stride, ahead,
                    ahead && next.even() ? width * int64_t(sizeof(typename E::Storage)) : 0});
  } else {
    gather_rows<E>(head, tile, count, width, ld, position, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

// One tile of the list, for all rows: O, row_max and row_sum take in the keys of one tile.
template <class E, class T = typename E::Compute>
void add_tile(const Item& item, const Listed& at, const Head& keys, const Head& values, int64_t cells, int64_t rows,
              Logits<T> logits, DecodeScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors;
  const Call& call = item.call;
  const Tile tile = item.key_tile(at), next = at.number + 1 < item.work.end ? item.key_tile(item.after(at)) : tile;
  const int64_t count = round_up(tile.cells(), L), ld = call.plan.block_kv;
  const int64_t ld_key = s.width.key, ld_value = s.width.value;
  visit_rows<E>(keys, tile, next, count, call.head_dim, ld_key, s.position.key, s.staging.keys,
                [&](auto stored, Rows k) {
                  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                    multiply_keys<decltype(stored), decltype(some)::value>(k, count, s.query + row * ld_key, ld_key,
                                                                           s.scores + row * ld, ld);
                    k.width = 0;  // prefetched
                  });
                });
  weigh_rows(item.mask(at), cells, count, rows, logits, s.scores, ld, s.rows);
  visit_rows<E>(values, tile, next, count, call.head_dim_v, ld_value, s.position.key, s.staging.values,
                [&](auto stored, Rows v) {
                  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                    in_blocks<W>(ld_value / L, [&](auto vectors, int64_t column) {
                      multiply_values<decltype(stored), decltype(some)::value, decltype(vectors)::value>(
                          v, column * L, count, s.scores + row * ld, ld,
                          at.number == item.work.begin ? nullptr : s.rows.rescale + row, s.output.row(row) + column * L,
                          ld_value);
                      v.width = 0;
                    });
                  });
                });
}

// As many heads of an item, up to `end`, as there are rows for. add_keys(item, rows, logits) has O, row_max and row_sum
// take in the keys of the item.
template <class E, class T = typename E::Compute, class AddKeys>
void decode_heads(const Item& item, int64_t end, int64_t cells, DecodeScratch<T>& s, const AddKeys& add_keys) {
  const Call& call = item.call;
  const Logits<T> logits(call.scale);
  const int64_t rows = (end - item.head) * cells;
  for (int64_t row = 0; row < rows; row += cells) {
    gather_queries<E>(Head(call.q, item.batch, item.head + row / cells), 0, cells, cells, call.head_dim, s.width.key,
                      s.position.query, s.query + row * s.width.key);
  }
  for (int64_t i = 0; i < rows * s.width.key; ++i) s.query[i] *= logits.sign;
  s.rows.reset((rows + kLanes<T> - 1) / kLanes<T>);
  leave_marked(item, cells, s.position.key, s.exact);  // the heads share keys and masks
  add_keys(item, rows, logits);
  for (int64_t row = 0; row < rows; row += cells) {
    const RowStatistics<T> own = s.rows.from(row);
    finish_item<E>({call, item.batch, item.head + row / cells, item.work}, cells, logits, own.row_sum, s.position, own,
                   s.output.from(row), s.exact);
  }
}

// An item of the query heads [item.head, end) of a group, as many of them at once as there are rows for.
template <class E, class T = typename E::Compute, class AddKeys>
void decode_item(const Item& item, int64_t end, int64_t cells, DecodeScratch<T>& s, const AddKeys& add_keys) {
  const int64_t at_once = s.width.query / cells;
  for (int64_t head = item.head; head < end; head += at_once) {
    decode_heads<E>({item.call, item.batch, head, item.work}, head + at_once < end ? head + at_once : end, cells, s,
                    add_keys);
  }
}

template <class E> void decode(const Item& item, int64_t end, DecodeScratch<typename E::Compute>& s) {
  const int64_t cells = list_positions(item.query_tile(), s.position.query);
  const Head keys = item.keys(), values = item.values();
  decode_item<E>(item, end, cells, s, [&](const Item& some, int64_t rows, auto logits) {
    for (Listed at = some.first(); at.number < some.work.end; at = some.after(at)) {
      add_tile<E>(some, at, keys, values, cells, rows, logits, s);
    }
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
