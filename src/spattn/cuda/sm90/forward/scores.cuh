// Score modification: turns dot products of q and k into the softmax's input.
#pragma once

#include <type_traits>

#include "common/score.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/positions.cuh"
#include "sm90/forward/softmax.cuh"

namespace spattn::sm90 {

// Scores without a score function. The exponent includes the scale's magnitude; apply() multiplies by its sign.
struct PlainScores {
  struct Keys {};

  __device__ __forceinline__ void open(const Params&, const Assignment&, int) {}

  __device__ __forceinline__ Keys next(const Params&) { return {}; }

  __device__ __forceinline__ void apply(float (&s)[kStepKV / 2], const Problem& own, const Keys&) const {
    if (own.sign != 1.0f) {
#pragma unroll
      for (int i = 0; i < kStepKV / 2; ++i) s[i] *= own.sign;
    }
  }

  __device__ __forceinline__ static float scale_log2(const Problem& own) { return own.scale_log2; }
};

// Scores with a score function of the scaled score and the positions of query and key.
struct ModifiedScores {
  int query[2];     // positions of the thread's two rows
  int entry, last;  // indices: the next iteration's first entry, the task's last entry
  int key_view;     // view to which the entries' views are relative: see Work
  Score::Head<float> head;

  struct GatheredPositions {
    const int32_t* rows;

    __device__ __forceinline__ int of(int cell) const { return __ldg(rows + cell); }
    __device__ __forceinline__ int of_row(int cell) const { return of(cell); }
    __device__ __forceinline__ bool one_row(int&, int&) const { return false; }
  };

  // Key positions of an iteration.
  struct Keys {
    std::conditional_t<kGathers, GatheredPositions, TilePositions> tile[kTiles];
  };

  __device__ __forceinline__ static void find(const Params& p, const View& view, const Entry& entry,
                                              GatheredPositions& tile) {
    tile.rows = key_rows(p, view, entry);
  }

  __device__ __forceinline__ static void find(const Params& p, const View& view, const Entry& entry,
                                              TilePositions& tile) {
    tile = tile_positions(view, entry.x, entry.y, entry.z, view.offset > 0 ? int(problem_of(p, view).moved) : 0);
  }

  // Looks up what the rows of the next task share; `row` is the thread's first row.
  __device__ __forceinline__ void open(const Params& p, const Assignment& assigned, int row) {
    const Problem& own = problem_of(p, assigned);
    entry = uniform(assigned.work.begin), last = uniform(assigned.work.end - 1), key_view = assigned.work.key_view;
    head = Score::open<float>(*own.score, query_offset(own), assigned.batch, assigned.head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t position;
      query_position(p, assigned, row + 8 * h, position);  // arbitrary for padding
      query[h] = int(position) + query_offset(own);
    }
  }

  // Looks up the key positions of the task's next iteration; loads early, like masks.
  __device__ __forceinline__ Keys next(const Params& p) {
    Keys found;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const Entry& own = p.entries[min(entry + t, last)];  // arbitrary for the missing tile of the last iteration
      find(p, p.key_views[key_view + own.view], own, found.tile[t]);
    }
    entry += kTiles;
    return found;
  }

  __device__ __forceinline__ void apply(float (&s)[kStepKV / 2], const Problem& own, const Keys& keys) const {
    const float scale = own.sign * own.scale_log2 * kLn2<float>;
    if constexpr (Score::kPositions && !kGathers) {
      if (is_simple(keys)) return modify<true>(s, scale, keys);
    }
    modify<false>(s, scale, keys);
  }

  // True if each tile is one row of positions, and no look-up of the iteration's pairs needs a check.
  __device__ __forceinline__ bool is_simple(const Keys& keys) const {
    bool found = true;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      int low, high;
      found = found && keys.tile[t].one_row(low, high) &&
              Score::inside(min(query[0], query[1]), max(query[0], query[1]), low, high, head);
    }
    return __all_sync(0xffffffff, found);
  }

  template <bool kSimple>
  __device__ __forceinline__ void modify(float (&s)[kStepKV / 2], float scale, const Keys& keys) const {
#pragma unroll
    for (int column = 0; column < kStepKV / 4; ++column) {  // a column of this thread
      const int at = column / 2 * 8 + column % 2;
      const int cell = at % kBlockKV + threadIdx.x % 4 * 2;
      int key;
      if constexpr (kSimple) key = keys.tile[at / kBlockKV].of_row(cell);
      else key = keys.tile[at / kBlockKV].of(cell);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = s[column / 2 * 4 + 2 * h + column % 2];
        score = Score::value<kSimple>(score * scale, query[h], key, head);
      }
    }
  }

  __device__ __forceinline__ static float scale_log2(const Problem&) { return kLog2E<float>; }
};

using Scores = std::conditional_t<kScored, ModifiedScores, PlainScores>;

}  // namespace spattn::sm90
