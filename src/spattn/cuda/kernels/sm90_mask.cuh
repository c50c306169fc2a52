// Partial tiles: the plan's bitmask, laid out as the accumulators of sm90_wgmma.cuh.
//
// Bit a of a thread's word says whether its accumulator a is an allowed pair. A tile of 128 keys gives each thread of a
// warpgroup 64 bits (one 8-byte load), a tile of 64 keys 32 bits. Word order: mask, warpgroup (64 rows), thread.
#pragma once

#include <cstdint>

namespace spattn {

constexpr int kFullTile = -1;   // every pair is allowed: no word is loaded and no accumulator is touched
constexpr int kNoTile = -2;     // the second half of a step whose list has odd length: nothing is allowed

template <int kTileKV>
struct MaskWord;
template <>
struct MaskWord<128> {
    using type = uint64_t;
};
template <>
struct MaskWord<64> {
    using type = uint32_t;
};

// The word of `thread` (0 .. 127) of `warpgroup` for one tile.
template <int kTileKV, int kWarpgroups>
__device__ __forceinline__ typename MaskWord<kTileKV>::type mask_word(const void* masks, int mask, int warpgroup,
                                                                      int thread) {
    using Word = typename MaskWord<kTileKV>::type;
    if (mask == kFullTile) return ~Word(0);
    if (mask == kNoTile) return Word(0);
    return __ldg(static_cast<const Word*>(masks) + (static_cast<int64_t>(mask) * kWarpgroups + warpgroup) * 128 +
                 thread);
}

// Whether row `row` of the tile may attend to its key `column`: the same bit, found by anyone.
template <int kTileKV, int kWarpgroups>
__device__ __forceinline__ bool mask_allows(const void* masks, int mask, int row, int column) {
    if (mask < 0) return mask == kFullTile;
    const int thread = row % 64 / 16 * 32 + row % 8 * 4 + column % 8 / 2;
    const int bit = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
    return mask_word<kTileKV, kWarpgroups>(masks, mask, row / 64, thread) >> bit & 1;
}

// Sets accumulators [kFirst, kFirst + 32) whose bit is clear to -inf.
template <int kFirst, int kCount>
__device__ __forceinline__ void apply_mask(float (&s)[kCount], uint32_t word) {
    const float lowest = __int_as_float(0xff800000);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[kFirst + i] = word >> i & 1 ? s[kFirst + i] : lowest;
}

}  // namespace spattn
