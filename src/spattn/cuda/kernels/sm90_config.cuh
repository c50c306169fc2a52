// Sizes, shared memory and roles of attention_sm90.cu; everything follows from the SPATTN_ macros, a row of the table in
// hopper_builds.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm90_params.cuh"
#include "sm90_wgmma.cuh"

namespace spattn {

constexpr int kDim = SPATTN_HEAD_DIM;   // 64, 128 or 256: smaller head_dim arrive padded with zeros
constexpr int kBlockQ = SPATTN_BLOCK_Q;
constexpr int kTileKV = SPATTN_TILE_KV;  // the plan's block_kv: 64 or 128
constexpr int kStepKV = SPATTN_STEP_KV;  // keys a product covers
constexpr int kTiles = kStepKV / kTileKV;
constexpr int kPanels = kDim / 64;       // 64 elements are one 128-byte swizzled row
constexpr int kWarpgroups = kBlockQ / 64;
constexpr bool kTurns = kWarpgroups > 1;  // warpgroups alternate on the tensor cores
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerRegisters = SPATTN_CONSUMER_REGISTERS;
constexpr int kProducerRegisters = SPATTN_PRODUCER_REGISTERS;

constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kQueryBytes = kBlockQ * kDim * 2;
constexpr uint32_t kSlotBytes = kStepKV * kDim * 2;
constexpr uint32_t kSharedLimit = 227 * 1024 - 3072;  // less barriers, work and statistics
constexpr int kQueries = SPATTN_QUERIES;
constexpr int kSlots = SPATTN_SLOTS;
static_assert(kQueries * kQueryBytes + kSlots * kSlotBytes <= kSharedLimit && kSlots >= 3);
static_assert(kStepKV % kTileKV == 0 && kTiles * kPanels <= 32);

using Element = SPATTN_TYPE;
using QueryKeyProduct = Product<kStepKV>;
using ValueProduct = Product<kDim < 128 ? kDim : 128>;

// What the producer tells the consumers about a unit; an item without keys ends the kernel.
struct alignas(16) Work {
    Item item;
    Unit unit;
};

struct alignas(1024) Shared {
    uint8_t query[kQueries][kQueryBytes];
    uint8_t ring[kSlots][kSlotBytes];
    Work work[kQueries];
    float lse[kQueries][kBlockQ];
    uint32_t repair[kQueries][kBlockQ / 16];  // bit r: row 16 w + r came out non-finite
    uint64_t query_full[kQueries], query_empty[kQueries], done[kQueries], full[kSlots], empty[kSlots];
    int32_t masks[kSlots][kTiles];
};

// Named barriers: 1 + w is warpgroup w's turn on the tensor cores, 4 + w its own threads.
constexpr uint32_t kTurn = 1, kOwn = 4;

// First workspace row of a head.
__device__ __forceinline__ int64_t partial_base(const Params& p, const Unit& unit) {
    return (static_cast<int64_t>(unit.batch) * p.heads_q + unit.head_q) * p.partial_rows;
}

// Row of the workspace where row `row` of an item goes.
__device__ __forceinline__ int64_t partial_row(const Params& p, const Work& work, int row) {
    return partial_base(p, work.unit) + work.item.slot * kBlockQ + row;
}

// Row of the workspace that holds the rest of row `row` of a finishing item (slot <= -2); -1 for padding.
__device__ __forceinline__ int64_t prior_row(const Params& p, const Work& work, int row) {
    const int prior = p.priors[(-2 - work.item.slot) * kBlockQ + row];
    return prior < 0 ? -1 : partial_base(p, work.unit) + prior;
}

}  // namespace spattn
