// Key ranges of a tile that blocks of rows attend to.
#pragma once
#include "simd/count.h"
#include "kernels.h"
#include "simd/vec.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// The range of keys that any of the rows attends to, and the ranges of the first and of the second half of the rows.
// Keys are counted in cells, runs or vectors.
struct Reach {
  Keys all, half[2];

  // Whether the halves have ranges of equal length, the second one shifted: queries of adjacent image lines. One step
  // then processes, for each half, a key outside the other's range.
  bool staggered() const {
    const int64_t lead = half[1].begin - half[0].begin;
    return lead > 0 && half[1].end - half[0].end == lead && half[1].begin < half[0].end;
  }
  // If staggered: the intersection; the keys of the first half only; the offset to the keys of the second half only.
  Keys common() const { return {half[1].begin, half[0].end}; }
  Keys lead() const { return {half[0].begin, half[1].begin}; }
  int64_t later() const { return half[0].end - half[0].begin; }

  // The ranges in other units.
  template <class Convert> Reach as(const Convert& convert) const {
    return {convert(all), {convert(half[0]), convert(half[1])}};
  }
};

// The cell of a row, with `cells` rows per head.
inline int64_t cell_of(int64_t row, int64_t cells) { return row < cells ? row : row % cells; }

// Sets reached[row] for each block of rows: ranges of the first `count` keys, in multiples of `step`.
template <class T>
void find_reached(const Mask& mask, int64_t step, int64_t cells, int64_t count, int64_t rows, Reach* reached) {
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    const Keys every = {0, count};
    if (!mask) {
      reached[row] = {every, {every, every}};
      return;
    }
    Reach own = {{count, 0}, {{count, 0}, {count, 0}}};
    for (int64_t word = 0; word < mask.words; ++word) {
      uint64_t any[2] = {};
      for (int i = 0; i < R; ++i) any[2 * i / R] |= mask.bits[cell_of(row + i, cells) * mask.words + word];
      own.all.cover(word, any[0] | any[1]), own.half[0].cover(word, any[0]), own.half[1].cover(word, any[1]);
    }
    reached[row] = own.as([&](Keys keys) {
      return (step > 1 ? Keys{keys.begin / step * step, round_up(keys.end, step)} : keys).within(every);
    });
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
