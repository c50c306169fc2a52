// The bitmask of a partial tile: queries by keys.
#pragma once
#include "kernels.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Keys of a tile.
struct Keys {
  int64_t begin, end;

  // As bits of word `word` of a row of a mask.
  uint64_t in_word(int64_t word) const {
    const int64_t from = begin - word * 64, to = end - word * 64;
    const uint64_t before_end = to < 64 ? (uint64_t(1) << to) - 1 : ~uint64_t(0);
    return from > 0 ? before_end >> from << from : before_end;
  }

  // Takes in the keys that `bits` of word `word` of a mask stand for.
  void cover(int64_t word, uint64_t bits) {
    if (!bits) return;
    const int64_t first = word * 64 + __builtin_ctzll(bits), last = word * 64 + 64 - __builtin_clzll(bits);
    begin = first < begin ? first : begin;
    end = last > end ? last : end;
  }

  // Those of `range` among them: rows that are padding hold anything.
  Keys within(const Keys& range) const {
    const Keys both = {begin > range.begin ? begin : range.begin, end < range.end ? end : range.end};
    return both.begin < both.end ? both : Keys{both.end, both.end};
  }

  // Calls visit(key) for each, or for each pair of neighbours with visit(key / 2).
  template <int kTerms, class Visit> SPATTN_INLINE void each(const Visit& visit) const {
    for (int64_t key = begin / kTerms; key < (end + kTerms - 1) / kTerms; ++key) visit(key);
  }
};

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
    Keys keys = {end, begin};
    for (int64_t word = 0; word < words; ++word) keys.cover(word, merged(row, count, word));
    keys = keys.within({begin, end});
    begin = keys.begin, end = keys.end;
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

// s.allowed[w][r] = the w-th piece, as wide as a lane, of row r; s.reached. Returns the keys, among the first `count`, from
// the first to the last that any of the `cells` queries attends to.
template <class T> Keys unpack(const Mask& mask, int64_t cells, int64_t count, Scratch<T>& s) {
  constexpr int64_t L = kLanes<T>, kBits = 8 * sizeof(T), kPieces = 64 / kBits;
  Keys keys = {count, 0};
  for (int64_t word = 0; word < mask.words; ++word) {
    uint64_t found = 0;
    for (int64_t first = 0; first < cells; first += L) {
      const int64_t at = word * kPieces * s.ld_query + first;
      uint64_t any = 0;
      for (int64_t r = 0; r < L && first + r < cells; ++r) {
        const uint64_t bits = mask.bits[(first + r) * mask.words + word];
        for (int p = 0; p < kPieces; ++p) s.allowed[at + p * s.ld_query + r] = Word<T>(bits >> (p * kBits));
        any |= bits;
      }
      for (int p = 0; p < kPieces; ++p) s.reached[(at + p * s.ld_query) / L] = Word<T>(any >> (p * kBits));
      found |= any;
    }
    keys.cover(word, found);
  }
  return keys.within({0, count});
}

}  // namespace SPATTN_ISA
}  // namespace spattn
