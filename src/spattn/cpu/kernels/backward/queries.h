// The query rows of one item of the backward, gathered once: Q and dO, both as they are and transposed; lse and delta.
#pragma once
#include <math.h>

#include "backward/exact.h"
#include "backward/scratch.h"
#include "simd/element.h"
#include "kernels.h"
#include "tile/operand.h"
#include "softmax/softmax.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// A number as a sum of two.
template <class T> struct Split {
  T high, low;
};

// x * log2(e), the logarithm or logits of base e to base 2.
template <class T> Split<T> to_base_2(double x) {
  constexpr double kLog2e = 1.4426950408889634074, kRest = 2.0355273740931033e-17;
  const double product = x * kLog2e, rest = __builtin_fma(x, kLog2e, -product) + x * kRest;
  const T high = T(product);
  return {high, T(product - double(high) + rest)};
}

// |scale| * log2(e). The first part is rounded down, so that the second is positive and a logit of -inf stays -inf. As
// Scale has it, a scale that rounds to 0 makes the logits 0 and the factor 1.
template <class T> Split<T> weight_factor(double scale) {
  Split<T> factor = to_base_2<T>(scale < 0 ? -scale : scale);
  if (factor.high == T(0)) return {T(1), T(0)};
  if (!(factor.low > T(0))) {
    const T below = bit_cast<T>(Word<T>(bit_cast<Word<T>>(factor.high) - 1));
    factor = {below, factor.low + (factor.high - below)};
  }
  return factor;
}

// The L rows and L columns of `from` at (first, d), times `factor`, transposed.
template <class T>
SPATTN_INLINE void transpose_block(const T* from, int64_t ld, int64_t first, int64_t d, T factor,
                                   Vec<T> (&block)[kLanes<T>]) {
  SPATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) block[i] = load<Vec<T>>(from + (first + i) * ld + d) * factor;
  transpose<T>(block);
}

// to = (factor * from)': `width` rows of `rows` values, both rounded up to whole vectors in `from`.
template <class T>
void transpose_rows(const T* from, int64_t ld_from, int64_t rows, int64_t width, T factor, T* to, int64_t ld_to) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L) {
    for (int64_t d = 0; d < width; d += L) {
      Vec<T> block[L];
      transpose_block(from, ld_from, first, d, factor, block);
      for (int i = 0; i < L && i < width - d; ++i) store(to + (d + i) * ld_to + first, block[i]);
    }
  }
}

// delta = rowsum(dO o O), summed as dP = dO V' is: a row that attends to one key alone has O = V and dS = 0 exactly.
template <class T> void compute_delta(int64_t rows, int64_t width, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> delta = {};
    for (int64_t d = 0; d < width; d += L) {
      Vec<T> out[L];
      transpose_block(s.out_rows, s.ld_value, first, d, T(1), out);
      const T* dout = s.dout + d * s.ld_query + first;
      for (int i = 0; i < L && i < width - d; ++i) delta += out[i] * load<Vec<T>>(dout + i * s.ld_query);
    }
    store(s.delta + first, delta);
  }
}

template <class T> bool all_finite(const T* row, int64_t width) {
  Vec<T> zero = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) zero += load<Vec<T>>(row + j) * T(0);
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += zero[i];
  return sum == T(0);
}

// The same of bfloat16 numbers as they are stored.
inline bool all_finite(const uint16_t* row, int64_t width) {
  uint16_t largest = 0;
  for (int64_t j = 0; j < width; ++j) {
    const uint16_t magnitude = row[j] & 0x7fff;
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest < 0x7f80;
}

// Q, dO and O of the queries of an item, padded with zeros to `width` and `width_value`.
template <class U> struct QueryRows {
  U *query, *dout, *out;
  int64_t width, width_value;
};

// lse2 of a row; takes rows out of the tile that would spread NaN to keys that they may not attend to, those whose lse
// is too far out to find their weights, and those that s.exact has already.
template <class T, class U>
void prepare_row(const Call& call, T lse, const QueryRows<U>& rows, int64_t cell, BackwardScratch<T>& s) {
  U *query = rows.query + cell * rows.width, *dout = rows.dout + cell * rows.width_value,
    *out = rows.out + cell * rows.width_value;
  const bool fit = all_finite(query, rows.width) && all_finite(dout, rows.width_value) &&
                   all_finite(out, rows.width_value) && fabs(double(lse)) <= call.far_lse;
  s.idle[cell] = lse == -kInfinity<T>;
  s.exact[cell] = !s.idle[cell] && (s.exact[cell] || !fit);
  if (s.idle[cell] || s.exact[cell]) {
    clear(query, rows.width);
    clear(dout, rows.width_value);
    clear(out, rows.width_value);
    return;
  }
  const Split<T> lse2 = to_base_2<T>(lse);
  s.lse2[cell] = lse2.high;
  s.lse2_low[cell] = lse2.low;
}

// Fills `rows` with the rows of an item as the element type E reads them, and the rows' entries of `s`.
template <class E, class T>
void gather_item(const Call& call, int64_t batch, int64_t head, const Work& item, const Tile& tile,
                 const QueryRows<typename E::Compute>& rows, BackwardScratch<T>& s) {
  const auto gather = [&](const Array& array, int64_t width, int64_t ld, typename E::Compute* to) {
    gather_rows<E>(Head(array, batch, head), tile, s.ld_query, width, ld, s.query_position, to);
  };
  gather(call.q, call.head_dim, rows.width, rows.query);
  gather(call.dout, call.head_dim_v, rows.width_value, rows.dout);
  gather(call.out, call.head_dim_v, rows.width_value, rows.out);
  leave_marked(call, batch, head, item, tile.cells(), s);
  for (int64_t cell = 0; cell < s.ld_query; ++cell) {
    s.lse2[cell] = kInfinity<T>;
    s.lse2_low[cell] = T(0);
    s.idle[cell] = true;
    if (cell >= tile.cells() || s.query_position[cell] == kPadding) continue;
    prepare_row(call, read_lse<T>(call, batch, head, s.query_position[cell]), rows, cell, s);
  }
}

template <class E>
void gather_queries(const Call& call, int64_t batch, int64_t head, const Work& item, const Tile& tile,
                    BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  gather_item<E>(call, batch, head, item, tile, {s.query_rows, s.dout_rows, s.out_rows, s.ld_key, s.ld_value}, s);
  const int64_t rows = round_up(tile.cells(), kLanes<T>);
  transpose_rows(s.query_rows, s.ld_key, rows, call.head_dim, Scale<T>(call.scale).sign, s.query, s.ld_query);
  transpose_rows(s.dout_rows, s.ld_value, rows, call.head_dim_v, T(call.scale), s.dout, s.ld_query);
  compute_delta(rows, call.head_dim_v, s);
}

// K or V of a key tile, `rows` by `ld`: every product of the backward reads whole vectors of adjacent rows.
template <class E>
Operand<typename E::Compute> key_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t ld,
                                      int64_t* position, typename E::Compute* buffer) {
  using T = typename E::Compute;
  if (rows == tile.cells() && width == ld && readable_in_place<E>(head, tile)) {
    const Operand<T> direct = in_place<E>(head, tile);
    if (direct.ld == ld) return direct;
  }
  gather_rows<E>(head, tile, rows, width, ld, position, buffer);
  return {buffer, ld};
}

}  // namespace SPATTN_ISA
}  // namespace spattn
