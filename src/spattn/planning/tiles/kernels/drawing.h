// Expands equivalence classes of tiles to bitmasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "looks.h"

namespace spattn {

class Drawing {
 public:
  // For tiles of block_q queries and block_kv keys.
  Drawing(int64_t block_q, int64_t block_kv, const MaskClasses& looks)
      : block_q_(block_q), words_(block_kv / 64), looks_(looks) {}

  // Writes the bitmask of a class. drawn(look) returns the bitmask of another class, or nullptr if it does not exist
  // yet. Padding rows continue the rows before them.
  template <class Drawn> void draw(int32_t look, uint64_t* mask, const Drawn& drawn) {
    const uint64_t* const formula = looks_.begin(look);
    const int64_t size = block_q_ * words_;
    switch (looks_.kind(look)) {
      case MaskClass::kRows:
        std::fill_n(mask, size, 0);
        add_rows(look, mask);
        break;
      case MaskClass::kDiagonal:
        draw_diagonals(formula, mask);
        break;
      case MaskClass::kEither:
        draw_again(int32_t(formula[1]), mask, drawn);
        add_rows(int32_t(formula[0]), mask);
        break;
      case MaskClass::kBoth: {
        std::vector<uint64_t> other(size);
        draw_again(int32_t(formula[0]), mask, drawn), draw_again(int32_t(formula[1]), other.data(), drawn);
        for (int64_t n = 0; n < size; ++n) mask[n] &= other[n];
      }
    }
  }

 private:
  // Copies the bitmask of a class if it exists, else expands the class.
  template <class Drawn> void draw_again(int32_t look, uint64_t* mask, const Drawn& drawn) {
    if (const uint64_t* const known = drawn(look)) {
      std::copy_n(known, block_q_ * words_, mask);
    } else {
      draw(look, mask, drawn);
    }
  }

  void add_rows(int32_t look, uint64_t* mask) const { words_ == 1 ? add_rows<1>(look, mask) : add_rows<0>(look, mask); }
  // kWords: number of words of a row, 0 if it is known only at run time.
  template <int64_t kWords> void add_rows(int32_t look, uint64_t* mask) const {
    const int64_t words = kWords ? kWords : words_;
    const uint64_t* const end = looks_.end(look);
    for (const uint64_t* at = looks_.begin(look); at < end; at += 1 + words) {
      const int64_t stop = at + 1 + words < end ? int64_t(at[1 + words]) : block_q_;
      for (int64_t word = 0; word < words; ++word) {
        const uint64_t keys = at[1 + word];
        if (!keys) continue;
        for (int64_t row = int64_t(at[0]); row < stop; ++row) mask[row * words + word] |= keys;
      }
    }
  }

  // Writes the last row from the diagonals; each other row is the row below, shifted right by one bit.
  void draw_diagonals(const uint64_t* diagonals, uint64_t* mask) const {
    const int64_t block = block_q_, words = words_;
    for (int64_t word = 0; word < words; ++word) {
      for (int64_t stop = block; stop > 0; stop -= 64) {  // 64 rows; `low` has their first cells in the word
        const int64_t begin = (block - stop) / 64 + word;
        const uint64_t low = diagonals[begin], high = diagonals[begin + 1] << 1;
        for (int64_t n = std::max<int64_t>(64 - stop, 0); n < 64; ++n) {
          mask[(stop - 64 + n) * words + word] = low >> (63 - n) | high << n;
        }
      }
    }
  }

  int64_t block_q_, words_;
  const MaskClasses& looks_;
};

}  // namespace spattn
