// Copies rows of a head, gathered by position, to swizzled tiles in shared memory.
#pragma once
#include "common/element.cuh"
#include "sm80/params.cuh"
#include "sm80/ptx.cuh"

namespace spattn::sm80 {

constexpr int kLoadUnroll = 4;  // copies whose addresses are computed together

// Returns the swizzled offset, in 16-byte chunks, of a chunk in a tile with kChunks chunks per row. The same chunk of
// eight consecutive rows falls into eight different bank groups, as ldmatrix and row-wise reads need. If a row has an
// odd number of 64-byte half-lines, rows alternate between the halves of a 128-byte line, and four swizzle values
// suffice.
template <int kChunks>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  static_assert(kChunks % 4 == 0, "rows of whole 64-byte half-lines");
  return row * kChunks + (chunk ^ (kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3));
}

// Returns the shared-memory address of chunk `first + ahead` of a row, given that of chunk `first`, for first < 2 and
// even `ahead`. The swizzle permutes chunks within a line, so one XOR (free for a constant) replaces chunk_at().
template <int kChunks>
__device__ __forceinline__ unsigned advance(unsigned address, int ahead) {
  constexpr int kSpan = kChunks % 8 == 0 ? 8 : 4;
  return (address ^ (ahead % kSpan * 16)) + ahead / kSpan * kSpan * 16;
}

// Reads 16-byte chunk `number` of a float32 row.
__device__ __forceinline__ float4 chunk(const Element* row, int number) {
  return *reinterpret_cast<const float4*>(row + number * kVector);
}

// Copies one chunk element by element, for any alignment, stride and number of columns.
__device__ __forceinline__ void copy_elements(Element* destination, const Element* source, long long column_stride,
                                              int columns) {
  alignas(16) Element chunk[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < columns) {
      chunk[i] = source[i * column_stride];
    } else {
      narrow(Sum(0), chunk[i]);
    }
  }
  *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(chunk);
}

// Calls visit(row, chunk) for each chunk of a tile that this thread handles.
template <int kRows, int kChunks, int kThreads, typename Visit>
__device__ __forceinline__ void for_own_chunks(Visit visit) {
  constexpr int kTotal = kRows * kChunks, kTurns = (kTotal + kThreads - 1) / kThreads;
#pragma unroll kLoadUnroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int i = turn * kThreads + threadIdx.x;
    if (kTotal % kThreads != 0 && i >= kTotal) break;
    // If each turn covers whole rows, a thread keeps its chunk column.
    const bool whole = kThreads % kChunks == 0;
    const int row = whole ? turn * (kThreads / kChunks) + threadIdx.x / kChunks : i / kChunks;
    visit(row, whole ? threadIdx.x % kChunks : i % kChunks);
  }
}

// Loads kRows rows × kChunks chunks, starting at column `first_column`, into a swizzled tile. Writes zeros, without a
// read, for rows at position -1 and columns from `columns` on. With kAligned the copies are asynchronous until
// copies_wait().
template <int kRows, int kChunks, int kThreads, bool kAligned>
__device__ __forceinline__ void load_rows(Element* tile, const Element* head, const Array& array, const int* position,
                                          int first_column, int columns) {
  for_own_chunks<kRows, kChunks, kThreads>([&](int row, int chunk) {
    const int column = first_column + chunk * kVector, at = position[row];
    const bool inside = at >= 0 && column < columns;
    Element* destination = tile + chunk_at<kChunks>(row, chunk) * kVector;
    if constexpr (kAligned) {
      copy_async(shared_address(destination), inside ? head + at * array.row + column : head, inside);
    } else {
      const Element* source = inside ? head + at * array.row + column * array.column : head;
      copy_elements(destination, source, array.column, inside ? columns - column : 0);
    }
  });
}

// Rounds this thread's chunks of a float32 tile to TF32, once for all warps that read them.
template <int kRows, int kChunks, int kThreads>
__device__ __forceinline__ void round_rows(Element* tile) {
  for_own_chunks<kRows, kChunks, kThreads>([&](int row, int number) {
    uint4& bits = *reinterpret_cast<uint4*>(tile + chunk_at<kChunks>(row, number) * kVector);
    bits = make_uint4(round_to_tf32(__uint_as_float(bits.x)), round_to_tf32(__uint_as_float(bits.y)),
                      round_to_tf32(__uint_as_float(bits.z)), round_to_tf32(__uint_as_float(bits.w)));
  });
}

// Multiplies a tile in place by -1 or 0, the sign of the scale.
template <int kElements, int kThreads>
__device__ inline void multiply_tile(Element* tile, int factor) {
  for (int i = threadIdx.x; i < kElements; i += kThreads) narrow(widen(tile[i]) * Sum(factor), tile[i]);
}

}  // namespace spattn::sm80
