// The bitmask of a partial tile: queries by keys.
#pragma once
#include "kernels.h"
#include "scratch.h"

namespace spattn {
namespace SPATTN_ISA {

struct Mask {
  const uint64_t* bits;   // (rows, words); null: every pair is allowed
  int64_t rows, words;

  Mask(const Plan& plan, int64_t entry)
      : bits(plan.mask[entry] < 0 ? nullptr : plan.masks + plan.mask[entry] * plan.block_q * (plan.block_kv / 64)),
        rows(plan.block_q),
        words(plan.block_kv / 64) {}

  explicit operator bool() const { return bits != nullptr; }

  bool allows(int64_t row, int64_t key) const { return bits[row * words + key / 64] >> (key % 64) & 1; }

  // Word `word` of the rows [row, row + count), as far as they exist, or-ed.
  uint64_t merged(int64_t row, int64_t count, int64_t word) const {
    const int64_t end = row + count < rows ? row + count : rows;
    uint64_t found = 0;
    for (; row < end; ++row) found |= bits[row * words + word];
    return found;
  }

  // May any of the `count` queries attend to any of the `width` keys, which lie in one word?
  bool any(int64_t row, int64_t count, int64_t key, int width) const {
    return merged(row, count, key / 64) >> (key % 64) & ((uint64_t(1) << width) - 1);
  }

  // Narrows the keys [begin, end) to those from the first to the last that any of the `count` queries attends to.
  void reach(int64_t row, int64_t count, int64_t& begin, int64_t& end) const {
    int64_t first = end, last = begin;
    for (int64_t word = words - 1; word >= 0; --word) {
      const uint64_t found = merged(row, count, word);
      if (!found) continue;
      first = word * 64 + __builtin_ctzll(found);
      if (last == begin) last = word * 64 + 64 - __builtin_clzll(found);
    }
    if (first > begin) begin = first;  // rows that are padding hold anything
    if (last < end) end = last;
    if (begin > end) begin = end;
  }

  // May the query attend to any of the `width` keys? They may lie in two words.
  bool any_of(int64_t row, int64_t key, int width) const {
    const uint64_t* word = bits + row * words + key / 64;
    const int64_t shift = key % 64;
    uint64_t found = *word >> shift;
    if (shift + width > 64) found |= word[1] << (64 - shift);
    return found & ((uint64_t(1) << width) - 1);
  }

  // Narrows the queries [begin, end) to those from the first to the last that attend to any of the `width` keys.
  void reach_queries(int64_t key, int width, int64_t& begin, int64_t& end) const {
    while (begin < end && !any_of(begin, key, width)) ++begin;
    while (begin < end && !any_of(end - 1, key, width)) --end;
  }
};

// s.allowed[w][r] = the w-th piece, as wide as a lane, of row r; s.reached.
template <class T> void unpack(const Mask& mask, int64_t cells, Scratch<T>& s) {
  constexpr int64_t kBits = 8 * sizeof(T), kPieces = 64 / kBits;
  for (int64_t word = 0; word < mask.words; ++word) {
    for (int64_t piece = 0; piece < kPieces; ++piece) {
      Word<T>* out = s.allowed + (word * kPieces + piece) * s.ld_query;
      Word<T>* reached = s.reached + (word * kPieces + piece) * s.ld_query / kLanes<T>;
      for (int64_t first = 0; first < cells; first += kLanes<T>, ++reached) {
        const int64_t end = first + kLanes<T> < cells ? first + kLanes<T> : cells;
        *reached = 0;
        for (int64_t r = first; r < end; ++r) {
          out[r] = Word<T>(mask.bits[r * mask.words + word] >> (piece * kBits));
          *reached |= out[r];
        }
      }
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
