// Bitmasks of partial tiles, in the accumulator layout of wgmma.cuh.
//
// Bit a of a thread's word is set if accumulator a is an allowed pair. A block of 64 rows by 64 columns gives each
// thread of a warpgroup 32 bits (one 4-byte load). Words are ordered by block, then thread.
#pragma once

#include <cstdint>

#include "common/element.cuh"

namespace spattn::sm90 {

constexpr int kFullTile = -1;  // all pairs are allowed: load no word, change no accumulator
constexpr int kNoTile = -2;    // pads a list of odd length to whole iterations: no pair is allowed

// Returns the word of `thread` (0 .. 127) of a warpgroup in a block.
__device__ __forceinline__ uint32_t mask_word(const uint32_t* masks, int64_t block, int thread) {
  if (block == kFullTile) return ~0u;
  if (block == kNoTile) return 0;
  return __ldg(masks + block * 128 + thread);
}

// True if row `row` of a block may attend to column `column`; any thread may call this.
__device__ __forceinline__ bool mask_allows(const uint32_t* masks, int64_t block, int row, int column) {
  if (block < 0) return block == kFullTile;
  const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  const int bit = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
  return mask_word(masks, block, thread) >> bit & 1;
}

// Sets accumulators kFirst .. kFirst + 31 (below kCount) to -inf if their bit is clear.
template <int kFirst, int kCount>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], uint32_t word) {
  const float lowest = -infinity<float>();
#pragma unroll
  for (int i = 0; i < 32 && kFirst + i < kCount; ++i) s[kFirst + i] = word >> i & 1 ? s[kFirst + i] : lowest;
}

// A thread's mask words for the tiles of an iteration.
template <int kTiles>
struct StepMask {
  uint32_t word[kTiles];
  bool partial;

  // Sets the accumulators of masked pairs to -inf.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    apply_mask<0>(s, word[0]);
    if constexpr (kTiles == 2) apply_mask<32>(s, word[1]);
  }
};

}  // namespace spattn::sm90
