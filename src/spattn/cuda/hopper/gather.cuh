// Rows that lie anywhere: the producer's copies for plans whose places are looked up, one row of a tile at a time.
//
// TMA reads lattices. What a table of places names is copied 16 bytes a lane instead (cp.async), to where TMA would have
// put it, in the same swizzle. Tensor cores read through another proxy: a stage is handed over by the copying warp, once
// its copies have landed and have been fenced, some copies later, so that several stages are under way at a time.
#pragma once

#include "hopper/barrier.cuh"
#include "hopper/config.cuh"

namespace spattn::hopper {

// 16 bytes, or as many zeros.
__device__ __forceinline__ void copy_chunk(uint32_t target, const void* source, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(real ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A warp's share of the rows of a tile or step, as a lane knows them: number 32 i + lane of the share; -1 where there is
// none.
template <int kRows>
struct RowsOf {
  static constexpr int kWords = kRows / kLoaders / 32;
  int at[kWords];
};

using StepRows = RowsOf<kStepKV>;
using QueryRows = RowsOf<kBlockQ>;

struct Gatherer {
  static constexpr uint32_t kAll = 0xffffffff;
  static constexpr int kChunks = kDim / 8;        // of 16 bytes in a row
  static constexpr int kTogether = 32 / kChunks;  // rows that the lanes copy side by side
  static constexpr int kPhases = 8 / kTogether;   // of the swizzle
  const int part;                                 // of the loading warps
  const int lane = threadIdx.x % 32;
  uint32_t older = 0, newer = 0;  // barriers of stages that are under way

  // Where chunk `chunk` of row `row` lies in panels of so many rows.
  template <int kRows>
  __device__ __forceinline__ static uint32_t place(int row, int chunk) {
    return (chunk / 8 * kRows + row) * kRowBytes + (chunk % 8 ^ row % 8) * 16;
  }

  // This warp's share of a tile; `stride` in bytes.
  template <int kRows>
  __device__ __forceinline__ void copy(uint32_t target, const Element* source, int stride, int dims,
                                       const RowsOf<kRows>& rows) const {
    const int chunk = lane % kChunks, row = lane / kChunks;
    const bool wanted = chunk * 8 < dims;
    const char* first = reinterpret_cast<const char*>(source + chunk * 8);
    target += part * (kRows / kLoaders) * kRowBytes;
    uint32_t phase[kPhases];
#pragma unroll
    for (int j = 0; j < kPhases; ++j) phase[j] = target + place<kRows>(j * kTogether + row, chunk);
#pragma unroll
    for (int i = 0; i < RowsOf<kRows>::kWords; ++i) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const int at = __shfl_sync(kAll, rows.at[i], n * kTogether + row);
        const uint32_t to = phase[n % kPhases] + (32 * i + n / kPhases * 8) * kRowBytes;
        copy_chunk(to, first + int64_t(at) * stride, wanted && at >= 0);
      }
    }
  }

  __device__ __forceinline__ void hand_over(uint32_t full) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  }

  // What has been copied since the last call is what `full` stands for.
  __device__ __forceinline__ void submit(uint32_t full) {
    copy_commit();
    if (older != 0) {
      copy_wait<2>();
      hand_over(older);
    }
    older = newer;
    newer = full;
  }

  __device__ __forceinline__ void flush() {
    if (newer == 0) return;
    copy_wait<0>();
    if (older != 0) hand_over(older);
    hand_over(newer);
    older = newer = 0;
  }

  // Waits for a phase. Where that takes time, everything is handed over before: it may be what the others wait for.
  __device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    if (__all_sync(kAll, barrier_try_wait(barrier, parity))) return;
    flush();
    barrier_wait(barrier, parity);
  }
};

}  // namespace spattn::hopper
