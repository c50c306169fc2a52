// Compile-time sizes and shared memory of attention.cu. SPATTN_ macros: choose/specializations.py.
#pragma once

#include <cstdint>

#include "common/element.cuh"
#include "common/score.cuh"
#include "sm90/forward/params.cuh"
#include "sm90/isa/wgmma.cuh"

namespace spattn::sm90 {

constexpr int kDim = SPATTN_HEAD_DIM;  // 64, 128 or 256; smaller head_dim is zero-padded
constexpr int kBlockQ = SPATTN_BLOCK_Q;
constexpr int kBlockKV = SPATTN_BLOCK_KV;
constexpr int kStepKV = SPATTN_STEP_KV;     // keys per iteration
constexpr int kTiles = kStepKV / kBlockKV;  // key tiles per iteration
constexpr int kPanels = kDim / 64;          // 64 elements are one 128-byte swizzled row
constexpr int kWarpgroups = kBlockQ / 64;
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kCtas = SPATTN_CTAS;  // per SM
constexpr int kConsumerRegisters = SPATTN_CONSUMER_REGISTERS;
constexpr int kProducerRegisters = SPATTN_PRODUCER_REGISTERS;

constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kQueryBytes = kBlockQ * kDim * 2;
constexpr uint32_t kStageBytes = kStepKV * kDim * 2;
constexpr uint32_t kSharedLimit = 228 * 1024 / kCtas - 1024;
constexpr int kQueries = SPATTN_QUERIES;
constexpr int kStages = SPATTN_STAGES;
constexpr int kProblems = SPATTN_PROBLEMS;
// The first PV product of a task overwrites the output, which is then not cleared: 1 to 2 % faster for short items. Two
// warpgroups that take turns gained nothing from it.
constexpr bool kOverwrites = kWarpgroups == 1;
constexpr bool kInSteps = kCtas == 2;       // prefetch a long item's next task one lookup per iteration
constexpr bool kGathers = SPATTN_GATHERS;   // gathered KV
constexpr int kLoaders = kGathers ? 2 : 1;  // producer warps
constexpr int kCopies = 32 * kLoaders + 1;  // arrivals at the barrier of gathered rows: Gatherer::submit
static_assert((kBlockQ == 64 || kBlockQ == 128) && kBlockKV == 64,
              "a warpgroup has 64 rows; masks are words of 64 keys");
static_assert((kTiles == 1 || kTiles == 2) && kTiles * kPanels <= 32);

using QueryKeyProduct = Product<kStepKV>;
using ValueProduct = Product < kDim<128 ? kDim : 128>;

// A task as the producer announces it to consumers and writer; an empty work item ends the kernel.
struct Assignment {
  Work work;
  int32_t batch, head;  // of q
};

struct alignas(1024) Shared {
  uint8_t query[kQueries][kQueryBytes];
  uint8_t ring[kStages][kStageBytes];
  Assignment assigned[kQueries];
  float lse[kQueries][kBlockQ];  // or kFailedRow
  uint64_t query_full[kQueries], query_empty[kQueries], full[kStages], empty[kStages];
  int32_t masks[kStages][kTiles];
};
static_assert(sizeof(Shared) <= kSharedLimit);
static_assert(kQueries >= 2 && kStages >= 3, "the first step of the next task is computed before the last one is done");

// lse of a row that came out non-finite; the writer recomputes it.
constexpr float kFailedRow = __builtin_nanf("");

// Named barriers: 1 + w is warpgroup w's turn on the tensor cores, 4 + w synchronizes its threads; at 6 + i the
// consumers hand query tile i to the writer.
constexpr uint32_t kTurn = 1, kOwn = 4, kDone = 6;
constexpr uint32_t kDoneThreads = 128 * kWarpgroups + 32;

// This warpgroup's block of a mask (or kFullTile, kNoTile).
__device__ __forceinline__ int64_t mask_block(int mask, int warpgroup) {
  return mask < 0 ? mask : int64_t(mask) * kWarpgroups + warpgroup;
}

// A problem of the launch, by index, view or task. With one problem the index is a constant: no lookup in the code.
__device__ __forceinline__ const Problem& problem_of(const Params& p, int number) {
  return p.problems[kProblems == 1 ? 0 : number];
}

__device__ __forceinline__ const Problem& problem_of(const Params& p, const View& view) {
  return problem_of(p, view.problem);
}

__device__ __forceinline__ const Problem& problem_of(const Params& p, const Assignment& assigned) {
  return problem_of(p, p.query_views[assigned.work.query_view]);
}

// First workspace row of a task's head.
__device__ __forceinline__ int64_t partial_base(const Params& p, const Assignment& assigned) {
  const Problem& own = problem_of(p, assigned);
  return (static_cast<int64_t>(assigned.batch) * own.heads_q + assigned.head) * own.partial_rows;
}

// Workspace row of row `row` of a task.
__device__ __forceinline__ int64_t partial_row(const Params& p, const Assignment& assigned, int row) {
  return partial_base(p, assigned) + assigned.work.slot * problem_of(p, assigned).block_q + row;
}

// Workspace row that holds the partial of row `row` of an in-kernel reduction (slot <= -2); -1 for padding.
__device__ __forceinline__ int64_t prior_row(const Params& p, const Assignment& assigned, int row) {
  const int prior = p.priors[(-2 - assigned.work.slot) * kBlockQ + row];
  return prior < 0 ? -1 : partial_base(p, assigned) + prior;
}

__device__ __forceinline__ bool copies_queries(const Params& p) { return kGathers && p.query_rows != nullptr; }

// Key positions of an entry's cells (gathered KV).
__device__ __forceinline__ const int32_t* key_rows(const Params& p, const View& view, const Entry& entry) {
  return p.key_rows + int64_t(view.map + entry.x) * kBlockKV;
}

// Position of query row 0 of a problem in its pattern.
__device__ __forceinline__ int query_offset(const Problem& own) { return int(own.q_offset + own.moved); }

// Position of row `row` of a task; false for padding.
__device__ __forceinline__ bool query_position(const Params& p, const Assignment& assigned, int row,
                                               int64_t& position) {
  const Work& work = assigned.work;
  if (copies_queries(p)) {
    const int rows = p.problems[0].block_q;
    position = row < rows ? p.query_rows[int64_t(work.x) * rows + row] : -1;
    return position >= 0;
  }
  if (!cell_position(p.query_views[work.query_view], work.x, work.y, work.z, row, position)) return false;
  return row < problem_of(p, assigned).block_q;
}

}  // namespace spattn::sm90
