// Score modification in the backward: turns dot products of q and k into weights and into factors of dS.
#pragma once

#include <type_traits>

#include "common/score.cuh"
#include "sm90/backward/warpgroup.cuh"
#include "sm90/forward/positions.cuh"
#include "sm90/forward/softmax.cuh"

namespace spattn::sm90_backward {

// Scores without a score function.
struct PlainScores {
  struct Pairs {};

  __device__ __forceinline__ void open(const Warpgroup&) {}

  __device__ __forceinline__ Pairs locate(const Warpgroup&, uint32_t, StepMask<kTiles>&) const { return {}; }
};

// Scores with a score function of the scaled score and the positions of query and key. In the dK/dV kernel, rows are
// keys and columns queries.
struct ModifiedScores {
  int row[2];  // positions of the thread's two rows
  int opened;  // query head of `head`
  Score::Head<float> head;

  // Weight of a pair, and its product with the function's derivative, a factor of dS.
  struct Weighed {
    float weight, gradient;
  };

  // Pairs of an iteration.
  struct Pairs {
    int row[2];
    const Score::Head<float>& head;
    const ColumnPositions* columns;  // in shared memory: registers are scarce

    // True if the function depends on key - query alone, each tile's columns are one row of positions with the step of
    // the thread's rows, and no array index needs a bounds check.
    __device__ __forceinline__ bool is_simple() const {
      bool found = Score::kPositions && Score::kRelative;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const TilePositions& tile = columns[t].cells;
        const int begin = int(tile.first), end = int(tile.first + 63 * tile.step);
        const int low = min(begin, end) - max(row[0], row[1]), high = max(begin, end) - min(row[0], row[1]);
        found = found && tile.one_row() && row[1] - row[0] == int(8 * tile.step) &&
                Score::inside(0, 0, kByKeys ? -high : low, kByKeys ? -low : high, head);
      }
      return __all_sync(0xffffffff, found);
    }

    // Computes the weight of accumulator `n`; zeros if the mask or the score function removes the pair.
    template <bool kSimple>
    __device__ __forceinline__ Weighed weigh(const Params& p, const StepMask<kTiles>& mask, int n, float product,
                                             float lse) const {
      const TilePositions& tile = columns[n / 32].cells;
      const int within = n % 32 / 4 * 8 + n % 2, cell = within + threadIdx.x % 4 * 2, h = n / 2 % 2;
      int query, key;
      if constexpr (kSimple) {
        // All pairs of a diagonal have the same expression, so that the compiler shares what depends on it alone.
        const int first = int(tile.first + threadIdx.x % 4 * 2 * tile.step) - row[0];
        const int distance = first + (within - 8 * h) * int(tile.step);
        query = 0, key = kByKeys ? -distance : distance;
      } else {
        const int column = tile.of(cell), other = row[h];
        query = kByKeys ? column : other, key = kByKeys ? other : column;
      }
      const float score = product * (p.sign * p.scale_log2 * kLn2<float>);
      const float exponent = Score::value<kSimple>(score, query, key, head) * kLog2E<float> - lse;
      const float weight = mask.word[n / 32] >> (n % 32) & 1 ? exp2_flushed(exponent) : 0.0f;
      return {weight, weight == 0.0f ? 0.0f : weight * Score::derivative<kSimple>(score, query, key, head)};
    }
  };
  static_assert(!kByKeys || kTiles == 1);  // one query head per iteration

  // Finds the positions of the thread's rows of the next item, and the values of its first query head.
  __device__ __forceinline__ void open(const Warpgroup& own) {
    const Params& p = own.p;
    const Assignment& assigned = own.assigned();
    const int* at = assigned.work.subtile[own.number];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t position;
      const int cell = own.thread / 32 * 16 + 8 * h + own.thread % 32 / 4;
      cell_position(p.row_views[assigned.work.view], at[0], at[1], at[2], cell, position);  // arbitrary for padding
      row[h] = int(position) + (kByKeys ? 0 : p.q_offset);
    }
    open_head(p, assigned.task.batch, assigned.task.head_q);
  }

  __device__ __forceinline__ void open_head(const Params& p, int batch, int query_head) {
    opened = query_head;
    head = Score::open<float>(*p.score, p.q_offset, batch, query_head);
  }

  // Reads the positions of a stage's columns. Masks padding queries: the plan's bitmasks leave them undefined, and the
  // function's result is arbitrary.
  __device__ __forceinline__ Pairs locate(const Warpgroup& own, uint32_t stage, StepMask<kTiles>& mask) {
    const Params& p = own.p;
    const Assignment& assigned = own.assigned();
    Pairs found = {{row[0], row[1]}, head, own.shared.positions[stage]};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const ColumnPositions& columns = found.columns[t];
      if constexpr (kByKeys) {
        const int query_head = uniform(columns.query_head), padded = int(uniform(columns.padded));
        if (query_head != opened) open_head(p, assigned.task.batch, query_head);
        if (padded >= 0) {
          const Entry& entry = p.entries[padded];
          const View& view = p.column_views[assigned.work.columns + entry.view];
          mask.word[t] &= ~padding_columns(view, entry.x, entry.y, entry.z, own.thread);
        }
      }
    }
    return found;
  }
};

using Scores = std::conditional_t<kModified, ModifiedScores, PlainScores>;

}  // namespace spattn::sm90_backward
