// Positions of a tile's cells, for score functions.
#pragma once

#include <cstdint>

#include "sm90/forward/params.cuh"

namespace spattn::sm90 {

// Positions of the cells of a box of at most 64 cells; arbitrary for padding. A row of the box runs along axis 2, a
// plane along axes 1 and 2.
struct TilePositions {
  uint32_t first, step;              // position of cell 0, and increment per cell of a row
  uint32_t next_row, next_plane;     // additional increment per row and per plane
  uint32_t per_cell, plane_per_row;  // rows per cell and planes per row, times 2^12

  __device__ __forceinline__ int of(int cell) const {
    const uint32_t row = cell * per_cell >> 12, plane = row * plane_per_row >> 12;
    return int(first + cell * step + row * next_row + plane * next_plane);
  }

  // The position of a cell in the first row.
  __device__ __forceinline__ int of_row(int cell) const { return int(first + cell * step); }

  // Whether 64 cells are in one row.
  __device__ __forceinline__ bool one_row() const { return 63 * per_cell >> 12 == 0; }
};

// Returns 2^12 / size + 1, rounded down: multiplying an index below 64 by it and dropping 12 bits divides the index by
// `size` <= 64. __fdividef may round 2^12 / size down by less than one, which the added 1 makes up for.
__device__ __forceinline__ uint32_t reciprocal_of(int size) {
  return static_cast<uint32_t>(__fdividef(4096.0f, static_cast<float>(size))) + 1;
}

// Returns the positions of the box that starts at (x, y, z) of a view, shifted by `shift`.
__device__ __forceinline__ TilePositions tile_positions(const View& view, int x, int y, int z, int shift) {
  const uint32_t step[3] = {uint32_t(view.stride[0]), uint32_t(view.stride[1]), uint32_t(view.stride[2])};
  return {uint32_t(view.offset) + z * step[0] + y * step[1] + x * step[2] + shift,
          step[2],
          step[1] - view.box[2] * step[2],
          step[0] - view.box[1] * step[1],
          reciprocal_of(view.box[2]),
          reciprocal_of(view.box[1])};
}

// Whether the box that starts at (x, y, z) of a view has padding.
__device__ __forceinline__ bool has_padding(const View& view, int x, int y, int z) {
  return x + view.box[2] > view.extent[2] || y + view.box[1] > view.extent[1] || z + view.box[0] > view.extent[0];
}

// Returns whether a view has no cell of a box. TMA must not load such a box: it reads the first row of the array, which
// may not be in memory if a rank holds other rows alone (seen on H200; stores skip the box).
__device__ __forceinline__ bool is_outside(const View& view, int x, int y, int z) {
  return x >= view.extent[2] || y >= view.extent[1] || z >= view.extent[0];
}

// Returns the bits of a box's padding columns in a mask word of `thread` (mask.cuh).
__device__ __forceinline__ uint32_t padding_columns(const View& view, int x, int y, int z, int thread) {
  uint32_t found = 0;
#pragma unroll 1
  for (int n = 0; n < 16; ++n) {
    int64_t position;
    const int cell = n / 2 * 8 + thread % 4 * 2 + n % 2;
    if (!cell_position(view, x, y, z, cell, position)) found |= 5u << (n / 2 * 4 + n % 2);
  }
  return found;
}

}  // namespace spattn::sm90
