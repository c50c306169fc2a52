// Count the keys and the tiles of 64 keys of rows of bits.
#pragma once

#include <cstdint>

namespace spattn {

// Tiles in which any row of an owner allows a key, those in which all rows allow all keys, and runs of the latter.
struct TileCounts {
  int64_t tiles, full, full_runs;
};

#define SPATTN_INLINE inline __attribute__((always_inline))

// Returns the first word from `word` on that is not in a group of eight zeros; most words of sparse rows are.
SPATTN_INLINE int64_t after_zeros(const uint64_t* own, int64_t word, int64_t count) {
  for (; word + 8 <= count; word += 8) {
    uint64_t any = 0;
    for (int64_t n = 0; n < 8; ++n) any |= own[word + n];
    if (any) break;
  }
  return word;
}

// Returns the first word behind `word` in which any row allows a key, and the keys that any row and that all rows
// allow; `count` if there is none.
SPATTN_INLINE int64_t next_tile(const uint64_t* own, int64_t rows, int64_t count, int64_t word, uint64_t* any,
                                uint64_t* all) {
  while (++word < count) {
    if (rows == 1 && word % 8 == 0 && (word = after_zeros(own, word, count)) == count) break;
    *any = *all = own[word];
    for (int64_t row = 1; row < rows; ++row) *any |= own[row * count + word], *all &= own[row * count + word];
    if (*any) break;
  }
  return word;
}

SPATTN_INLINE void count_tiles_of_owner(const uint64_t* own, int64_t rows, int64_t count, int64_t* keys,
                                        TileCounts& found) {
  bool before = false;
  int64_t first_keys = 0;
  for (int64_t word = 0; word < count; ++word) {
    if (rows == 1 && word % 8 == 0) {
      const int64_t next = after_zeros(own, word, count);
      if (next != word) before = false;
      if ((word = next) == count) break;
    }
    uint64_t any = own[word], all = any;
    first_keys += __builtin_popcountll(any);
    for (int64_t row = 1; row < rows; ++row) {
      const uint64_t bits = own[row * count + word];
      any |= bits, all &= bits, keys[row] += __builtin_popcountll(bits);
    }
    const bool full = all == ~uint64_t(0);
    found.tiles += any != 0;
    found.full += full;
    found.full_runs += full && !before;
    before = full;
  }
  keys[0] += first_keys;
}

// `words` holds (owners, rows, count) words. Adds the set bits of each row to `keys`, (owners, rows).
SPATTN_INLINE TileCounts count_tiles_of(const uint64_t* words, int64_t owners, int64_t rows, int64_t count,
                                        int64_t* keys) {
  TileCounts found{0, 0, 0};
  for (int64_t owner = 0; owner < owners; ++owner, words += rows * count, keys += rows) {
    if (rows == 1) count_tiles_of_owner(words, 1, count, keys, found);
    else count_tiles_of_owner(words, rows, count, keys, found);
  }
  return found;
}

#ifdef __x86_64__
// Baseline x86-64 has no instruction that counts bits.
__attribute__((target("popcnt"))) inline TileCounts count_tiles_popcnt(const uint64_t* words, int64_t owners,
                                                                       int64_t rows, int64_t count, int64_t* keys) {
  return count_tiles_of(words, owners, rows, count, keys);
}
#endif

inline TileCounts count_tiles(const uint64_t* words, int64_t owners, int64_t rows, int64_t count, int64_t* keys) {
#ifdef __x86_64__
  static const bool counts = __builtin_cpu_supports("popcnt");
  if (counts) return count_tiles_popcnt(words, owners, rows, count, keys);
#endif
  return count_tiles_of(words, owners, rows, count, keys);
}

#undef SPATTN_INLINE

}  // namespace spattn
