// Compile-time sizes and shared memory of attention.cu. choose/specializations.py sets the SPATTN_ macros.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/element.cuh"
#include "common/score.cuh"
#include "common/sink.cuh"
#include "sm90/forward/diagonals.cuh"
#include "sm90/forward/params.cuh"
#include "sm90/forward/positions.cuh"
#include "sm90/isa/wgmma.cuh"
#include "sm90/terms.cuh"

namespace spattn::sm90 {

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;  // multiples of 64; smaller ones are zero-padded
constexpr int kBlockQ = SPATTN_BLOCK_Q;
constexpr int kBlockKV = SPATTN_BLOCK_KV;
constexpr int kStepKV = SPATTN_STEP_KV;     // keys per iteration
constexpr int kTiles = kStepKV / kBlockKV;  // key tiles per iteration
constexpr uint32_t kRowBytes = 128;         // a swizzled row
constexpr int kPanelColumns = kRowBytes / sizeof(Term);
constexpr int kPanels = kDim / kPanelColumns, kValuePanels = kDimV / kPanelColumns;
constexpr int kTermPanels = kTerms * kPanels;  // of a query, key or value; a row of global memory has them in order
// Panels of each term in a stage. An iteration's keys, and its values, take several stages where all features do not fit
// often enough, or if q and v have different head dimensions.
constexpr int kSlicePanels = kPanels != kValuePanels ? 1 : kTermPanels > 4 ? kPanels / 2 : kPanels;
constexpr int kKeySlices = kPanels / kSlicePanels, kValueSlices = kValuePanels / kSlicePanels;  // stages
constexpr int kRowGroups = kBlockQ / 64;  // each the rows of one warpgroup
constexpr int kWarpgroups = SPATTN_WARPGROUPS;
// Two warpgroups share the rows of a tile: they take its iterations in turns, each from the first to the last task.
constexpr bool kShares = kWarpgroups > kRowGroups;
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kCtas = SPATTN_CTAS;  // per SM
constexpr int kConsumerRegisters = SPATTN_CONSUMER_REGISTERS;
constexpr int kProducerRegisters = SPATTN_PRODUCER_REGISTERS;

constexpr uint32_t kStageBytes = kStepKV * kTerms * kSlicePanels * kRowBytes;
constexpr int kOutPanels = kDimV * sizeof(Element) / kRowBytes;  // of the output, staged in the query tile
constexpr uint32_t kQueryBytes = kBlockQ * (kOutPanels > kTermPanels ? kOutPanels : kTermPanels) * kRowBytes;
constexpr int kOutColumns = kRowBytes / sizeof(Element);
constexpr uint32_t kSharedLimit = 228 * 1024 / kCtas - 1024;
constexpr bool kGathers = SPATTN_GATHERS;  // gathered KV
constexpr bool kDiagonals =
    Score::kDiagonal && !kGathers && kCtas < 3 && kPanels == kValuePanels && (SPATTN_STAGES > 3 || SPATTN_QUERIES > 2);
// Positions, numbers of diagonals and words of dropout may take the place of a stage, or of a third query tile.
constexpr uint32_t kPositionBytes = kModified * kTiles * (32 + (kDiagonals ? 8 * (kBlockQ + 80) : 0));  // of a stage
// Words are in a ring of their own. Stages are filled in the order K0 K1 V0 K2 V1 ..., so when a stage is empty for the
// keys of iteration i, consumers have released K0 or, after the words of iteration i - kWordStages, a later K or V.
// With kShares all stages up to that one are empty, hence those of the values of iteration i - kWordStages.
constexpr int kWordStages = Score::kDrops ? SPATTN_STAGES / 2 + 1 + kShares : 0;
constexpr int kExchanged = kShares ? kDimV / 2 + 8 : 0;  // floats that a thread passes to that of the other warpgroup
constexpr uint32_t kExchangeBytes = kExchanged * 128 * 4;
constexpr uint32_t kSharedBytes = SPATTN_QUERIES * (kQueryBytes + kBlockQ * 4 + 64) +
                                  SPATTN_STAGES * (kStageBytes + kPositionBytes + 32) + kWordStages * kStepKV * 4 +
                                  kExchangeBytes;
constexpr bool kFull = kScored && kSharedBytes > kSharedLimit;
constexpr int kQueries = SPATTN_QUERIES - (kFull && SPATTN_STAGES < 5);
constexpr int kStages = SPATTN_STAGES - (kFull && SPATTN_STAGES >= 5);
constexpr int kProblems = SPATTN_PROBLEMS;
// With three terms the PV product of each iteration is a sum of its own, and added to the output by ordinary float32
// additions: tensor cores round towards zero, which over a long row would add up.
constexpr bool kSeparate = kTerms == 3;
// The first PV product of a task overwrites the output accumulators instead of clearing them first: 1 to 2 % faster for
// short items. No gain for two warpgroups that take turns.
constexpr bool kOverwrites = kWarpgroups == 1 && !kSeparate;
constexpr bool kInSteps = kCtas == 2;       // prefetch a long item's next task by one lookup per iteration
constexpr int kLoaders = kGathers ? 2 : 1;  // producer warps
constexpr int kCopies = 32 * kLoaders + 1;  // arrivals at the barrier of gathered rows: Gatherer::submit
constexpr int kTransposers = kFloat8 ? (kGathers ? 1 : 2) : 0;  // warps that transpose values
static_assert(kBlockQ % 64 == 0 && kBlockQ <= 192 && kBlockKV == 64,
              "a warpgroup has 64 rows; masks are words of 64 keys");
static_assert((kTiles == 1 || kTiles == 2) && kTiles * kTermPanels <= 32);
static_assert(kWarpgroups == kRowGroups || (kRowGroups == 1 && kWarpgroups == 2 && kKeySlices + kValueSlices == 2));
static_assert(kTerms == 1 || kPanels == kValuePanels);
static_assert((kOutPanels <= kTermPanels || kFloat8) && kRowGroups * kOutPanels <= 32);
static_assert(!kFloat8 || (kDim == 128 && kDimV == 128 && kStepKV == 128 && !kShares),
              "square tiles are transposed in place");

using QueryKeyProduct = Product<kStepKV>;
using ValueProduct = Product<(kSlicePanels > 1 ? 128 : 64)>;

// A task, as the producer publishes it to consumers and writer; an empty work item ends the kernel.
struct Assignment {
  Work work;
  int32_t batch, head;  // of q
};

using IterationDiagonals = std::conditional_t<kDiagonals, Diagonals<kTiles, kBlockQ>, NoDiagonals>;

struct alignas(1024) Shared {
  uint8_t query[kQueries][kQueryBytes];
  uint8_t ring[kStages][kStageBytes];
  Assignment assigned[kQueries];
  float lse[kQueries][kBlockQ];  // or kFailedRow
  uint64_t query_full[kQueries], query_empty[kQueries], full[kStages], empty[kStages];
  uint64_t raw[kTransposers ? kStages : 0];  // values have landed; `full`: they are transposed
  int32_t masks[kStages][kTiles];
  TilePositions positions[kModified ? kStages : 0][kTiles];  // of keys
  alignas(8) uint32_t words[kWordStages][kStepKV];           // of keys, for dropout
  IterationDiagonals diagonals[kDiagonals ? kStages : 0];
  alignas(16) float4 exchange[kExchanged / 4][kShares ? 128 : 0];  // results of warpgroup 1
};
static_assert(sizeof(Shared) <= kSharedLimit);
static_assert(kQueries >= 2 && kStages >= 3 && kStages >= kKeySlices + kValueSlices,
              "the first step of the next task is computed before the last one is done");

// masks[stage][0] of a stage of values: the last ones of the CTA.
constexpr int kLastValues = -3;

// lse of a non-finite row, which the writer recomputes.
constexpr float kFailedRow = __builtin_nanf("");

// Named barriers: warpgroup w waits at 1 + w for its turn on the tensor cores and synchronizes its threads at 4 + w; at
// 7 + i the consumers hand query tile i to the writer. With kShares warpgroup 1 fills `exchange` after kEmptied, and
// warpgroup 0 reads it after kFilled.
constexpr uint32_t kTurn = 1, kOwn = 4, kDone = 7, kEmptied = 10, kFilled = 11;
constexpr uint32_t kDoneThreads = 128 * kRowGroups + 32;
static_assert(kQueries <= 3 && kRowGroups <= 3, "one barrier each");

// Returns the index of a row group's block of a mask, or kFullTile or kNoTile.
__device__ __forceinline__ int64_t mask_block(int mask, int row_group) {
  return mask < 0 ? mask : int64_t(mask) * kRowGroups + row_group;
}

// Returns a problem of the launch, by index, view or task. With one problem the index is a compile-time zero.
__device__ __forceinline__ const Problem& problem_of(const Params& p, int number) {
  return p.problems[kProblems == 1 ? 0 : number];
}

__device__ __forceinline__ const Problem& problem_of(const Params& p, const View& view) {
  return problem_of(p, view.problem);
}

__device__ __forceinline__ const Problem& problem_of(const Params& p, const Assignment& assigned) {
  return problem_of(p, p.query_views[assigned.work.query_view]);
}

// Returns the first workspace row of a task's head.
__device__ __forceinline__ int64_t partial_base(const Params& p, const Assignment& assigned) {
  const Problem& own = problem_of(p, assigned);
  return (static_cast<int64_t>(assigned.batch) * own.heads_q + assigned.head) * own.partial_rows;
}

// Returns the workspace row of row `row` of a task.
__device__ __forceinline__ int64_t partial_row(const Params& p, const Assignment& assigned, int row) {
  return partial_base(p, assigned) + assigned.work.slot * problem_of(p, assigned).block_q + row;
}

// Returns the workspace row of the partial that an in-kernel reduction (slot <= -2) merges into a row; -1 for padding.
__device__ __forceinline__ int64_t prior_row(const Params& p, const Assignment& assigned, int row) {
  const int prior = p.priors[(-2 - assigned.work.slot) * kBlockQ + row];
  return prior < 0 ? -1 : partial_base(p, assigned) + prior;
}

__device__ __forceinline__ bool copies_queries(const Params& p) { return kGathers && p.query_rows != nullptr; }

// Row 0 of the queries, keys or values of a head, for copies row by row.
struct RowSource {
  const Term* first;
  int64_t stride;  // in terms
  int columns;     // of each term
};

// Returns the queries (kOf = 0), keys (1) or values (2) of a head.
template <int kOf>
__device__ __forceinline__ RowSource row_source(const Params& p, int batch, int head) {
  const Problem& own = p.problems[0];
  if constexpr (kTerms > 1) {
    const int64_t heads = kOf ? own.heads_q / own.group : own.heads_q, rows = kOf ? p.kv_len : own.q_len;
    const Term* first = static_cast<const Term*>(p.terms[kOf]);
    return {first + (batch * heads + head) * rows * (kTerms * kDim), kTerms * kDim, kDim};
  } else {
    const Strides& stride = kOf == 0 ? own.q_stride : kOf == 1 ? own.k_stride : own.v_stride;
    const void* first = kOf == 0 ? own.q : kOf == 1 ? own.k : own.v;
    return {static_cast<const Term*>(first) + batch * stride.batch + head * stride.head, stride.token,
            kOf == 2 ? own.head_dim_v : own.head_dim};
  }
}

// Factors of a head's dot products and values: the scales of float8 arrays.
__device__ __forceinline__ float2 head_scales(const Params& p, const Assignment& assigned) {
  if constexpr (!kFloat8) return {1.0f, 1.0f};
  const Problem& own = problem_of(p, assigned);
  return __ldg(own.scales + int64_t(assigned.batch) * own.heads_q + assigned.head);
}

// Returns the key positions of an entry's cells (gathered KV).
__device__ __forceinline__ const int32_t* key_rows(const Params& p, const View& view, const Entry& entry) {
  return p.key_rows + int64_t(view.map + entry.x) * kBlockKV;
}

// Returns the position of a problem's query row 0 in its pattern.
__device__ __forceinline__ int query_offset(const Problem& own) { return int(own.q_offset + own.moved); }

// Finds the position of row `row` of a task; returns false for padding.
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

// Returns the sink of row `row` of a task; -inf for none.
__device__ __forceinline__ float row_sink(const Params& p, const Assignment& assigned, int row) {
  const Problem& own = problem_of(p, assigned);
  if (own.sink_rows == own.q_len) return __ldg(own.sinks + assigned.head);
  int64_t position;
  if (!query_position(p, assigned, row, position)) return -infinity<float>();
  const int packed = int(own.q_len) / own.sink_rows;
  return __ldg(own.sinks + assigned.head * packed + int(position) / own.sink_rows);
}

}  // namespace spattn::sm90
