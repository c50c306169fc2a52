// Gathered KV: copies row by row in place of TMA, which reads lattices only.
//
// cp.async copies 16 bytes per lane to the same swizzled addresses as TMA. Each lane's copies arrive at the stage's
// barrier asynchronously, so that all stages can be in flight. The copies write through the generic proxy and the
// tensor cores read through the async proxy: consumers fence after their wait.
#pragma once

#include "sm90/isa/barrier.cuh"
#include "sm90/forward/config.cuh"

namespace spattn::sm90 {

// Copies 16 bytes, or writes zeros if `real` is false.
__device__ __forceinline__ void copy_chunk(uint32_t target, const void* source, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(real ? 16 : 0)
               : "memory");
}

// Arrives once for this lane when all its previous copies have landed.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A producer warp's row indices of a tile or iteration: lane l holds rows 32 i + l; -1 for padding.
template <int kRows>
struct RowsOf {
  static constexpr int kWords = kRows / kLoaders / 32;
  int at[kWords];
};

using StepRows = RowsOf<kStepKV>;
using QueryRows = RowsOf<kBlockQ>;

struct Gatherer {
  static constexpr uint32_t kAll = 0xffffffff;
  const int part;  // index of this producer warp
  const int lane = threadIdx.x % 32;

  // Returns the byte offset of chunk `chunk` of row `row` in panels of kRows rows.
  template <int kRows>
  __device__ __forceinline__ static uint32_t place(int row, int chunk) {
    return (chunk / 8 * kRows + row) * kRowBytes + (chunk % 8 ^ row % 8) * 16;
  }

  // Copies this warp's rows of a tile: kWidth panels of each term, the features of slice `slice`.
  template <int kWidth, int kRows>
  __device__ __forceinline__ void copy(uint32_t target, const RowSource& source, const RowsOf<kRows>& rows,
                                       int slice = 0) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      copy_term<kWidth>(target + term * kWidth * kRows * kRowBytes,
                        source.first + term * kDim + slice * kWidth * kPanelColumns, int(source.stride * sizeof(Term)),
                        source.columns - slice * kWidth * kPanelColumns, rows);
    }
  }

  // Copies one term of the rows; `stride` is in bytes.
  template <int kWidth, int kRows>
  __device__ __forceinline__ void copy_term(uint32_t target, const Term* source, int stride, int columns,
                                            const RowsOf<kRows>& rows) const {
    static_assert(kWidth == 1 || kWidth == 2 || kWidth == 4);
    constexpr int kChunks = kWidth * 8;      // 16-byte chunks per row
    constexpr int kTogether = 32 / kChunks;  // rows per copy instruction
    constexpr int kPhases = 8 / kTogether;   // rows that a lane copies of every eight
    const int chunk = lane % kChunks, row = lane / kChunks;
    constexpr int kColumns = 16 / sizeof(Term);
    const bool wanted = chunk * kColumns < columns;
    const char* first = reinterpret_cast<const char*>(source + chunk * kColumns);
    target += part * (kRows / kLoaders) * kRowBytes;
    uint32_t phase[kPhases];
#pragma unroll
    for (int j = 0; j < kPhases; ++j) phase[j] = target + place<kRows>(j * kTogether + row, chunk);
#pragma unroll
    for (int i = 0; i < RowsOf<kRows>::kWords; ++i) {
      int at[kChunks];  // shuffle before the first copy; otherwise each copy would wait for its shuffle
#pragma unroll
      for (int n = 0; n < kChunks; ++n) at[n] = __shfl_sync(kAll, rows.at[i], n * kTogether + row);
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const uint32_t to = phase[n % kPhases] + (32 * i + n / kPhases * 8) * kRowBytes;
        copy_chunk(to, first + int64_t(at[n]) * stride, wanted && at[n] >= 0);
      }
    }
  }

  // Lets `full` complete once all copies since the last call, and the lanes' own writes, have landed.
  __device__ __forceinline__ void submit(uint32_t full) const {
    arrive_when_copied(full);
    __syncwarp();
    if (lane == 0 && part == 0) barrier_arrive(full);
  }
};

}  // namespace spattn::sm90
