// Numbers of diagonals: what a score function computes from key - query alone. The producer computes one per diagonal
// of a tile and publishes it with the keys. In a consumer, each instruction per pair would cost 7 % of the kernel's
// time, because products and arithmetic share the register file.
#pragma once

#include <type_traits>

#include "common/score.cuh"

namespace spattn::sm90 {

// The pairs of an iteration that share one number: each pair alone, whose number consumers compute; each diagonal; or
// all pairs of the iteration, as with clipped distances far from the main diagonal.
enum class Extent { pair, diagonal, iteration };

// Numbers of the tiles of an iteration, for kRows query rows.
template <int kTiles, int kRows>
struct Diagonals {
  static constexpr int kCount = kRows + 64;  // one more than there are diagonals
  using Number = std::conditional_t<std::is_same_v<Score::Diagonal<float>, bool>, int, Score::Diagonal<float>>;

  // [tile][copy]: number c - r + kRows - 1 is that of column c and row r. The second copy begins one number later, so
  // that any two neighbours are an aligned pair in one of the copies; 16 more numbers put the copies in different
  // banks.
  alignas(8) Number numbers[kTiles][2][kCount + 16];
  Extent extent;

  // A lane's share of a stage's numbers, which a warp computes together.
  struct Lane {
    Number of[kTiles][kCount / 32];
    Extent extent;
  };

  // Computes the numbers of a tile whose keys and queries are `step` apart. `first` is the distance of the first key
  // from the first query.
  template <class Function = Score>
  __device__ __forceinline__ static void compute(Lane& found, int tile, int first, int step,
                                                 const Score::Head<float>& head) {
#pragma unroll
    for (int i = 0; i < kCount / 32; ++i) {
      const int number = threadIdx.x % 32 + 32 * i;
      found.of[tile][i] = Function::template diagonal<true>(0, first + (number - kRows + 1) * step, head);
    }
  }

  // Finds whether all numbers are equal.
  __device__ __forceinline__ static void compare(Lane& found) {
    const Number one = __shfl_sync(0xffffffff, found.of[0][0], 0);
    bool equal = true;
#pragma unroll
    for (int at = 0; at < kTiles * kCount / 32; ++at)
      equal = equal && found.of[at / (kCount / 32)][at % (kCount / 32)] == one;
    if (__all_sync(0xffffffff, equal)) found.extent = Extent::iteration;
  }

  __device__ __forceinline__ void write(const Lane& found) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) extent = found.extent, numbers[0][0][0] = found.of[0][0];
    if (found.extent != Extent::diagonal) return;
#pragma unroll
    for (int at = 0; at < kTiles * kCount / 32; ++at) {
      const int tile = at / (kCount / 32), i = at % (kCount / 32);
      numbers[tile][0][lane + 32 * i] = found.of[tile][i];
      if (lane + i) numbers[tile][1][lane + 32 * i - 1] = found.of[tile][i];
    }
  }

  // Two neighbouring numbers. at() returns those of columns c and c + 1 of row r in the first tile, for
  // number = c - r + kRows - 1. Those of columns c + 2 n and c + 2 n + 1 are n pairs further, those of the next tile
  // kPlaces pairs.
  struct alignas(8) Pair {
    Number first, second;
  };
  static constexpr int kPlaces = kCount + 16;
  __device__ __forceinline__ const Pair* at(int number) const {
    return reinterpret_cast<const Pair*>(&numbers[0][number & 1][number & ~1]);
  }
};

struct NoDiagonals {
  struct Lane {};

  __device__ __forceinline__ void write(const Lane&) {}
};

}  // namespace spattn::sm90
