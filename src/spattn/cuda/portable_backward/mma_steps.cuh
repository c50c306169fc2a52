// What the tensor-core kernels share: sizes, a block's shared memory, and the steps of a work item.
#pragma once
#include "portable/rows.cuh"
#include "portable_backward/params.cuh"

namespace spattn::portable_backward {

constexpr bool kByKeys = SPATTN_BY_KEYS;  // rows are keys and columns queries, or the other way round
constexpr bool kScores = SPATTN_SCORES;   // computes dK (by keys) or dQ
constexpr bool kValues = SPATTN_VALUES;   // computes dV (by keys)
static_assert(kByKeys ? kScores || kValues : kScores && !kValues, "results");
constexpr bool kAligned = SPATTN_ALIGNED;

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kRows = 64, kAtoms = 1, kRowsPerWarp = 16 * kAtoms, kThreads = kRows / kRowsPerWarp * 32;
constexpr int kColumns = SPATTN_COLUMNS;  // of a step; a slab of more takes several
constexpr int kStages = SPATTN_STAGES;    // steps whose columns are in shared memory
constexpr int kSteps = 3;                 // whose positions are: one multiplied, one loaded, and the one after
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
static_assert(kColumns % 32 == 0 && kColumns <= 64 && kColumns <= kThreads, "step");

// Rows of q or k, whose products are the scores, and with them those of dout or v.
template <int kCount, bool kBoth>
struct Tiles {
  alignas(128) Element scored[kCount * kDim];
  alignas(128) Element valued[kBoth ? kCount * kDimV : kVector];
};

struct Shared {
  Tiles<kRows, kScores> rows;  // the values alone need no v
  Tiles<kColumns, true> columns[kStages];
  float2 statistics[kStages][kColumns];  // lse and delta of columns that are queries
  int row_position[kRows];               // -1 for padding, as of columns
  int position[kSteps][kColumns];
  unsigned real[kSteps][2];  // a bit for each column that is not padding
};

// kColumns columns, from cell `first` of the slab of an entry, for query head `head` of the item.
struct Step {
  Entry entry;
  int head, first;
  int mask;   // kEmpty after the last step
  int place;  // of its positions

  __device__ bool exists() const { return mask != kEmpty; }
};

// The steps of a work item for one slab of its rows, in order. A step is fetched long before it is used, because its
// loads take a while.
struct Steps {
  const Pass& pass;
  const Work work;
  const int slab;
  int head = 0, entry = 0, first = 0, place = 0;

  __device__ Steps(const Pass& pass, const Work& work, int slab) : pass(pass), work(work), slab(slab) {
    if (work.begin == work.end) head = work.heads;
  }

  __device__ Step fetch() {
    while (head < work.heads) {
      const int at = work.begin + entry;
      const Step step = {pass.entries[at], head, first, pass.masks[static_cast<long long>(at) * pass.slabs + slab], place};
      first += kColumns;
      if (!step.exists() || first >= pass.slab_columns) next_entry();
      if (!step.exists()) continue;
      place = place + 1 == kSteps ? 0 : place + 1;
      return step;
    }
    return {{}, 0, 0, kEmpty, 0};
  }

 private:
  __device__ void next_entry() {
    first = 0;
    if (work.begin + ++entry < work.end) return;
    entry = 0;
    ++head;
  }
};

}  // namespace spattn::portable_backward
