// Which keys of a tile rows that are computed at once reach.
#pragma once
#include "decode/count.h"
#include "kernels.h"
#include "simd/vec.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// From the first to the last key that any of the rows may attend to, and those of the first and of the second half of
// the rows. Keys stand for what they are counted in: cells, runs or vectors.
struct Reach {
  Keys all, half[2];

  // Do the halves reach equally many, the second as many beyond those of the first as it leaves out before? So do
  // queries of neighbouring lines of an image: each half then meets in one step what the other does not reach.
  bool staggered() const {
    const int64_t lead = half[1].begin - half[0].begin;
    return lead > 0 && half[1].end - half[0].end == lead && half[1].begin < half[0].end;
  }
  // What both reach, if they are staggered; what only the first one does; and from there to what only the second does.
  Keys common() const { return {half[1].begin, half[0].end}; }
  Keys lead() const { return {half[0].begin, half[1].begin}; }
  int64_t later() const { return half[0].end - half[0].begin; }

  // The same in other units.
  template <class Convert> Reach as(const Convert& convert) const {
    return {convert(all), {convert(half[0]), convert(half[1])}};
  }
};

// The cell of a row, where heads have `cells` rows each.
inline int64_t cell_of(int64_t row, int64_t cells) { return row < cells ? row : row % cells; }

// Leaves in reached[row], for each block of rows that are computed at once, whole steps of the first `count` keys.
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
