// Operands of the matrix products: read in place where the array allows it, otherwise gathered, converted and padded.
#pragma once
#include "element.h"
#include "kernels.h"
#include "scratch.h"
#include "tile.h"

namespace spattn {
namespace SPATTN_ISA {

// One head of an array: element (position, feature).
struct Head {
  const char* data;
  int64_t position, feature;  // strides in bytes

  Head(const Array& array, int64_t batch, int64_t head)
      : data(array.data + batch * array.stride[0] + head * array.stride[1]),
        position(array.stride[2]),
        feature(array.stride[3]) {}
};

template <class T> struct Operand {
  const T* data;
  int64_t ld;  // elements from row to row
};

template <class T> SPATTN_INLINE void clear(T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from[i] = T(0);
}

// The rows of a key tile, converted and padded with zeros to `rows` by `ld`.
template <class E>
void gather_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t ld, int64_t* position,
                 typename E::Compute* out) {
  const int64_t cells = list_positions(tile, position);
  for (int64_t i = 0; i < cells; ++i) {
    if (position[i] == kPadding) {
      clear(out + i * ld, ld);
    } else {
      read_row<E>(head.data + position[i] * head.position, head.feature, width, out + i * ld);
      clear(out + i * ld + width, ld - width);
    }
  }
  clear(out + cells * ld, (rows - cells) * ld);
}

// Can the cells of `tile` be read in place, as rows of E::Compute?
template <class E> bool readable_in_place(const Head& head, const Tile& tile) {
  using T = typename E::Compute;
  constexpr int64_t size = sizeof(T);
  return sizeof(typename E::Storage) == sizeof(T) && head.feature == size && tile.even() &&
         head.position % size == 0 && reinterpret_cast<uintptr_t>(head.data) % size == 0;
}

template <class E> Operand<typename E::Compute> in_place(const Head& head, const Tile& tile) {
  using T = typename E::Compute;
  return {reinterpret_cast<const T*>(head.data + tile.start * head.position),
          tile.stride[2] * head.position / int64_t(sizeof(T))};
}

// K of a tile: `rows`, a multiple of kKeyRows, rows of head_dim scalars.
template <class E>
Operand<typename E::Compute> key_operand(const Head& head, const Tile& tile, int64_t rows, const Call& call,
                                         Scratch<typename E::Compute>& s) {
  if (rows == tile.cells() && readable_in_place<E>(head, tile)) return in_place<E>(head, tile);
  gather_rows<E>(head, tile, rows, call.head_dim, s.ld_key, s.key_position, s.keys);
  return {s.keys, s.ld_key};
}

// V of a tile: whole vectors, read once for every kOutputRows queries. Rows far apart would fall into few cache sets, so
// only adjacent ones are read in place; that they may straddle cache lines costs less than a copy.
template <class E>
Operand<typename E::Compute> value_operand(const Head& head, const Tile& tile, const Call& call,
                                           Scratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  if (readable_in_place<E>(head, tile) && call.head_dim_v == s.ld_value) {
    const Operand<T> direct = in_place<E>(head, tile);
    if (direct.ld == s.ld_value) return direct;
  }
  gather_rows<E>(head, tile, tile.cells(), call.head_dim_v, s.ld_value, s.key_position, s.values);
  return {s.values, s.ld_value};
}

// s.query = (sign * Q)' of the cells [0, cells) listed in s.query_position, the rest of the vectors in use zero.
template <class E>
void pack_query(const Head& head, int64_t cells, typename E::Compute sign, const Call& call,
                Scratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  constexpr int L = kLanes<T>;
  T* staged = s.keys;  // L rows; no key is there yet
  for (int64_t first = 0; first < cells; first += L) {
    for (int64_t i = 0; i < L; ++i) {
      T* row = staged + i * s.ld_key;
      const bool real = first + i < cells && s.query_position[first + i] != kPadding;
      const int64_t width = real ? call.head_dim : 0;
      if (real) read_row<E>(head.data + s.query_position[first + i] * head.position, head.feature, width, row);
      clear(row + width, s.ld_key - width);
    }
    for (int64_t d = 0; d < call.head_dim; d += L) {
      Vec<T> block[L];
      SPATTN_UNROLL
      for (int i = 0; i < L; ++i) block[i] = load<Vec<T>>(staged + i * s.ld_key + d) * sign;
      transpose<T>(block);
      const int64_t left = call.head_dim - d;
      for (int i = 0; i < L && i < left; ++i) store(s.query + (d + i) * s.ld_query + first, block[i]);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
