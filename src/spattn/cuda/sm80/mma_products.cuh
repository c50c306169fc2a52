// Products of 16-bit tiles in shared memory, swizzled by chunk_at(). A warp computes kAtoms atoms of 16 rows; results
// use mma.m16n8k16's accumulator layout (scores.cuh).
#pragma once
#include "sm80/ptx.cuh"
#include "sm80/rows.cuh"

namespace spattn::sm80 {

// Loads operand fragments of this warp's rows for features [16 k16, 16 k16 + 16).
template <int kAtoms, int kChunks>
__device__ __forceinline__ void load_fragments(unsigned (&a)[kAtoms][4], const Element* rows, int k16) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * kAtoms + lane % 16;
  const unsigned base = shared_address(rows + chunk_at<kChunks>(row, lane / 16) * kVector);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    load_matrices(a[atom], advance<kChunks>(base, 2 * k16) + atom * 16 * kChunks * 16);
  }
}

// Returns the address that this lane passes to ldmatrix for the first matrices of `columns`.
template <int kChunks>
__device__ __forceinline__ unsigned columns_address(const Element* columns) {
  const int lane = threadIdx.x % 32;
  return shared_address(columns + chunk_at<kChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * kVector);
}

// Adds A Cᵀ over features [16 k16, 16 k16 + 16) to s; the columns of s are the rows of tile C.
template <int kAtoms, int kTiles, int kChunks>
__device__ __forceinline__ void multiply_transposed(float (&s)[kAtoms][kTiles][4], const unsigned (&a)[kAtoms][4],
                                                    unsigned columns, int k16) {
#pragma unroll
  for (int n16 = 0; n16 < kTiles / 2; ++n16) {
    unsigned b[4];
    load_matrices(b, advance<kChunks>(columns, 2 * k16) + n16 * 16 * kChunks * 16);
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      multiply_add(s[atom][2 * n16], a[atom], b[0], b[1], Element());
      multiply_add(s[atom][2 * n16 + 1], a[atom], b[2], b[3], Element());
    }
  }
}

// Adds P C to `sums`. P stays in registers: the accumulator layout of S is the operand layout of P.
template <int kAtoms, int kTiles, int kFeatureTiles>
__device__ __forceinline__ void accumulate(float (&sums)[kAtoms][kFeatureTiles][4], const float (&p)[kAtoms][kTiles][4],
                                           const Element* columns) {
  constexpr int kChunks = kFeatureTiles * 8 / kVector;
  const int lane = threadIdx.x % 32;
  const unsigned base = shared_address(columns + chunk_at<kChunks>(lane % 16, lane / 16) * kVector);
#pragma unroll
  for (int k16 = 0; k16 < kTiles / 2; ++k16) {
    unsigned a[kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = p[atom][2 * k16 + i / 2] + 2 * (i % 2);
        narrow(pair[0], pair[1], *reinterpret_cast<Element2*>(&a[atom][i]));
      }
    }
#pragma unroll
    for (int n16 = 0; n16 < kFeatureTiles / 2; ++n16) {
      unsigned b[4];
      load_matrices_transposed(b, advance<kChunks>(base, 2 * n16) + k16 * 16 * kChunks * 16);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        multiply_add(sums[atom][2 * n16], a[atom], b[0], b[1], Element());
        multiply_add(sums[atom][2 * n16 + 1], a[atom], b[2], b[3], Element());
      }
    }
  }
}

}  // namespace spattn::sm80
