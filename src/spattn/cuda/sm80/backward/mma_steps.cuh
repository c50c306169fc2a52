// Tile shape, shared memory and iterations of the tensor-core kernels.
#pragma once
#include "sm80/rows.cuh"
#include "sm80/backward/captured.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80_backward {

constexpr bool kByKeys = SPATTN_BY_KEYS;  // true: dK/dV kernel (rows are keys, columns queries); false: dQ kernel
constexpr bool kScores = SPATTN_SCORES;   // computes dK (dK/dV kernel) or dQ
constexpr bool kValues = SPATTN_VALUES;   // computes dV (dK/dV kernel)
constexpr bool kAligned = SPATTN_ALIGNED;
static_assert(!kCaptured || (!kByKeys && kScores));
static_assert(kByKeys ? kScores || kValues : kScores && !kValues, "results");

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kRows = SPATTN_ROWS, kAtoms = SPATTN_ATOMS, kRowsPerWarp = 16 * kAtoms,
              kThreads = kRows / kRowsPerWarp * 32;
constexpr int kColumns = SPATTN_COLUMNS;  // per iteration; a wider sub-tile takes several
constexpr int kStages = SPATTN_STAGES;    // iterations whose columns are in shared memory
constexpr int kSteps = 3;                 // iterations described in shared memory: current, loading, next
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
static_assert(kRows % kRowsPerWarp == 0 && 64 % kRows == 0, "rows");
static_assert((kColumns == 32 || kColumns == 64) && kColumns <= kThreads && (kStages == 1 || kStages == 2), "step");

// Accumulators of a thread for rows g and g + 8 of each atom, g = lane / 4.
using Scores = float[kAtoms][kColumns / 8][4];
template <int kFeatures>
using Sums = float[kAtoms][kFeatures / 8][4];

__device__ __forceinline__ int own_row(int atom, int half) {
  return threadIdx.x / 32 * kRowsPerWarp + atom * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// Rows of q or k, whose products are the scores, and the matching rows of dout or v.
template <int kCount, bool kBoth>
struct Tiles {
  alignas(128) Element scored[kCount * kDim];
  alignas(128) Element valued[kBoth ? kCount * kDimV : kVector];
};

// One iteration: kColumns columns, from cell `first` of an entry's sub-tile on, for query head `head`.
struct Step {
  int head, first;
  int mask;  // kEmpty after the last iteration

  __device__ bool exists() const { return mask != kEmpty; }
};

struct Shared {
  Tiles<kRows, kScores> rows;  // a kernel for dV alone needs no v
  Tiles<kColumns, true> columns[kStages];
  float2 statistics[kStages][kColumns];  // lse and delta, if columns are queries
  int row_position[kRows];               // -1 for padding, as in `position`
  Step step[kSteps];
  int position[kSteps][kColumns];
  unsigned real[kSteps][2];  // bitmask of columns that are not padding
#if SPATTN_TABLES
  float contributions[kRows][kColumns + 1];
#endif
};

// Iterates over a work item for one sub-tile of rows. Call fetch() early, to hide the latency of its loads.
struct Steps {
  const Pass& pass;
  const int subtile, begin, end, heads;
  int head, entry, first = 0;

  __device__ Steps(const Pass& pass, const Work& work, int subtile)
      : pass(pass), subtile(subtile), begin(work.begin), end(work.end), heads(work.heads) {
    head = begin < end ? 0 : heads, entry = begin;
  }

  // Returns the next iteration and its entry; !exists() after the last.
  __device__ Step fetch(Entry& found) {
    while (head < heads) {
      const Step step = {head, first, pass.masks[static_cast<long long>(entry) * pass.subtiles + subtile]};
      found = pass.entries[entry];
      first += kColumns;
      if (!step.exists() || first >= pass.subtile_columns) next_entry();
      if (step.exists()) return step;
    }
    return {0, 0, kEmpty};
  }

 private:
  __device__ void next_entry() {
    first = 0;
    if (++entry < end) return;
    entry = begin;
    ++head;
  }
};

}  // namespace spattn::sm80_backward
