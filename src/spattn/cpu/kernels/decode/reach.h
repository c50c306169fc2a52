// Key ranges of a tile that blocks of rows attend to.
#pragma once
#include "simd/count.h"
#include "kernels.h"
#include "simd/vec.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// The cell of a row, with `cells` rows per head.
inline int64_t cell_of(int64_t row, int64_t cells) { return row < cells ? row : row % cells; }

// Sets reached[row] for each block of rows: the range of the first `count` keys that any of them attends to.
template <class T>
void find_reached(const Mask& mask, int64_t cells, int64_t count, int64_t rows, Keys* reached) {
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    const Keys every = {0, count};
    if (!mask) {
      reached[row] = every;
      return;
    }
    Keys own = {count, 0};
    for (int64_t word = 0; word < mask.words; ++word) {
      uint64_t any = 0;
      for (int i = 0; i < R; ++i) any |= mask.bits[cell_of(row + i, cells) * mask.words + word];
      own.cover(word, any);
    }
    reached[row] = own.within(every);
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
