// Partial tiles: the plan's bitmask, laid out as the accumulators of wgmma.cuh.
//
// Bit a of a thread's word says whether its accumulator a is an allowed pair. A tile of 64 keys gives each thread of a
// warpgroup 32 bits (one 4-byte load). Word order: mask, warpgroup (64 rows), thread.
#pragma once

#include "common/element.cuh"
#include "hopper/config.cuh"

namespace spattn::hopper {

constexpr int kFullTile = -1;  // every pair is allowed: no word is loaded and no accumulator is touched
constexpr int kNoTile = -2;    // the second half of a step whose list has odd length: nothing is allowed

// The word of `thread` (0 .. 127) of `warpgroup` for one tile.
__device__ __forceinline__ uint32_t mask_word(const uint32_t* masks, int mask, int warpgroup, int thread) {
  if (mask == kFullTile) return ~0u;
  if (mask == kNoTile) return 0;
  return __ldg(masks + (static_cast<int64_t>(mask) * kWarpgroups + warpgroup) * 128 + thread);
}

// Whether row `row` of the tile may attend to its key `column`: the same bit, found by anyone.
__device__ __forceinline__ bool mask_allows(const uint32_t* masks, int mask, int row, int column) {
  if (mask < 0) return mask == kFullTile;
  const int thread = row % 64 / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  const int bit = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
  return mask_word(masks, mask, row / 64, thread) >> bit & 1;
}

// A thread's words of the tiles of a step.
struct StepMask {
  uint32_t word[kTiles];
  bool partial;
};

// Sets accumulators [kFirst, kFirst + 32) whose bit is clear to -inf.
template <int kFirst, int kCount>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], uint32_t word) {
  const float lowest = -infinity<float>();
#pragma unroll
  for (int i = 0; i < 32; ++i) s[kFirst + i] = word >> i & 1 ? s[kFirst + i] : lowest;
}

}  // namespace spattn::hopper
