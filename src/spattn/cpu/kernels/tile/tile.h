// A tile, which is a box of an affine lattice, and the positions of its cells.
#pragma once
#include "kernels.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int64_t kPadding = -1;

struct Tile {
  int64_t start;      // position of the first cell
  int64_t stride[3];  // distance between neighbours along each axis
  int64_t box[3];
  int64_t count[3];      // cells within the sequence along each axis, at most box; the rest is padding
  const int32_t* order;  // permutation from lattice indices to positions; null: identity

  // Returns the number of cells without trailing padding.
  int64_t cells() const { return ((count[0] - 1) * box[1] + count[1] - 1) * box[2] + count[2]; }
  // Extends the closed range [low, high] to all positions of the tile.
  void cover(int64_t& low, int64_t& high) const {
    int64_t least = start, most = start;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t across = (count[axis] - 1) * stride[axis];
      (across < 0 ? least : most) += across;
    }
    low = least < low ? least : low, high = most > high ? most : high;
  }
  // True if cells are evenly spaced: cell c has position start + c * stride[2].
  bool even() const { return !order && box[0] == 1 && box[1] == 1; }
};

inline Tile locate(const View& view, int64_t number, const int32_t* order) {
  Tile tile;
  tile.start = view.offset;
  tile.order = order;
  for (int axis = 2; axis >= 0; --axis) {
    const int64_t rest =
        number < view.grid[axis] ? 0 : number / view.grid[axis];  // a branch is cheaper than a division
    const int64_t first = (number - rest * view.grid[axis]) * view.box[axis], left = view.extent[axis] - first;
    number = rest;
    tile.stride[axis] = view.stride[axis];
    tile.box[axis] = view.box[axis];
    tile.count[axis] = left < view.box[axis] ? left : view.box[axis];
    tile.start += first * view.stride[axis];
  }
  return tile;
}

// Writes the positions of tile.cells() cells, kPadding for padding; returns their number.
inline int64_t list_positions(const Tile& tile, int64_t* positions) {
  const int64_t cells = tile.cells();
  int64_t cell = 0;
  for (int64_t i = 0; i < tile.count[0]; ++i) {
    for (int64_t j = 0; j < tile.box[1] && cell < cells; ++j) {
      const int64_t line = tile.start + i * tile.stride[0] + j * tile.stride[1];
      const int64_t real = j < tile.count[1] ? tile.count[2] : 0;
      for (int64_t k = 0; k < tile.box[2] && cell < cells; ++k, ++cell) {
        positions[cell] = k < real ? line + k * tile.stride[2] : kPadding;
      }
    }
  }
  if (tile.order) {
    for (int64_t i = 0; i < cells; ++i) positions[i] = positions[i] == kPadding ? kPadding : tile.order[positions[i]];
  }
  return cells;
}

// As list_positions(); continues with kPadding up to `padded` positions.
inline int64_t list_padded(const Tile& tile, int64_t padded, int64_t* positions) {
  const int64_t cells = tile.cells();
  if (tile.even()) {
    for (int64_t i = 0; i < cells; ++i) positions[i] = tile.start + i * tile.stride[2];
  } else {
    list_positions(tile, positions);
  }
  for (int64_t i = cells; i < padded; ++i) positions[i] = kPadding;
  return cells;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
