// What the tensor-core kernels share: sizes, a block's shared memory, and the steps of a work item.
#pragma once
#include "portable/rows.cuh"
#include "portable_backward/params.cuh"

namespace spattn::portable_backward {

constexpr bool kByKeys = SPATTN_BY_KEYS;  // rows are keys and columns queries, or the other way round
constexpr bool kScores = SPATTN_SCORES;   // computes dK (by keys) or dQ
constexpr bool kValues = SPATTN_VALUES;   // computes dV (by keys)
constexpr bool kAligned = SPATTN_ALIGNED;
static_assert(kByKeys ? kScores || kValues : kScores && !kValues, "results");

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kRows = SPATTN_ROWS, kAtoms = SPATTN_ATOMS, kRowsPerWarp = 16 * kAtoms,
              kThreads = kRows / kRowsPerWarp * 32;
constexpr int kColumns = SPATTN_COLUMNS;  // of a step; a slab of more takes several
constexpr int kStages = SPATTN_STAGES;    // steps whose columns are in shared memory
constexpr int kSteps = 3;  // that shared memory tells of: the one multiplied, the one loaded, and the next
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
static_assert(kRows % kRowsPerWarp == 0 && 64 % kRows == 0, "rows");
static_assert((kColumns == 32 || kColumns == 64) && kColumns <= kThreads && (kStages == 1 || kStages == 2), "step");

// The sums of a thread, of its rows g and g + 8 of each atom, g = lane / 4.
using Scores = float[kAtoms][kColumns / 8][4];
template <int kFeatures>
using Sums = float[kAtoms][kFeatures / 8][4];

__device__ __forceinline__ int own_row(int atom, int half) {
  return threadIdx.x / 32 * kRowsPerWarp + atom * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// Rows of q or k, whose products are the scores, and with them those of dout or v.
template <int kCount, bool kBoth>
struct Tiles {
  alignas(128) Element scored[kCount * kDim];
  alignas(128) Element valued[kBoth ? kCount * kDimV : kVector];
};

// kColumns columns, from cell `first` of the slab of an entry, for query head `head`.
struct Step {
  int head, first;
  int mask;  // kEmpty after the last step

  __device__ bool exists() const { return mask != kEmpty; }
};

struct Shared {
  Tiles<kRows, kScores> rows;  // the values alone need no v
  Tiles<kColumns, true> columns[kStages];
  float2 statistics[kStages][kColumns];  // lse and delta of columns that are queries
  int row_position[kRows];               // -1 for padding, as of columns
  Step step[kSteps];
  int position[kSteps][kColumns];
  unsigned real[kSteps][2];  // a bit for each column that is not padding
};

// The steps of a work item for one slab of its rows, in order. A step is fetched long before it is used, because its
// loads take a while.
struct Steps {
  const Pass& pass;
  const int slab, begin, end, heads;
  int head, entry, first = 0;

  __device__ Steps(const Pass& pass, const Work& work, int slab)
      : pass(pass), slab(slab), begin(work.begin), end(work.end), heads(work.heads) {
    head = begin < end ? 0 : heads, entry = begin;
  }

  // The next step and its entry; after the last, one that does not exist.
  __device__ Step fetch(Entry& found) {
    while (head < heads) {
      const Step step = {head, first, pass.masks[static_cast<long long>(entry) * pass.slabs + slab]};
      found = pass.entries[entry];
      first += kColumns;
      if (!step.exists() || first >= pass.slab_columns) next_entry();
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

}  // namespace spattn::portable_backward
