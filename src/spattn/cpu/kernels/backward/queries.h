// Prepares the query rows of a backward item: gathers Q, dO, O and lse, transposes Q and dO, and computes delta.
#pragma once
#include <math.h>

#include "backward/exact.h"
#include "backward/scratch.h"
#include "forward/plain.h"
#include "simd/element.h"
#include "kernels.h"
#include "tile/operand.h"
#include "softmax/logits.h"
#include "tile/item.h"
#include "tile/product.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Computes delta = rowsum(dO o O) in the same summation order as dP = dO V', so that a row with a single key, where
// O = V, has dS = 0 exactly.
template <class T> void compute_delta(int64_t rows, int64_t width, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> delta = {};
    for (int64_t d = 0; d < width; d += L) {
      Vec<T> out[L];
      transpose_block<Plain<Native<T>>>(s.raw.out + first * s.raw.width_value + d, s.raw.width_value, T(1), out);
      const T* dout = s.dout + d * s.width.query + first;
      for (int i = 0; i < L && i < width - d; ++i) delta += out[i] * load<Vec<T>>(dout + i * s.width.query);
    }
    store(s.rows.delta + first, delta);
  }
}

// Subtracts dlse, scaled by the factor of dO, from delta. Skips rows without allowed keys, whose lse is constant.
template <class T> void subtract_dlse(const Item& item, int64_t cells, T factor, const GradientRows<T>& rows) {
  if (!item.call.dlse.data) return;
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (rows.idle[cell]) continue;
    rows.delta[cell] -= factor * read_row_value<T>(item.call.dlse, item.batch, item.head, rows.position.query[cell]);
  }
}

template <class T> bool all_finite(const T* row, int64_t width) {
  IntVec<T> strange = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) strange |= not_finite(load<Vec<T>>(row + j));
  return !any(strange);
}

// True if all bfloat16 values of a row are finite.
inline bool all_finite(const uint16_t* row, int64_t width) {
  uint16_t largest = 0;
  for (int64_t j = 0; j < width; ++j) {
    const uint16_t magnitude = row[j] & 0x7fff;
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest < 0x7f80;
}

// Sets lse2 of a row, or zeroes the operands of a row that the tile kernel must skip: a row without allowed keys, or a
// row for the float64 fallback. A row takes the fallback if it is non-finite, is_far() or attends to a non-finite key.
template <class T, class U>
void prepare_row(const Call& call, T lse, const QueryRows<U>& raw, int64_t cell, const GradientRows<T>& rows) {
  U *query = raw.query + cell * raw.width, *dout = raw.dout + cell * raw.width_value,
    *out = raw.out + cell * raw.width_value;
  const bool fit = all_finite(query, raw.width) && all_finite(dout, raw.width_value) &&
                   all_finite(out, raw.width_value) && fabs(double(lse)) <= call.far_lse;
  bool& chosen = rows.exact.chosen[cell];
  rows.idle[cell] = lse == -kInfinity<T>;
  chosen = !rows.idle[cell] && (chosen || !fit);
  if (rows.idle[cell] || chosen) {
    clear(query, raw.width);
    clear(dout, raw.width_value);
    clear(out, raw.width_value);
    return;
  }
  const Split<T> lse2 = to_base_2<T>(lse);
  rows.lse2[cell] = lse2.high;
  rows.lse2_low[cell] = lse2.low;
}

// Gathers the item's rows as element type E to `raw`, and prepares their entries of `rows`.
template <class E, class T>
void gather_item(const Item& item, const Tile& tile, const QueryRows<typename E::Compute>& raw,
                 const GradientRows<T>& rows) {
  const Call& call = item.call;
  const int64_t count = rows.exact.rows;
  const auto gather = [&](const Array& array, int64_t width, int64_t ld, typename E::Compute* to) {
    gather_rows<E>(Head(array, item.batch, item.head), tile, count, width, ld, rows.position.query, to);
  };
  gather(call.q, call.head_dim, raw.width, raw.query);
  gather(call.dout, call.head_dim_v, raw.width_value, raw.dout);
  gather(call.out, call.head_dim_v, raw.width_value, raw.out);
  leave_marked(item, tile.cells(), rows.position.key, rows.exact);
  for (int64_t cell = 0; cell < count; ++cell) {
    rows.lse2[cell] = kInfinity<T>;
    rows.lse2_low[cell] = T(0);
    rows.idle[cell] = true;
    if (cell >= tile.cells()) rows.position.query[cell] = kPadding;
    if (cell >= tile.cells() || rows.position.query[cell] == kPadding) continue;
    prepare_row(call, read_row_value<T>(call.lse, item.batch, item.head, rows.position.query[cell]), raw, cell, rows);
  }
}

template <class E>
void prepare_queries(const Item& item, const Tile& tile, BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  const Call& call = item.call;
  gather_item<E>(item, tile, s.raw, s.rows);
  const int64_t rows = round_up(tile.cells(), kLanes<T>);
  using Path = Plain<Native<T>>;
  transpose_rows<Path>(s.raw.query, s.width.key, rows, call.head_dim, Logits<T>(call).sign, s.query, s.width.query);
  transpose_rows<Path>(s.raw.dout, s.width.value, rows, call.head_dim_v, gradient_scale<T>(call), s.dout,
                       s.width.query);
  compute_delta(rows, call.head_dim_v, s);
  subtract_dlse(item, tile.cells(), gradient_scale<T>(call), s.rows);
  s.score.begin(item.batch, item.head);
  if (s.dropout) s.dropout.list_queries(item.batch, item.head, s.rows.position.query, s.width.query);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
