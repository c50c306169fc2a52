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

// Returns two neighbouring elements as floats.
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  const Element2 elements = *reinterpret_cast<const Element2*>(&pair);
  return make_float2(widen(elements.x), widen(elements.y));
}

// First positions of a tile's keys and queries, and the distance between consecutive ones.
struct TileOrigin {
  int key, query, step;
};

template <class Uses>
struct TableSums {
  static constexpr int kCount = Uses::kCount > 0 ? Uses::kCount : 1;

  // Sum of the gradients for one element, as long as consecutive tiles contribute to no other element.
  struct Run {
    int element = -1;
    float sum = 0.0f;  // of this lane's pairs
  };
  Run runs[kCount];

  // Sums of diagonals of the last tile that the next one may continue: the lane's diagonal and, in lane 15, the next
  // warp's first.
  float sum = 0.0f, last = 0.0f;
  bool continues = false;
  int query;  // first query position of the last tile

  // Calls visit(use, query, key) for each use, with the first pair of a diagonal: column - row = `diagonal`.
  template <class Visit>
  __device__ __forceinline__ static void visit_at(const TileOrigin& at, int diagonal, Visit visit) {
    const int query = at.query + max(diagonal, 0) * at.step, key = at.key + max(-diagonal, 0) * at.step;
    Uses::for_each([&](auto use) { visit(use, query, key); });
  }

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

  // Adds the sum of the gradients along a diagonal.
  __device__ __forceinline__ static void emit(const Accumulators& to, const TileOrigin& at, int diagonal, float sum,
                                              const Score::Head<float>& head) {
    visit_at(at, diagonal, [&](auto use, int query, int key) {
      static_assert(use.kSummed);
      add(to, element_of(to, use, query, key, head), use.of_sum(sum, query, key, head));
    });
  }

  // True if all pairs of a tile contribute their gradients to one element of each array; begins or continues its run.
  __device__ __forceinline__ bool is_constant(const Accumulators& to, int thread, const TileOrigin& at,
                                              const Score::Head<float>& own) {
    int first[kCount] = {}, stride = 4;
    bool same = true;
    for (int i = 0; i < stride && same; ++i) {  // 32 diagonals at a time: most tiles fail with the first 32
      visit_at(at, thread % 32 * 4 - 64 + i, [&](auto use, int query, int key) {
        const int element = element_of(to, use, query, key, own);
        if (i == 0) first[use.kNumber] = __shfl_sync(0xffffffff, element, 0);
        same = same && use.kPlain && element == first[use.kNumber];
      });
      same = __all_sync(0xffffffff, same);
    }
    if (!same) return false;
    flush_diagonals(to, thread, at, own);
    for (int i = 0; i < kCount; ++i) {
      if (runs[i].element != first[i]) flush(to, runs[i], thread % 32);
      runs[i].element = first[i];
    }
    return true;
  }

  // Adds the gradients of a constant tile.
  template <int kGradients>
  __device__ __forceinline__ void add_constant(const float (&gradients)[kGradients]) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kGradients; ++i) sums[i % 4] += gradients[i];
    const float sum = sums[0] + sums[1] + (sums[2] + sums[3]);
#pragma unroll
    for (Run& run : runs) run.sum += sum;
  }

  // Adds a tile from this warpgroup's rows of dS in shared memory.
  __device__ __forceinline__ void add_tile(const Accumulators& to, const uint8_t* gradients, int thread,
                                           const TileOrigin& at, const Score::Head<float>& own) {
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
    // adds the second diagonal of another lane, which is its own first one.
    const float next = half ? wrapped[1] : found[1];
    const float other = __shfl_sync(0xffffffff, next, parity ? lane - 8 : lane + 7);
    const float now = (half ? wrapped[0] : found[0]) + (parity || place ? other : 0.0f);
    if (at.query - query != 64 * at.step) flush_diagonals(to, thread, at, own);
    // The wrapped diagonals continue those of the tile before.
    const float carried = __shfl_sync(0xffffffff, sum, lane % 16), carried_last = __shfl_sync(0xffffffff, last, 15);
    if (half) {
      emit(to, at, diagonal - 64, now + carried, own);
      if (lane == 31) emit(to, at, diagonal - 63, next + carried_last, own);
    }
    sum = half ? 0.0f : now, last = lane == 15 ? next : 0.0f;
    continues = true, query = at.query;
  }

  __device__ __forceinline__ void flush(const Accumulators& to, Run& run, int lane) {
    float sum = run.sum;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (lane == 0) add(to, run.element, sum);
    run = {};
  }

  // Adds the diagonals that the next tile does not continue; `at` is any tile of the item, `head` that of the last
  // tile.
  __device__ __forceinline__ void flush_diagonals(const Accumulators& to, int thread, TileOrigin at,
                                                  const Score::Head<float>& head) {
    if (!continues) return;
    const int lane = thread % 32, diagonal = thread / 32 * 16 + 2 * (lane % 8) + lane / 8 % 2;
    at.query = query;
    if (lane < 16) emit(to, at, diagonal, sum, head);
    if (lane == 15) emit(to, at, diagonal + 1, last, head);
    continues = false, sum = last = 0.0f;
  }

  __device__ __forceinline__ void flush_all(const Accumulators& to, int thread, const TileOrigin& at,
                                            const Score::Head<float>& head) {
    flush_diagonals(to, thread, at, head);
#pragma unroll
    for (Run& run : runs) flush(to, run, thread % 32);
  }
};

}  // namespace spattn::sm90_backward
