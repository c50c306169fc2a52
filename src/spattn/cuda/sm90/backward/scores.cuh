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

  __device__ __forceinline__ Pairs locate(const Warpgroup&, int, StepMask<kTiles>&) const { return {}; }
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
    TilePositions columns[kTiles];

    // Computes the weight of accumulator `n`; zeros if the mask or the score function removes the pair.
    __device__ __forceinline__ Weighed weigh(const Params& p, const StepMask<kTiles>& mask, int n, float product,
                                             float lse) const {
      const int column = columns[n / 32].of(n % 32 / 4 * 8 + threadIdx.x % 4 * 2 + n % 2), other = row[n / 2 % 2];
      const int query = kByKeys ? column : other, key = kByKeys ? other : column;
      const float score = product * (p.sign * p.scale_log2 * kLn2<float>);
      const float exponent = Score::value(score, query, key, head) * kLog2E<float> - lse;
      const float weight = mask.word[n / 32] >> (n % 32) & 1 ? exp2_flushed(exponent) : 0.0f;
      return {weight, weight == 0.0f ? 0.0f : weight * Score::derivative(score, query, key, head)};
    }
  };
  static_assert(!kByKeys || kTiles == 1);  // one query head per iteration

  // Looks up what the rows of the next item share.
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

  // Looks up the columns of an iteration, `left` from the item's end. Masks padding queries: the plan's bitmasks leave
  // them undefined, and the function's result is arbitrary.
  __device__ __forceinline__ Pairs locate(const Warpgroup& own, int left, StepMask<kTiles>& mask) {
    const Params& p = own.p;
    const Assignment& assigned = own.assigned();
    const Work& work = assigned.work;
    const int steps = (work.end - work.begin + kTiles - 1) / kTiles, done = work.heads * steps - left;
    const int turn = kByKeys ? uniform(done / steps) : 0, begin = uniform(work.begin + (done - turn * steps) * kTiles);
    Pairs found = {{row[0], row[1]}, head};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const Entry& entry = p.entries[uniform(min(begin + t, work.end - 1))];
      const View& view = p.column_views[work.columns + entry.view];
      found.columns[t] = tile_positions(view, entry.x, entry.y, entry.z, kByKeys ? p.q_offset : 0);
      if constexpr (kByKeys) {
        const int query_head = uniform(assigned.task.head_q + entry.head + turn);
        if (query_head != opened) open_head(p, assigned.task.batch, query_head);
        mask.word[t] &= ~padding_columns(view, entry.x, entry.y, entry.z, own.thread);
      }
    }
    return found;
  }
};

using Scores = std::conditional_t<kScored, ModifiedScores, PlainScores>;

}  // namespace spattn::sm90_backward
