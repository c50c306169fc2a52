// Non-finite inputs: recomputes items that have a non-finite sum.
//
// The tensor cores multiply the zero weights of masked pairs by every column of a tile, and 0 times NaN is NaN. The
// second run over such an item replaces non-finite values of columns by 0. All other terms are unchanged, so the
// results of rows that attend only to finite values do not change.
//
// Rows that attend to a non-finite value are still correct. A non-finite q or k makes the scores non-finite, and hence
// P and dS NaN or 0. NaN times the substituted 0 is still NaN, and a term with weight 0 counts as 0 anyway. A
// non-finite dout has finite weights; add_nonfinite() adds its terms.
#pragma once
#include "sm80/backward/mma_steps.cuh"

namespace spattn::sm80_backward {

// True if this thread's sums are finite, padding rows aside.
template <int kFeatures>
__device__ __forceinline__ bool finite(const Sums<kFeatures>& sums, const Shared& shared) {
  float probe = 0.f;  // NaN once a sum is non-finite
#pragma unroll
  for (int number = 0; number < 2 * kAtoms; ++number) {
    if (shared.row_position[own_row(number / 2, number % 2)] < 0) continue;
#pragma unroll
    for (int n = 0; n < kFeatures / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) probe = fmaf(sums[number / 2][n][number % 2 * 2 + i], 0.f, probe);
    }
  }
  return probe == 0.f;
}

// Returns a bitmask of the columns with a nonzero weight in row half `half` of an atom.
__device__ __forceinline__ unsigned long long seen_columns(const float (&weights)[kColumns / 8][4], int half) {
  unsigned long long seen = 0;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (weights[n][2 * half + i] != 0.f) seen |= 1ull << (8 * n + threadIdx.x % 4 * 2 + i);
    }
  }
  seen |= __shfl_xor_sync(~0u, seen, 1);
  return seen | __shfl_xor_sync(~0u, seen, 2);
}

// Adds the non-finite values of dout that a row attends to, unweighted: a positive weight does not change them.
template <typename Products>
__device__ __forceinline__ void add_nonfinite(Sums<kDimV>& values, const Scores& weights, const Element* columns) {
#pragma unroll
  for (int number = 0; number < 2 * kAtoms; ++number) {
    const unsigned long long seen = seen_columns(weights[number / 2], number % 2);
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int feature = Products::column(n, i);
        for (unsigned long long rest = seen; rest; rest &= rest - 1) {
          const int chunk = sm80::chunk_at<kChunksV>(__ffsll(rest) - 1, feature / kVector);
          const float x = widen(columns[chunk * kVector + feature % kVector]);
          if (!is_finite(x)) values[number / 2][n][number % 2 * 2 + i] += x;
        }
      }
    }
  }
}

template <int kElements>
__device__ __forceinline__ void clear_nonfinite(Element* tile) {
  for (int i = threadIdx.x; i < kElements; i += kThreads) {
    if (!is_finite(float(widen(tile[i])))) narrow(0.f, tile[i]);
  }
}

}  // namespace spattn::sm80_backward
