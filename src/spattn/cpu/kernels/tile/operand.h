// Operands of the matrix products: read in place if the strides permit, else gathered, converted and padded.
#pragma once
#include "simd/element.h"
#include "kernels.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// One head of an array, (position, feature).
struct Head {
  char* data;
  int64_t position, feature;  // strides in bytes

  Head(const Array& array, int64_t batch, int64_t head)
      : data(array.data + batch * array.stride[0] + head * array.stride[1]), position(array.stride[2]),
        feature(array.stride[3]) {}

  char* row(int64_t number) const { return data + number * position; }
};

template <class T> struct Operand {
  const T* data;
  int64_t ld;  // in elements
};

template <class T> SPATTN_INLINE void clear(T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from[i] = T(0);
}

// Gathers and converts the rows at `position`; pads them with zeros to (rows, ld).
template <class E>
void gather_positions(const Head& head, const int64_t* position, int64_t cells, int64_t rows, int64_t width, int64_t ld,
                      typename E::Compute* out) {
  for (int64_t i = 0; i < cells; ++i) {
    if (position[i] == kPadding) {
      clear(out + i * ld, ld);
    } else {
      read_row<E>(head.row(position[i]), head.feature, width, out + i * ld);
      if (width < ld) clear(out + i * ld + width, ld - width);
    }
  }
  clear(out + cells * ld, (rows - cells) * ld);
}

// As gather_positions() for the cells of a tile; writes their positions to `position`.
template <class E>
void gather_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t ld, int64_t* position,
                 typename E::Compute* out) {
  gather_positions<E>(head, position, list_positions(tile, position), rows, width, ld, out);
}

// Gathers `rows` queries from cell `first` on, padded with zeros to (rows, ld).
template <class E>
void gather_queries(const Head& head, int64_t first, int64_t rows, int64_t cells, int64_t width, int64_t ld,
                    const int64_t* position, typename E::Compute* out) {
  for (int64_t i = 0; i < rows; ++i, out += ld) {
    const bool real = first + i < cells && position[first + i] != kPadding;
    if (real) read_row<E>(head.row(position[first + i]), head.feature, width, out);
    const int64_t filled = real ? width : 0;
    if (filled < ld) clear(out + filled, ld - filled);
  }
}

// Prefetches the rows of a tile to the L1 cache if they are evenly spaced and their features contiguous.
inline void prefetch_rows(const Head& head, const Tile& tile, int64_t bytes) {
  if (!tile.even() || head.feature < 0 || head.feature > 8) return;
  const char* row = head.row(tile.start);
  for (int64_t i = 0; i < tile.count[2]; ++i, row += tile.stride[2] * head.position) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 3);
  }
}

// True if the rows of the head are contiguous, aligned and stored as E::Compute.
template <class E> bool as_computed(const Head& head) {
  using T = typename E::Compute;
  constexpr int64_t size = sizeof(T);
  return sizeof(typename E::Storage) == sizeof(T) && head.feature == size && head.position % size == 0 &&
         reinterpret_cast<uintptr_t>(head.data) % size == 0;
}

// True if the kernels can read the cells of `tile` in place.
template <class E> bool readable_in_place(const Head& head, const Tile& tile) {
  return as_computed<E>(head) && tile.even();
}

template <class E> Operand<typename E::Compute> in_place(const Head& head, const Tile& tile) {
  using T = typename E::Compute;
  return {reinterpret_cast<const T*>(head.row(tile.start)), tile.stride[2] * head.position / int64_t(sizeof(T))};
}

// Returns K or V of a key tile as `rows` rows: in place if they need neither conversion nor padding and, with
// `adjacent`, have leading dimension `ld`; else gathered to `buffer`, (rows, ld).
template <class E>
Operand<typename E::Compute> tile_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t ld,
                                       bool adjacent, int64_t* position, typename E::Compute* buffer) {
  if (rows == tile.cells() && width == ld && readable_in_place<E>(head, tile)) {
    const Operand<typename E::Compute> direct = in_place<E>(head, tile);
    if (!adjacent || direct.ld == ld) return direct;
  }
  gather_rows<E>(head, tile, rows, width, ld, position, buffer);
  return {buffer, ld};
}

}  // namespace SPATTN_ISA
}  // namespace spattn
