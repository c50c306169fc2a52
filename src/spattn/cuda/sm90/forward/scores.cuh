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
  float magnitude, sign;  // of the head's scale, as Problem's; float8 only

  __device__ __forceinline__ void open(const Params& p, const Assignment& assigned, int) {
    if constexpr (kFloat8) {
      const Problem& own = problem_of(p, assigned);
      const float scale = own.sign * own.scale_log2 * head_scales(p, assigned).x;
      const bool vanishes = fabsf(scale) < 0x1p-126f;
      magnitude = vanishes ? 1.0f : fabsf(scale);
      sign = vanishes ? 0.0f : copysignf(1.0f, scale);
    }
  }

  __device__ __forceinline__ void apply(float (&s)[kStepKV / 2], const Params&, const Problem& own, const Shared&,
                                        uint32_t) const {
    const float factor = kFloat8 ? sign : own.sign;
    if (factor != 1.0f) {
#pragma unroll
      for (int i = 0; i < kStepKV / 2; ++i) s[i] *= factor;
    }
  }

  __device__ __forceinline__ float scale_log2(const Problem& own) const { return kFloat8 ? magnitude : own.scale_log2; }
};

// Scores with a score function of the scaled score and the positions of query and key.
struct ModifiedScores {
  int query[2];  // positions of the thread's two rows
  int row;       // the first of these rows, as a row of the query tile
  float factor;  // of the head's dot products; float8 only
  Score::Head<float> head;

  struct GatheredPositions {
    const int32_t* rows;

    __device__ __forceinline__ int of(int cell) const { return __ldg(rows + cell); }
    __device__ __forceinline__ int of_row(int cell) const { return of(cell); }
  };

  // Key positions of an iteration.
  struct Keys {
    std::conditional_t<kGathers, GatheredPositions, TilePositions> tile[kTiles];
  };

  // Finds the positions of the thread's rows of the next task, and the values of its head. `first_row` is the thread's
  // first row.
  __device__ __forceinline__ void open(const Params& p, const Assignment& assigned, int first_row) {
    const Problem& own = problem_of(p, assigned);
    head = Score::open<float>(*own.score, query_offset(own), assigned.batch, assigned.head);
    row = first_row;
    if constexpr (kFloat8) factor = head_scales(p, assigned).x;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t position;
      query_position(p, assigned, row + 8 * h, position);  // arbitrary for padding
      query[h] = int(position) + query_offset(own);
    }
  }

  __device__ __forceinline__ static void find(const Params& p, const TilePositions& published,
                                              GatheredPositions& tile) {
    tile.rows = p.key_rows + int64_t(published.first) * kBlockKV;
  }

  __device__ __forceinline__ static void find(const Params&, const TilePositions& published, TilePositions& tile) {
    tile = published;
  }

  // Applies the function to an iteration whose key positions are in a stage. If a task's last iteration lacks a tile,
  // that tile's positions are arbitrary.
  template <class Function = Score>
  __device__ __forceinline__ void apply(float (&s)[kStepKV / 2], const Params& p, const Problem& own,
                                        const Shared& shared, uint32_t stage) const {
    const float scale = own.sign * own.scale_log2 * kLn2<float> * (kFloat8 ? factor : 1.0f);
    if (modify_diagonals<Function>(s, scale, shared.diagonals[stage])) return;
    Keys keys;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) find(p, shared.positions[stage][t], keys.tile[t]);
    if constexpr (Function::kPositions && !kDiagonals && !kGathers) {
      if (is_simple<Function>(keys)) return modify<true>(s, scale, keys);
    }
    modify<false>(s, scale, keys);
  }

  // Applies the function with the numbers of diagonals that the producer has published; returns false if it has
  // published none.
  template <class Function, class Published>
  __device__ __forceinline__ bool modify_diagonals(float (&s)[kStepKV / 2], float scale, const Published& own) const {
    if constexpr (kDiagonals) {
      const Extent extent = Extent(uniform(int(own.extent)));
      if (extent == Extent::iteration) {
        const auto number = own.at(0)->first;
#pragma unroll
        for (int i = 0; i < kStepKV / 2; ++i) s[i] = Function::value_on(s[i] * scale, number, head);
      } else if (extent == Extent::diagonal) {
        const auto* numbers = own.at(threadIdx.x % 4 * 2 - row + kBlockQ - 1);
#pragma unroll
        for (int at = 0; at < kTiles * 9; ++at) {
          const int t = at / 9, m = at % 9 - 1;  // columns 8 m of the first row and 8 (m + 1) of the second
          const auto pair = numbers[t * Published::kPlaces + 4 * m];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (m + h < 0 || m + h > 7) continue;
            float* scores = s + (t * 8 + m + h) * 4 + 2 * h;
            scores[0] = Function::value_on(scores[0] * scale, pair.first, head);
            scores[1] = Function::value_on(scores[1] * scale, pair.second, head);
          }
        }
      }
      return extent != Extent::pair;
    }
    return false;
  }

  // True if each tile is one row of positions and no array index of the iteration's pairs needs a bounds check.
  template <class Function>
  __device__ __forceinline__ bool is_simple(const Keys& keys) const {
    bool found = true;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const auto& tile = keys.tile[t];
      const int begin = tile.of_row(0), end = tile.of_row(63);
      found =
          found && tile.one_row() &&
          Function::inside(min(query[0], query[1]), max(query[0], query[1]), min(begin, end), max(begin, end), head);
    }
    return __all_sync(0xffffffff, found);
  }

  template <bool kSimple>
  __device__ __forceinline__ void modify(float (&s)[kStepKV / 2], float scale, const Keys& keys) const {
#pragma unroll
    for (int column = 0; column < kStepKV / 4; ++column) {  // a column of this thread
      const int at = column / 2 * 8 + column % 2, cell = at % kBlockKV + threadIdx.x % 4 * 2;
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

  __device__ __forceinline__ float scale_log2(const Problem&) const { return kLog2E<float>; }
};

using Scores = std::conditional_t<kModified, ModifiedScores, PlainScores>;

// The factor of weights that dropout keeps.
template <class Args = ScoreArgs>
__device__ __forceinline__ float kept_factor(const Problem& own) {
  if constexpr (Score::kDrops) return float(static_cast<const Args*>(own.score)->dropout_factor);
  return 1.0f;
}

}  // namespace spattn::sm90
