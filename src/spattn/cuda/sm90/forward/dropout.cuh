// Dropout in the forward: the producer publishes the random words of an iteration's keys with the keys; consumers drop
// weights after they have added them to the row sums.
#pragma once

#include "sm90/forward/config.cuh"

namespace spattn::sm90 {

// A lane's share of the words of an iteration's keys: keys `lane` and `lane` + 32 of each tile.
struct LaneWords {
  uint32_t of[kTiles][2];

  __device__ __forceinline__ void write(uint32_t* words) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) words[t * kBlockKV + half * 32 + threadIdx.x % 32] = of[t][half];
    }
  }
};

struct NoDrops {
  struct Lane {};

  __device__ __forceinline__ void open(const Params&, const Assignment&, int) {}
  __device__ __forceinline__ void seek(uint32_t) {}
  __device__ __forceinline__ void apply(float (&)[kStepKV / 2], const Shared&) {}
};

// Drops weights of a thread's two rows.
template <class Own>
struct Drops {
  using Lane = LaneWords;
  typename Own::Row row[2];
  uint32_t threshold;
  RingPosition<kWordStages> words;

  // Reads the words of the next task's rows; `first_row` is the thread's first row.
  __device__ __forceinline__ void open(const Params& p, const Assignment& assigned, int first_row) {
    const Own own = dropout_of(p, assigned);
    threshold = own.threshold;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t position;
      query_position(p, assigned, first_row + 8 * h, position);  // arbitrary for padding
      row[h] = own.row(int(position) + own.first);
    }
  }

  __device__ __forceinline__ static Own dropout_of(const Params& p, const Assignment& assigned) {
    const Problem& own = problem_of(p, assigned);
    return Score::open<float>(*own.score, query_offset(own), assigned.batch, assigned.head).dropout;
  }

  // Chooses the next iteration, as the producer counts them.
  __device__ __forceinline__ void seek(uint32_t iteration) { words.stage = iteration % kWordStages; }

  // Drops weights of the next iteration; finish() divides the others by 1 - p.
  __device__ __forceinline__ void apply(float (&s)[kStepKV / 2], const Shared& shared) {
    const uint2* pairs = reinterpret_cast<const uint2*>(shared.words[words.stage]) + threadIdx.x % 4;
    words.advance();
#pragma unroll
    for (int i = 0; i < kStepKV / 8; ++i) {  // two columns of this thread
      const uint2 word = pairs[4 * i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* weights = s + 4 * i + 2 * h;
        weights[0] = keeps(h, word.x) ? weights[0] : 0.0f;
        weights[1] = keeps(h, word.y) ? weights[1] : 0.0f;
      }
    }
  }

  __device__ __forceinline__ bool keeps(int h, uint32_t word) const { return row[h].number(word) >= threshold; }
};

using WeightDrops = std::conditional_t<Score::kDrops, Drops<decltype(Score::Head<float>::dropout)>, NoDrops>;

}  // namespace spattn::sm90
