// Gradients of captured arrays in fused mode: sums of dS along the diagonals of each tile, added to exact accumulators.
//
// A warpgroup has a tile of 64 keys x 64 queries. Its 64 diagonals wrap around: diagonal d begins at query d of key 0
// and, after the last query, continues at query 0 as diagonal d - 64. Each warp sums 16 of them. A lane reads two
// neighbouring queries at once: lanes 0 to 7 for even keys, from an even diagonal on; lanes 8 to 15 for odd keys, from
// an odd diagonal on; lanes 16 to 31 likewise for the second half of the keys. All sums inside an item have a fixed
// order.
#pragma once

#include <cstdint>

#include "common/accumulator.cuh"
#include "common/element.cuh"
#include "common/score.cuh"

namespace spattn::sm90_backward {

// Exact accumulators of the elements of all arrays; `first` has the index of each array's first accumulator.
struct Accumulators {
  unsigned long long* words;
  const int64_t* first;
};

// First positions of a tile's keys and queries, and the distance between consecutive ones.
struct TileOrigin {
  int key, query, step;
};

// Returns two neighbouring elements as floats.
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  const Element2 elements = *reinterpret_cast<const Element2*>(&pair);
  return make_float2(widen(elements.x), widen(elements.y));
}

template <class Uses>
struct TableSums {
  static constexpr int kCount = Uses::kCount > 0 ? Uses::kCount : 1;

  // Sum of the gradients for one element, as long as consecutive tiles contribute to no other element.
  struct Run {
    int element = -1;
    float sum = 0.0f;  // of this lane's diagonals
  };
  Run runs[kCount];

  // Returns the index of an element among those of all arrays, or -1 for a pair outside the array.
  template <class Use>
  __device__ __forceinline__ static int element_of(const Accumulators& to, Use, int query, int key,
                                                   const Score::Head<float>& head) {
    const int index = int(Use::template index<float>(query, key, head));
    return index < 0 ? -1 : int(to.first[Use::kTable]) + index;
  }

  __device__ __forceinline__ static void add(const Accumulators& to, int element, float x) {
    if (element >= 0 && x != 0.0f) add_exactly(to.words + int64_t(element) * kWords, x);
  }

  // Adds a tile from this warpgroup's rows of dS in shared memory.
  __device__ __forceinline__ void add_tile(const Accumulators& to, const uint8_t* gradients, int thread,
                                           const TileOrigin& tile, const Score::Head<float>& head) {
    const int lane = thread % 32, place = lane % 8, parity = lane / 8 % 2, half = lane / 16;
    const int diagonal = thread / 32 * 16 + 2 * place + parity;
    float found[2] = {}, wrapped[2] = {};  // sums of this diagonal and the next, before and after they wrap around
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 32 * half + 2 * i + parity, column = diagonal + row;
      const uint32_t offset = row * 128 + ((2 * column) % 128 ^ row % 8 * 16);
      const float2 pair = widen_pair(*reinterpret_cast<const uint32_t*>(gradients + offset));
      if (column < 64) found[0] += pair.x, found[1] += pair.y;
      else wrapped[0] += pair.x, wrapped[1] += pair.y;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      found[i] += __shfl_xor_sync(0xffffffff, found[i], 16);
      wrapped[i] += __shfl_xor_sync(0xffffffff, wrapped[i], 16);
    }
    // From here on, lanes 0 to 15 have the diagonals before they wrap around, lanes 16 to 31 those after. Each lane
    // adds the second diagonal of another lane, which is its own first one. Lanes 15 and 31 also have the first diagonal
    // of the next warp.
    const float next = half ? wrapped[1] : found[1];
    const float other = __shfl_sync(0xffffffff, next, parity ? lane - 8 : lane + 7);
    const float sum = (half ? wrapped[0] : found[0]) + (parity || place ? other : 0.0f);
    const bool borders = lane % 16 == 15;
    const int distance = (diagonal - 64 * half) * tile.step, beyond = distance + tile.step;
    const int query = tile.query + max(distance, 0), key = tile.key + max(-distance, 0);
    const int next_query = tile.query + max(beyond, 0), next_key = tile.key + max(-beyond, 0);
    Uses::for_each([&](auto use) {
      static_assert(use.kSummed);
      Run& run = runs[use.kNumber];
      const int own = element_of(to, use, query, key, head);
      const int bordering = borders ? element_of(to, use, next_query, next_key, head) : own;
      const float x = use.of_sum(sum, query, key, head);
      const float y = borders ? use.of_sum(next, next_query, next_key, head) : 0.0f;
      const int first = __shfl_sync(0xffffffff, own, 0);
      if (__all_sync(0xffffffff, own == first && bordering == first)) {
        if (run.element != first) flush(to, run, lane);
        run.element = first, run.sum += x + y;
      } else {
        add(to, own, x);
        add(to, bordering, y);
      }
    });
  }

  __device__ __forceinline__ static void flush(const Accumulators& to, Run& run, int lane) {
    float sum = run.sum;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (lane == 0) add(to, run.element, sum);
    run = {};
  }

  // Adds what add_tile() has kept.
  __device__ __forceinline__ void flush_all(const Accumulators& to, int thread) {
#pragma unroll
    for (Run& run : runs) flush(to, run, thread % 32);
  }
};

}  // namespace spattn::sm90_backward
