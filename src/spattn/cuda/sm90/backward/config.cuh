// Compile-time sizes and shared memory of backward.cu. specializations.py sets the SPATTN_ macros.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/element.cuh"
#include "common/score.cuh"
#include "sm90/isa/barrier.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/positions.cuh"
#include "sm90/isa/wgmma.cuh"
#include "sm90/backward/params.cuh"

namespace spattn::sm90_backward {

using namespace sm90;  // barriers, TMA, products, masks

constexpr bool kByKeys = SPATTN_BY_KEYS;   // true: dK/dV kernel (rows are keys, columns queries); false: dQ kernel
constexpr bool kScores = SPATTN_SCORES;    // computes dK (dK/dV kernel) or dQ
constexpr bool kValues = SPATTN_VALUES;    // computes dV (dK/dV kernel)
constexpr bool kQueries = SPATTN_QUERIES;  // fused: the dK/dV kernel also accumulates dQ
static_assert(kByKeys ? kScores || kValues : kScores && !kValues);
static_assert(!kQueries || (kByKeys && kScores && kValues && SPATTN_STEP == 64));

// A fused kernel also sums the gradients of the arrays that the score function captures.
constexpr bool kTableSums = kQueries && Score::Uses::kCount > 0;

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;  // multiples of 64; smaller ones are zero-padded
constexpr int kSubtile = 64;
constexpr int kWarpgroups = 2;
constexpr int kBlock = kSubtile * kWarpgroups;  // rows per work item
constexpr int kStep = SPATTN_STEP;              // columns per iteration
constexpr int kTiles = kStep / kSubtile;
constexpr int kPanels = kDim / 64, kValuePanels = kDimV / 64;  // 64 elements are one 128-byte swizzled row
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerRegisters = SPATTN_CONSUMER_REGISTERS, kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;

constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kBlockBytes = kBlock * kDim * 2;
constexpr uint32_t kStageBytes = kStep * kDim * 2;  // columns of the second operand may take less
constexpr int kBlocks = SPATTN_BLOCKS;              // row tiles in shared memory
constexpr int kStages = SPATTN_STAGES;              // stages of columns in shared memory
constexpr int kOperands = kScores ? 2 : 1;          // per row: (k, v) or (q, dout); a kernel for dV alone needs no v
constexpr uint32_t kRowsBytes = kBlockBytes + (kOperands - 1) * kBlock * kDimV * 2;  // of a row tile

using ScoreProduct = Product<kStep>;
static_assert(kStages >= 2 && (kTiles == 1 || kTiles == 2));
static_assert(kDimV == kDim || (kDimV < kDim && !kQueries && kScores + kValues == 1));

// A task, as the producer publishes it; one with work.heads = 0 ends the kernel.
struct alignas(16) Assignment {
  Work work;
  Task task;
};

// A sub-tile of columns, as tensor map coordinates, and its masks for the consumers.
struct Column {
  int x, y, z, map, head;
  int masks[kWarpgroups];
};

// Positions of a sub-tile of columns, for score functions.
struct ColumnPositions {
  TilePositions cells;
  int32_t query_head;  // dK/dV kernel
  int32_t padded;      // index of the entry if the sub-tile has padding, else -1
};

// Random words of an iteration, for dropout. Rows are keys in the dK/dV kernel, else queries.
using QueryWords = Dropout<float>::Row;
using RowWords = std::conditional_t<kByKeys, uint32_t, QueryWords>;
using ColumnWords = std::conditional_t<kByKeys, QueryWords, uint32_t>;
struct alignas(16) StageWords {
  ColumnWords columns[kStep];
  RowWords rows[kBlock];
};

// Returns the factor of weights that dropout keeps; Args is ScoreArgs.
template <class Args>
__device__ __forceinline__ float kept_factor(const Params& p) {
  return float(static_cast<const Args*>(p.score)->dropout_factor);
}

constexpr uint32_t kQuerySumBytes = kSubtile * kDim * 4;

// Shared memory for dQ in fused mode: dS of two iterations, and dQ of one iteration, one half per warpgroup. Between
// items, `gradients` stages dK and `sums` stages dV, so that the next rows can load before these are stored.
constexpr int kWriters = kQueries ? 3 : 1;     // warps
constexpr int kFull = kWarpgroups * kWriters;  // barriers: each writer alternates between two
struct QuerySums {
  uint8_t gradients[2][kQueries ? kBlock * kRowBytes : 16];
  float sums[kQueries ? kQuerySumBytes / 4 : 4];
  uint64_t full[kFull], empty[kWarpgroups];  // of `sums`: a half of dQ is written; warpgroup w's half is read
  uint64_t left;                             // completes when TMA has read the staged results of an item
};
static_assert(!kQueries || (kBlockBytes <= 2 * kBlock * kRowBytes && kBlockBytes <= kQuerySumBytes));

constexpr int kTasks = 2;  // in flight: one is stored while the next is computed
constexpr int kResults = kScores + kValues;

struct alignas(1024) Shared {
  uint8_t rows[kBlocks][kRowsBytes];
  uint8_t ring[kStages][kStageBytes];
  QuerySums queries;
  alignas(128) Statistic statistics[kByKeys ? kStages * kStep : kBlocks * kBlock];  // of the queries
  Assignment assigned[kTasks];
  Column columns[2][32];  // private to the producer: the next entries of a task, and the first entries of the next task
  uint64_t assigned_full[kTasks], assigned_empty[kTasks], done[kTasks];
  uint64_t rows_full[kBlocks], rows_empty[kBlocks][kOperands], full[kStages], empty[kStages];
  int32_t masks[kStages][kTiles][kWarpgroups];
  ColumnPositions positions[kScored ? kStages : 0][kTiles];
  ColumnPositions next_positions[kScored ? 2 : 0][32];  // private to the producer: positions of `columns`
  StageWords words[Score::kDrops ? kStages : 0];
  TilePositions row_positions[Score::kDrops ? kWarpgroups : 0];  // private to the producer: of the task's rows

  // Returns the rows of operand `number`.
  __device__ __forceinline__ uint8_t* operand(int block, int number) { return rows[block] + number * kBlockBytes; }

  // Returns the shared memory that stages result `number` of the task with rows in `block`.
  __device__ __forceinline__ uint8_t* result(int block, int number) {
    if (!kQueries) return operand(block, number);
    return number == 0 ? queries.gradients[0] : reinterpret_cast<uint8_t*>(queries.sums);
  }
};
static_assert(sizeof(Shared) <= 227 * 1024);

// Named barriers: at kTurn + w, warpgroup w waits for its turn to start an iteration; kOwn + w synchronizes its
// threads; kBoth synchronizes both warpgroups.
constexpr uint32_t kTurn = 1, kOwn = 4, kBoth = 6;
constexpr bool kTurns = SPATTN_TURNS;

// Returns the number of additions to the sums of a sub-tile. An acquire load makes these additions visible.
__device__ __forceinline__ int added_to(const int32_t* added) {
  int times;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(times) : "l"(added) : "memory");
  return times;
}

// Returns workspace row `row` of a task's head.
__device__ __forceinline__ int64_t partial_row(const Params& p, const Task& task, int row) {
  const int64_t head =
      kByKeys ? int64_t(task.batch) * p.heads_kv + task.head_kv : int64_t(task.batch) * p.heads_q + task.head_q;
  return head * p.partial_rows + row;
}

}  // namespace spattn::sm90_backward
