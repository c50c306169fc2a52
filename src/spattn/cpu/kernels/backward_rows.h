// The query rows of one item of the backward, gathered once: Q and dO, both as they are and transposed, lse and delta.
#pragma once
#include <math.h>

#include "backward_scratch.h"
#include "element.h"
#include "kernels.h"
#include "pack.h"
#include "tile.h"

namespace spattn {
namespace SPATTN_ISA {

// to = (factor * from)': `width` rows of `rows` values, both rounded up to whole vectors in `from`.
template <class T>
void transpose_rows(const T* from, int64_t ld_from, int64_t rows, int64_t width, T factor, T* to, int64_t ld_to) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L) {
    for (int64_t d = 0; d < width; d += L) {
      Vec<T> block[L];
      SPATTN_UNROLL
      for (int i = 0; i < L; ++i) block[i] = load<Vec<T>>(from + (first + i) * ld_from + d) * factor;
      transpose<T>(block);
      for (int i = 0; i < L && i < width - d; ++i) store(to + (d + i) * ld_to + first, block[i]);
    }
  }
}

template <class T> SPATTN_INLINE T add_lanes(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

// The sum of a[i] * b[i] over whole vectors.
template <class T> T dot(const T* a, const T* b, int64_t width) {
  Vec<T> sum = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) sum += load<Vec<T>>(a + j) * load<Vec<T>>(b + j);
  return add_lanes<T>(sum);
}

template <class T> bool all_finite(const T* row, int64_t width) {
  Vec<T> zero = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) zero += load<Vec<T>>(row + j) * T(0);
  return add_lanes<T>(zero) == T(0);
}

// lse2 and delta of a row; takes rows out of the tile that would spread NaN to keys that they may not attend to.
template <class E>
void prepare_row(const Call& call, const Head& outputs, const char* lse_head, int64_t cell,
                 BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  const int64_t position = s.query_position[cell];
  T *query = s.query_rows + cell * s.ld_key, *dout = s.dout_rows + cell * s.ld_value, lse;
  memcpy(&lse, lse_head + position * call.lse.stride[2], sizeof lse);
  read_row<E>(outputs.data + position * outputs.position, outputs.feature, call.head_dim_v, s.out_row);
  const T delta = dot(dout, s.out_row, s.ld_value) * T(call.scale);
  s.idle[cell] = lse == -kInfinity<T>;
  s.exact[cell] = !s.idle[cell] && !(all_finite(query, s.ld_key) && all_finite(dout, s.ld_value) &&
                                     (lse + delta) * T(0) == T(0));
  if (s.idle[cell] || s.exact[cell]) {
    clear(query, s.ld_key);
    clear(dout, s.ld_value);
    return;
  }
  s.lse2[cell] = T(double(lse) * 1.4426950408889634074);  // log2(e)
  s.delta[cell] = delta;
}

template <class E>
void gather_queries(const Call& call, int64_t batch, int64_t head, const Tile& tile,
                    BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  const Head queries(call.q, batch, head), gradients(call.dout, batch, head), outputs(call.out, batch, head);
  gather_rows<E>(queries, tile, s.ld_query, call.head_dim, s.ld_key, s.query_position, s.query_rows);
  gather_rows<E>(gradients, tile, s.ld_query, call.head_dim_v, s.ld_value, s.query_position, s.dout_rows);
  clear(s.out_row, s.ld_value);
  const char* lse_head = call.lse.data + batch * call.lse.stride[0] + head * call.lse.stride[1];
  const int64_t cells = tile.cells();
  for (int64_t cell = 0; cell < s.ld_query; ++cell) {
    s.lse2[cell] = kInfinity<T>;
    s.delta[cell] = T(0);
    s.idle[cell] = true;
    s.exact[cell] = false;
    if (cell < cells && s.query_position[cell] != kPadding) prepare_row<E>(call, outputs, lse_head, cell, s);
  }
  const int64_t rows = round_up(cells, kLanes<T>);
  transpose_rows(s.query_rows, s.ld_key, rows, call.head_dim, T(1), s.query, s.ld_query);
  transpose_rows(s.dout_rows, s.ld_value, rows, call.head_dim_v, T(call.scale), s.dout, s.ld_query);
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
