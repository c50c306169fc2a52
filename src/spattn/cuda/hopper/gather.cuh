// Rows that lie anywhere: the producers' copies for plans whose places are looked up, one row of a tile at a time.
//
// TMA reads lattices. What a table of places names is copied 16 bytes a lane instead (cp.async), to where TMA would have
// put it, in the same swizzle. Each lane's copies arrive at the stage's barrier by themselves once they have landed, so
// that as many stages are under way as there are. Tensor cores read through another proxy than these copies write:
// consumers fence what they have waited for.
#pragma once

#include "hopper/barrier.cuh"
#include "hopper/config.cuh"

namespace spattn::hopper {

// 16 bytes, or as many zeros.
__device__ __forceinline__ void copy_chunk(uint32_t target, const void* source, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(real ? 16 : 0)
               : "memory");
}

// Arrives once for this lane when all that it has copied so far has landed.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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
      int at[kChunks];  // all of them before the first copy, which would wait for each shuffle otherwise
#pragma unroll
      for (int n = 0; n < kChunks; ++n) at[n] = __shfl_sync(kAll, rows.at[i], n * kTogether + row);
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const uint32_t to = phase[n % kPhases] + (32 * i + n / kPhases * 8) * kRowBytes;
        copy_chunk(to, first + int64_t(at[n]) * stride, wanted && at[n] >= 0);
      }
    }
  }

  // All that has been copied since the last call is what `full` stands for, and what any lane has written.
  __device__ __forceinline__ void submit(uint32_t full) const {
    arrive_when_copied(full);
    __syncwarp();
    if (lane == 0 && part == 0) barrier_arrive(full);
  }
};

}  // namespace spattn::hopper
