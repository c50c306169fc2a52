// A consumer warpgroup and its positions in the rings.
#pragma once

#include "sm90/backward/config.cuh"

namespace spattn::sm90_backward {

constexpr int kScoreSums = kScores ? kDim / 2 : 4;   // accumulators of dK or dQ; 4: unused
constexpr int kValueSums = kValues ? kDimV / 2 : 4;  // accumulators of dV
constexpr int kProducts = kStep / 2;                 // accumulators per product
constexpr int kWeights = kProducts / 2;              // as pairs of elements

struct Warpgroup {
  const Params& p;
  Shared& shared;
  const int number = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  const int thread = threadIdx.x % 128;
  RingPosition<kStages> ring;
  RingPosition<kBlocks> rows;
  RingPosition<kTasks> tasks;

  __device__ __forceinline__ const Assignment& assigned() const { return shared.assigned[tasks.stage]; }

  // Arrives once per warp, at a barrier that counts warps.
  __device__ __forceinline__ void arrive(uint64_t& barrier) const {
    if (thread % 32 == 0) barrier_arrive(shared_address(&barrier));
  }

  // Row of a 64-row tile that this lane passes to store_matrices, and its address in a tile of 128-byte rows.
  __device__ __forceinline__ int matrix_row() const { return thread / 32 * 16 + thread % 16; }

  __device__ __forceinline__ uint32_t matrix_address(const void* tile, int chunk) const {
    const int row = matrix_row(), half = thread % 32 / 16;
    return shared_address(tile) + (number * kSubtile + row) * kRowBytes + ((chunk + half) ^ (row % 8)) * 16;
  }
};

}  // namespace spattn::sm90_backward
