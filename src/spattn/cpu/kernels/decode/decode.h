// Decode kernel: computes work items with few query rows, for which the bandwidth of reading K and V is the limit.
//
// Lanes hold features or keys instead of queries, so that one row fills a vector: S = Q K' by dot products, O += P V as
// a sum of scaled rows of V. The kernel reads K and V in place where it can. The query heads of a group are rows of one
// matrix and share each tile: row = head * cells + cell of the query tile. A register block of rows computes only the
// range of keys to which any of its rows attends.
//
//   lower bound: bytes of K and V / memory bandwidth; measured by benchmarks/kernels/decode_cpu.py
#pragma once
#include "decode/products.h"
#include "decode/rows.h"
#include "decode/weights.h"
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "simd/element.h"
#include "softmax/dropout.h"
#include "softmax/score.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct DecodeScratch {
  Widths<T> width;
  int64_t ld;  // leading dimension of scores
  Positions position;
  RowStatistics<T> rows;  // padded by one vector: unaligned vector loads may start at any row
  FallbackRowBuffer exact;
  KeyStaging<T> staging;
  Keys* reached;    // (width.query): key range of a register block, at the index of its first row
  int64_t* listed;  // (block_kv + kSoon): positions of the keys of a tile
  T* scores;        // (width.query, ld): S, then P
  const T** query;  // (width.query): pointers to the rows of sign(scale) * Q
  T* queries;       // (width.query, width.key): copies of rows that are not read in place
  T** output;       // (width.query): pointers to the unnormalized rows of O, in the result where possible
  T* outputs;       // (width.query, width.value): rows that are not computed in place
  Score<T> score;   // of all heads of a task
  Dropout<T> dropout;

  DecodeScratch(const Call& call, Arena& arena)
      : width(call), ld(call.plan.block_kv + kLanes<T>), position(call, arena), rows(width.query + kLanes<T>, arena),
        exact(width.query, call.head_dim_v, arena), staging(call, width, arena),
        reached(arena.array<Keys>(width.query)), listed(arena.array<int64_t>(call.plan.block_kv + kSoon)),
        scores(arena.array<T>(width.query * ld)), query(arena.array<const T*>(width.query)),
        queries(arena.array<T>(width.query * width.key)), output(arena.array<T*>(width.query)),
        outputs(arena.array<T>(width.query * width.value)), score(call, call.plan.block_q, ld, call.together, arena),
        dropout(call, width.query, ld, arena) {}
};

// Maximum prefetch distance in bytes, at which the prefetched K and V fit the L1 cache.
constexpr int64_t kAhead = 8192;

// Lists the positions of the first `count` keys of a tile, and of kSoon further keys for prefetches. Padding repeats
// the previous key, and its weight will be 0.
inline void list_keys(const Tile& tile, int64_t count, int64_t* position) {
  const int64_t cells = list_positions(tile, position);
  for (int64_t i = 1; i < count + kSoon; ++i) {
    if (i >= cells || position[i] == kPadding) position[i] = position[i - 1];
  }
}

// Returns the rows of the evenly spaced keys of a tile, with the prefetch distance for the products.
template <class E> Rows rows_in_line(const Head& head, const Tile& tile, const Tile& next, int64_t width) {
  const int64_t stride = tile.stride[2] * head.position, onwards = (next.start - tile.start) * head.position;
  const int64_t ahead = onwards == tile.cells() * stride && onwards > kAhead ? kAhead : onwards;
  const int64_t soon = ahead && next.even() ? width * int64_t(sizeof(typename E::Storage)) : 0;
  return {head.row(tile.start), stride, ahead, soon};
}

// Adds the terms of `count` keys to O and the statistics of all rows; `first` marks the first keys of an item. The list
// `position` is padded to the vector length plus kSoon. `keys_in_line` and `values_in_line` replace it if the rows are
// evenly spaced; else they are null.
template <class E, class T = typename E::Compute>
void add_keys(const Item& item, const int64_t* position, int64_t count, const Rows* keys_in_line,
              const Rows* values_in_line, bool first, const Mask& mask, int64_t cells, int64_t rows, Logits<T> logits,
              DecodeScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors;
  const Call& call = item.call;
  const int64_t padded = round_up(count, L);
  const auto visit_rows = [&](const Head& head, const Rows* line, int64_t width, int64_t ld, T* copy, auto visit) {
    if (line) return visit(E{}, *line);
    visit_positions<E>(head, position, padded, width, ld, copy, read_soon<E>(head, position + kSoon, width), visit);
  };
  find_reached<T>(mask, cells, count, rows, s.reached);
  visit_rows(item.keys(), keys_in_line, call.head_dim, s.width.key, s.staging.keys, [&](auto stored, auto keys) {
    in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
      multiply_keys<decltype(stored), decltype(some)::value>(keys, in_vectors<T>(s.reached[row]), s.query + row,
                                                             s.width.key, s.scores + row * s.ld, s.ld);
      keys.prefetched();
    });
  });
  for (int64_t row = 0; s.score && row < rows; row += cells) {
    s.score.template apply<true>(s.position.query, cells, position, padded, s.scores + row * s.ld, s.ld, row / cells);
  }
  for (int64_t row = 0; count < padded && row < rows; ++row) {
    for (int64_t key = count; key < padded; ++key) s.scores[row * s.ld + key] = -kInfinity<T>;
  }
  weigh_rows(mask, cells, s.reached, rows, logits, s.scores, s.ld, s.rows);
  for (int64_t row = 0; s.dropout && row < rows; ++row) {
    if (row % cells == 0) s.dropout.list_keys(item.batch, item.head + row / cells, position, padded);
    s.dropout.drop_keys(row, padded, T(1), s.scores + row * s.ld);
  }
  visit_rows(item.values(), values_in_line, call.head_dim_v, s.width.value, s.staging.values,
             [&](auto stored, auto values) {
               in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                 const T* const factor = first ? nullptr : s.rows.rescale + row;
                 in_blocks<W>(s.width.value / L, [&](auto vectors, int64_t column) {
                   multiply_values<decltype(stored), decltype(some)::value, decltype(vectors)::value>(
                       values, column * L, s.reached[row], s.scores + row * s.ld, s.ld, factor, s.output + row);
                   values.prefetched();
                 });
               });
             });
}

// Adds the terms of a key tile to O and the statistics of all rows.
template <class E, class T = typename E::Compute>
void add_tile(const Item& item, const Listed& at, int64_t cells, int64_t rows, Logits<T> logits, DecodeScratch<T>& s) {
  const Call& call = item.call;
  const Head keys = item.keys(), values = item.values();
  const Tile tile = item.key_tile(at);
  const Tile next = at.number + 1 < item.work.end ? item.key_tile(item.after(at)) : tile;
  const int64_t count = round_up(tile.cells(), kLanes<T>);
  const bool line = tile.even() && tile.cells() == count;
  const bool key_line = line && whole_vectors<E>(keys, call.head_dim, s.width.key);
  const bool value_line = line && whole_vectors<E>(values, call.head_dim_v, s.width.value);
  if (!key_line || !value_line || call.score || call.dropout) list_keys(tile, count, s.listed);
  const Rows key_rows = rows_in_line<E>(keys, tile, next, call.head_dim);
  const Rows value_rows = rows_in_line<E>(values, tile, next, call.head_dim_v);
  add_keys<E>(item, s.listed, count, key_line ? &key_rows : nullptr, value_line ? &value_rows : nullptr,
              at.number == item.work.begin, item.mask(at), cells, rows, logits, s);
}

// Sets the pointers to Q and O for the rows of an item from `row` on. Rows are used in place if they have the compute
// type, and then prefetched; otherwise Q is gathered. Padding gets zero queries.
template <class E, class T = typename E::Compute>
void find_rows(const Item& item, int64_t cells, const int64_t* position, int64_t row, Logits<T> logits,
               DecodeScratch<T>& s) {
  constexpr int64_t kSize = sizeof(T);
  const Call& call = item.call;
  const Head queries = item.queries();
  const Head out(call.out, item.batch, item.head);
  const int64_t ld = s.width.key;
  const bool read = as_computed<E>(queries) && call.head_dim == ld && logits.sign == T(1);
  const bool written = as_computed<E>(out) && call.head_dim_v == s.width.value && item.work.slot < 0;
  T* const own = s.queries + row * ld;
  if (!read) gather_queries<E>(queries, 0, cells, cells, call.head_dim, ld, position, own);
  if (logits.sign != T(1)) {
    for (int64_t i = 0; i < cells * ld; ++i) own[i] *= logits.sign;
  }
  for (int64_t i = 0; i < cells; ++i) {
    const bool real = position[i] != kPadding;
    const T* query = own + i * ld;
    T* to = s.outputs + (row + i) * s.width.value;
    if (read && real) {
      query = reinterpret_cast<const T*>(queries.row(position[i]));
      for (int64_t d = 0; d < ld; d += 64 / kSize) __builtin_prefetch(query + d);
    } else if (read) {
      clear(own + i * ld, ld);
    }
    if (written && real) to = reinterpret_cast<T*>(out.row(position[i]));
    s.query[row + i] = query, s.output[row + i] = to;
  }
}

// Computes the heads [item.head, end), whose rows must fit the scratch. add_keys(item, rows, logits) adds the terms of
// the item's keys to O and the statistics.
template <class E, class T = typename E::Compute, class AddKeys>
void decode_heads(const Item& item, int64_t end, int64_t cells, DecodeScratch<T>& s, const AddKeys& add_keys) {
  const Call& call = item.call;
  const Logits<T> logits(call);
  const int64_t rows = (end - item.head) * cells;
  for (int64_t row = 0; row < rows; row += cells) {
    find_rows<E>({call, item.batch, item.head + row / cells, item.work}, cells, s.position.query, row, logits, s);
    s.score.begin(item.batch, item.head + row / cells, row / cells);
    if (s.dropout) s.dropout.list_queries(item.batch, item.head + row / cells, s.position.query, cells, row);
  }
  s.rows.reset((rows + kLanes<T> - 1) / kLanes<T>);
  leave_marked(item, cells, s.position.key, s.exact);  // the heads share keys and masks
  add_keys(item, rows, logits);
  for (int64_t row = 0; row < rows; row += cells) {
    finish_item<E>(
        {call, item.batch, item.head + row / cells, item.work}, cells, logits, s.rows.row_sum, s.position, s.rows,
        s.width.value, [&](int64_t cell) { return s.output[row + cell]; }, s.exact, row);
  }
}

// Computes the query heads [item.head, end) of a group, as many at once as fit the scratch.
template <class E, class T = typename E::Compute, class AddKeys>
void decode_item(const Item& item, int64_t end, int64_t cells, DecodeScratch<T>& s, const AddKeys& add_keys) {
  const int64_t heads = end - item.head, at_once = heads * cells <= s.width.query ? heads : s.width.query / cells;
  for (int64_t head = item.head; head < end; head += at_once) {
    decode_heads<E>({item.call, item.batch, head, item.work}, head + at_once < end ? head + at_once : end, cells, s,
                    add_keys);
  }
}

template <class E>
void decode(const Item& item, int64_t end, DecodeScratch<typename E::Compute>& s) {
  const int64_t cells = list_positions(item.query_tile(), s.position.query);
  decode_item<E>(item, end, cells, s, [&](const Item& some, int64_t rows, auto logits) {
    for (Listed at = some.first(); at.number < some.work.end; at = some.after(at)) {
      add_tile<E>(some, at, cells, rows, logits, s);
    }
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
