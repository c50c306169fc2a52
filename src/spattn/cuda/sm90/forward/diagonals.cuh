// What a score function computes from key - query: the producer computes it once per diagonal of a tile and publishes it
// with the keys. On the consumers' side each instruction per pair costs 7 % of the kernel's time, because products and
// arithmetic share the register file.
#pragma once

#include <type_traits>

#include "common/score.cuh"

namespace spattn::sm90 {

// What an iteration's pairs share: nothing, so that consumers compute the number of each pair; a number per diagonal; or
// one number, as far from the diagonal in a table of clipped distances.
enum class Extent { pair, diagonal, iteration };

// Numbers of the tiles of an iteration, for kRows query rows.
template <int kTiles, int kRows>
struct Diagonals {
  static constexpr int kCount = kRows + 64;  // one more than diagonals
  using Number = std::conditional_t<std::is_same_v<Score::Diagonal<float>, bool>, int, Score::Diagonal<float>>;

  // [tile][copy]: number c - r + kRows - 1 is that of column c and row r. The second copy begins one number later, so
  // that all pairs of neighbours are aligned in one of them, and in other banks.
  alignas(8) Number numbers[kTiles][2][kCount + 16];
  Extent extent;

  // A lane's numbers of a stage, which a warp computes together.
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

  // Returns where the numbers of columns c and c + 1 of the first tile in row r are, for number = c - r + kRows - 1;
  // those of columns c + 2 n and c + 2 n + 1 are n places further, those of the next tile kPlaces.
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
