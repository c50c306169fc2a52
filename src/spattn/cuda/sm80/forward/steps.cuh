// A CTA's rows of a query tile, and its iterations over a work item.
#pragma once
#include "sm80/params.cuh"

namespace spattn::sm80 {

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kBlockQ = SPATTN_BLOCK_Q, kBlockKV = SPATTN_BLOCK_KV;
constexpr int kRows = SPATTN_ROWS, kParts = kBlockQ / kRows;             // query rows per CTA, CTAs per query tile
constexpr int kKeys = SPATTN_KEYS;                                       // per iteration; a wider tile takes several
constexpr int kStepsPerTile = kBlockKV / kKeys, kWords = kBlockKV / 64;  // 64-bit words per bitmask row
constexpr bool kAligned = SPATTN_ALIGNED;
static_assert(kBlockQ % kRows == 0 && kBlockKV % 64 == 0 && 64 % kKeys == 0, "tile shape");

__device__ __forceinline__ Task own_task(const Params& params) {
  return find_task(params.items, (params.first_block + blockIdx.x) / kParts);
}

// Returns this CTA's first row of the query tile.
__device__ __forceinline__ int own_first_row(const Params& params) {
  return static_cast<int>((params.first_block + blockIdx.x) % kParts) * kRows;
}

// One iteration: kKeys keys of a tile list entry; `view` is -1 after the last iteration.
struct Step {
  int view, tile, mask, sub;

  __device__ bool exists() const { return view >= 0; }
  template <int kThreads>
  __device__ void write_positions(int* position, const Params& params) const {
    if (!exists()) return;
    for (int key = threadIdx.x; key < kKeys; key += kThreads) {
      position[key] = position_of(params.views[view], tile, sub * kKeys + key);
    }
  }
  // Returns the bitmask's rows, kWords words apart; the iteration's keys start at bit first_bit(). Requires mask >= 0.
  __device__ const unsigned long long* words(const Params& params) const {
    return params.masks + static_cast<long long>(mask) * kBlockQ * kWords + sub * kKeys / 64;
  }
  __device__ int first_bit() const { return sub * kKeys % 64; }
};

// Iterates over a work item. Call fetch() well before its result is used, to hide the latency of its three loads.
struct Steps {
  const Params& params;
  int first_view, entry, end, sub = 0;

  __device__ Step fetch() {
    if (entry >= end) return {-1, 0, -1, 0};
    const Step step = {first_view + params.key_view[entry], params.indices[entry], params.mask[entry], sub};
    if (++sub == kStepsPerTile) {
      sub = 0;
      ++entry;
    }
    return step;
  }
};

}  // namespace spattn::sm80
