// Tile shape, shared memory and iterations of the tensor-core kernels.
#pragma once
#include "sm80/forward/params.cuh"
#include "sm80/forward/rows.cuh"

namespace spattn::sm80 {

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kBlockQ = SPATTN_BLOCK_Q, kBlockKV = SPATTN_BLOCK_KV;
constexpr int kKeys = SPATTN_KEYS;  // keys per iteration; a wider tile takes several
constexpr int kStepsPerTile = kBlockKV / kKeys;
constexpr int kAtoms = SPATTN_ATOMS, kRowsPerWarp = 16 * kAtoms;
constexpr int kThreads = kBlockQ / kRowsPerWarp * 32;
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
constexpr bool kAligned = SPATTN_ALIGNED;
static_assert(kBlockQ % kRowsPerWarp == 0 && kBlockKV % 64 == 0 && 64 % kKeys == 0, "tile shape");

struct Shared {
  alignas(128) Element q[kBlockQ * (kDim > kDimV ? kDim : kDimV)];  // later the output, before its vectorized stores
  alignas(128) Element k[kKeys * kDim];
  alignas(128) Element v[kKeys * kDimV];
  int key_position[2][kKeys];
  int query_position[kBlockQ];
};

// An iteration: kKeys keys of a tile list entry; `view` is -1 after the last.
struct Step {
  int view, tile, mask, sub;

  __device__ bool exists() const { return view >= 0; }
  __device__ void write_positions(int* position, const Params& params) const {
    if (!exists()) return;
    for (int key = threadIdx.x; key < kKeys; key += kThreads) {
      position[key] = position_of(params.views[view], tile, sub * kKeys + key);
    }
  }
};

// The iterations of a work item, in order. fetch() runs well before its result is used, to hide its three loads.
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
