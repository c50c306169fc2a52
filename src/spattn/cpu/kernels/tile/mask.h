// Bitmask of a partial tile, (queries, keys), and the ranges of queries and keys that contain allowed pairs.
#pragma once
#include "kernels.h"
#include "simd/blocking.h"
#include "simd/vec.h"
#include "tile/arena.h"

namespace spattn {
namespace SPATTN_ISA {

// A half-open range of keys in a tile.
struct Keys {
  int64_t begin, end;

  // Returns the range as a bitmask for word `word` of a mask row.
  uint64_t in_word(int64_t word) const {
    const int64_t from = begin - word * 64, to = end - word * 64;
    const uint64_t before_end = to < 64 ? (uint64_t(1) << to) - 1 : ~uint64_t(0);
    return from > 0 ? before_end >> from << from : before_end;
  }

  // Extends the range to the keys that are set in `bits`, word `word` of a mask row.
  void cover(int64_t word, uint64_t bits) {
    if (!bits) return;
    const int64_t first = word * 64 + __builtin_ctzll(bits), last = word * 64 + 64 - __builtin_clzll(bits);
    begin = first < begin ? first : begin;
    end = last > end ? last : end;
  }

  // Returns the intersection with `range`. Masks have arbitrary bits in padding rows, so a range may need clipping.
  Keys within(const Keys& range) const {
    const Keys both = {begin > range.begin ? begin : range.begin, end < range.end ? end : range.end};
    return both.begin < both.end ? both : Keys{both.end, both.end};
  }

  // Calls visit(key / kTerms) for each group of kTerms adjacent keys.
  template <int kTerms, class Visit> SPATTN_INLINE void each(const Visit& visit) const {
    for (int64_t key = begin / kTerms; key < (end + kTerms - 1) / kTerms; ++key) visit(key);
  }
};

struct Mask {
  const uint64_t* bits;  // (rows, words); null: full tile
  int64_t rows, words;

  Mask() : bits(nullptr), rows(0), words(0) {}
  Mask(const Plan& plan, int64_t run)
      : bits(plan.mask[run] < 0 ? nullptr : plan.masks + plan.mask[run] * plan.block_q * (plan.block_kv / 64)),
        rows(plan.block_q), words(plan.block_kv / 64) {}

  explicit operator bool() const { return bits != nullptr; }

  bool allows(int64_t row, int64_t key) const { return bits[row * words + key / 64] >> (key % 64) & 1; }

  // Returns the bitwise or of word `word` of rows [row, row + count), clipped to the mask's rows.
  uint64_t merged(int64_t row, int64_t count, int64_t word) const {
    const int64_t end = row + count < rows ? row + count : rows;
    uint64_t found = 0;
    for (; row < end; ++row) found |= bits[row * words + word];
    return found;
  }

  // Narrows [begin, end) to the range of keys to which any of the `count` queries from `row` on attends.
  void reach(int64_t row, int64_t count, int64_t& begin, int64_t& end) const {
    Keys keys = {end, begin};
    for (int64_t word = 0; word < words; ++word) keys.cover(word, merged(row, count, word));
    keys = keys.within({begin, end});
    begin = keys.begin, end = keys.end;
  }

  // True if query `row` attends to any of the `width` keys from `key` on, which may span two words.
  bool any_of(int64_t row, int64_t key, int width) const {
    const uint64_t* word = bits + row * words + key / 64;
    const int64_t shift = key % 64;
    uint64_t found = *word >> shift;
    if (shift + width > 64) found |= word[1] << (64 - shift);
    return found & ((uint64_t(1) << width) - 1);
  }

  // Narrows [begin, end) to the range of queries that attend to any of the `width` keys from `key` on.
  void reach_queries(int64_t key, int width, int64_t& begin, int64_t& end) const {
    while (begin < end && !any_of(begin, key, width)) ++begin;
    while (begin < end && !any_of(end - 1, key, width)) --end;
  }
};

// A mask transposed for kernels with one query per lane: each lane of a vector holds a word of one query.
template <class T> struct LaneMask {
  static constexpr int64_t kBits = 8 * sizeof(T);
  int64_t ld;
  Word<T>* allowed;  // (block_kv / kBits, ld): mask words
  Word<T>* reached;  // (block_kv / kBits, ld / lanes): bitwise or of the words in a vector

  LaneMask(const Call& call, int64_t ld, Arena& arena)
      : ld(ld), allowed(arena.array<Word<T>>(call.plan.block_kv / kBits * ld)),
        reached(arena.array<Word<T>>(call.plan.block_kv / kBits * ld / kLanes<T>)) {}

  // Returns a vector with nonzero lanes where the query, from `column` on, attends to `key`.
  SPATTN_INLINE BitsVec<T> bit(int64_t key, int64_t column) const {
    return load<BitsVec<T>>(allowed + key / kBits * ld + column) & splat_bits<T>(Word<T>(1) << key % kBits);
  }

  // True if any query of the vector from `column` on attends to any of the kKeyRows keys from `key` on.
  bool reaches(int64_t column, int64_t key) const {
    const Word<T> found = reached[(key / kBits * ld + column) / kLanes<T>];
    return found >> (key % kBits) & ((Word<T>(1) << kKeyRows) - 1);
  }

  // Calls run(Count<N>, key, column) for each block of kKeyRows keys by N <= kQueryVectors vectors of queries. If
  // `masked`, leaves out leading and trailing vectors without an allowed pair and calls mark(key, column) for their
  // keys.
  template <class Mark, class Run>
  SPATTN_INLINE void each_block(Keys keys, int64_t vectors, bool masked, const Mark& mark, const Run& run) const {
    constexpr int64_t L = kLanes<T>, W = kQueryVectors;
    for (int64_t first = 0; first < vectors; first += W) {
      for (int64_t key = keys.begin; key < keys.end; key += kKeyRows) {
        int64_t column = first * L, active = vectors - first < W ? vectors - first : W;
        const auto idle = [&](int64_t at) {
          if (reaches(at, key)) return false;
          for (int i = 0; i < kKeyRows; ++i) mark(key + i, at);
          return true;
        };
        for (; masked && active && idle(column); --active) column += L;
        while (masked && active && idle(column + (active - 1) * L)) --active;
        static_assert(W == 3, "one case per width");
        if (active == 3) run(Count<3>{}, key, column);
        if (active == 2) run(Count<2>{}, key, column);
        if (active == 1) run(Count<1>{}, key, column);
      }
    }
  }

  // Transposes the mask rows of `cells` queries; returns the range, within [0, count), of keys to which any attends.
  Keys expand(const Mask& mask, int64_t cells, int64_t count) {
    constexpr int64_t L = kLanes<T>, kPieces = 64 / kBits;
    Keys keys = {count, 0};
    for (int64_t word = 0; word < mask.words; ++word) {
      uint64_t found = 0;
      for (int64_t first = 0; first < cells; first += L) {
        const int64_t at = word * kPieces * ld + first;
        uint64_t any = 0;
        for (int64_t r = 0; r < L && first + r < cells; ++r) {
          const uint64_t bits = mask.bits[(first + r) * mask.words + word];
          for (int p = 0; p < kPieces; ++p) allowed[at + p * ld + r] = Word<T>(bits >> (p * kBits));
          any |= bits;
        }
        for (int p = 0; p < kPieces; ++p) reached[(at + p * ld) / L] = Word<T>(any >> (p * kBits));
        found |= any;
      }
      keys.cover(word, found);
    }
    return keys.within({0, count});
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
