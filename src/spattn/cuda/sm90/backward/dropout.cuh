// Dropout in the backward: the producer publishes the random words of an iteration's rows and columns with the columns;
// while products run, consumers find which pairs of the iteration are kept.
#pragma once

#include "sm90/backward/warpgroup.cuh"

namespace spattn::sm90_backward {

struct NoDrops {
  __device__ __forceinline__ void open(const Params&) {}
  __device__ __forceinline__ void find_kept(const Warpgroup&, uint32_t) {}
  template <int kCount>
  __device__ __forceinline__ void drop(float (&)[kCount], int) const {}
  __device__ __forceinline__ float difference(float d, float delta) const { return d - delta; }
};

// Which pairs of an iteration are kept, of a thread's two rows. Dropped weights are 0; Results multiplies dV by the
// others' factor.
template <class Args>
struct Drops {
  struct alignas(2 * sizeof(ColumnWords)) ColumnPair {
    ColumnWords of[2];
  };

  uint32_t threshold;
  float factor;
  uint32_t bits[kProducts / 32];  // bit i % 32 of word i / 32 is that of accumulator i

  __device__ __forceinline__ void open(const Params& p) {
    threshold = static_cast<const Args*>(p.score)->dropout_threshold;
    factor = kept_factor<Args>(p);
  }

  // Finds the bits of the iteration whose columns are in a stage.
  __device__ __forceinline__ void find_kept(const Warpgroup& own, uint32_t stage) {
    const StageWords& words = own.shared.words[stage];
    const ColumnPair* columns = reinterpret_cast<const ColumnPair*>(words.columns) + threadIdx.x % 4;
    const int first = own.number * kSubtile + own.thread / 32 * 16 + own.thread % 32 / 4;
    const RowWords row[2] = {words.rows[first], words.rows[first + 8]};
#pragma unroll
    for (uint32_t& word : bits) word = 0;
#pragma unroll
    for (int n = 0; n < kProducts / 4; ++n) {  // two columns of this thread
      const ColumnPair pair = columns[4 * n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[n / 8] |= uint32_t(number(row[i / 2], pair.of[i % 2]) >= threshold) << (n % 8 * 4 + i);
      }
    }
    // Otherwise the compiler would keep the random numbers, a register each.
#pragma unroll
    for (uint32_t& word : bits) asm volatile("" : "+r"(word));
  }

  __device__ __forceinline__ static uint32_t number(QueryWords query, uint32_t key) { return query.number(key); }
  __device__ __forceinline__ static uint32_t number(uint32_t key, QueryWords query) { return query.number(key); }

  // Sets dropped numbers to 0; x[0] belongs to accumulator `first`. Eight at a time, the compiler moves bits to
  // predicates by one instruction.
  template <int kCount>
  __device__ __forceinline__ void drop(float (&x)[kCount], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = bits[(first + i) / 32] >> (first + i) % 32 & 1 ? x[i] : 0.0f;
  }

  // Returns dP - delta, given dP of the weight without its factor.
  __device__ __forceinline__ float difference(float d, float delta) const { return fmaf(d, factor, -delta); }
};

using WeightDrops = std::conditional_t<Score::kDrops, Drops<ScoreArgs>, NoDrops>;

}  // namespace spattn::sm90_backward
