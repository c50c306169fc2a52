// Backward of a work item, which recomputes P = exp(scale * Q K' - lse) of the allowed pairs, tile by tile.
//
//   delta = rowsum(dO o O), dV = P' dO, dS = scale * P o (dO V' - delta), dQ = dS K, dK = dS' Q
//
// Dropout multiplies P in dV, and dO V', by 1 / (1 - p) or 0.
#pragma once
#include "backward/exact.h"
#include "backward/products.h"
#include "backward/queries.h"
#include "backward/scratch.h"
#include "backward/sums.h"
#include "kernels.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

// Adds the terms of a key tile to dQ, dK and dV.
template <class E, class T = typename E::Compute>
void add_tile(const Item& item, const Listed& at, const Head& keys, const Head& values, int64_t cells, const Sums& sums,
              BackwardScratch<T>& s) {
  const Call& call = item.call;
  const Tile place = item.key_tile(at);
  int64_t* const position = s.rows.position.key;
  const int64_t rows = round_up(place.cells(), kKeyRows);
  const KeyTile<T> tile = {
      tile_rows<E>(keys, place, rows, call.head_dim, s.width.key, true, position, s.staging.keys),
      tile_rows<E>(values, place, rows, call.head_dim_v, s.width.value, true, position, s.staging.values), rows, cells,
      item.mask(at)};
  for (int64_t key = list_positions(place, position); key < rows; ++key) position[key] = kPadding;
  if (tile.mask) s.mask.expand(tile.mask, cells, tile.rows);
  if (s.dropout) s.dropout.list_keys(item.batch, item.head, position, rows);
  compute_weights(call, tile, SplitLogits<T>(call), s);
  add_key_gradients(tile, sums, s);
  add_query_gradients(tile, s);
}

// Epilogue of an item: runs the float64 fallback for rows that need it, and writes dQ to the result or to a partial.
template <class E, class T = typename E::Compute>
void write_query_gradients(const Item& item, int64_t cells, const Sums& sums, const GradientRows<T>& rows) {
  const Call& call = item.call;
  const Head dq(call.dq, item.batch, item.head);
  for (int64_t cell = 0; cell < cells; ++cell) {
    const int64_t position = rows.position.query[cell];
    if (position == kPadding) continue;
    T* row = rows.dq + cell * rows.ld;
    const bool chosen = rows.exact.chosen[cell];
    if (rows.idle[cell]) {
      clear(row, call.head_dim);
    } else if (chosen || !all_finite(row, rows.ld)) {
      report_nonfinite(call);
      fallback_gradients(FallbackRow<E>(item, cell, rows.position), chosen ? &sums : nullptr, rows.exact.sum);
      for (int64_t d = 0; d < call.head_dim; ++d) row[d] = T(rows.exact.sum[d]);
    }
    if (item.work.slot < 0) {
      write_row<E>(dq.row(position), dq.feature, call.head_dim, row);
    } else {
      const int64_t slot = item.work.slot * call.plan.block_q + cell;
      memcpy(partial_row<T>(call, item.batch, item.head, slot, call.head_dim), row, size_t(call.head_dim) * sizeof(T));
    }
  }
}

// True if an item may have terms of the table elements that this pass sums. Lists its positions in `scratch`.
inline bool takes_part(const Item& item, char* scratch) {
  const ScoreProgram& program = *item.call.score;
  const auto within = [](const int64_t (&range)[2], int64_t x) { return x >= range[0] && x < range[1]; };
  if (!within(program.batches, item.batch) || !within(program.heads, item.head)) return false;
  if (program.queries[0] == 0 && program.queries[1] == item.call.q_len) return true;
  Arena arena(scratch);
  const Positions position(item.call, arena);
  const int64_t cells = list_positions(item.query_tile(), position.query);
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (position.query[cell] != kPadding && within(program.queries, position.query[cell])) return true;
  }
  return false;
}

template <class E>
void backward(const Call& call, int64_t batch, int64_t head, const Work& work, const Sums& sums,
              char* scratch) noexcept {
  Arena arena(scratch);
  BackwardScratch<typename E::Compute> s(call, arena);
  const Item item = {call, batch, head, work};
  const Head keys = item.keys(), values = item.values();
  const Tile place = item.query_tile();
  const int64_t cells = place.cells();
  prepare_queries<E>(item, place, s);
  clear(s.rows.dq, s.width.query * s.width.key);
  for (Listed at = item.first(); at.number < work.end; at = item.after(at)) {
    add_tile<E>(item, at, keys, values, cells, sums, s);
  }
  write_query_gradients<E>(item, cells, sums, s.rows);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
