// Equivalence classes of tiles, each with a compact descriptor; equal descriptors are stored once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace spattn {

enum class MaskClass : int32_t { kRows, kDiagonal, kEither, kBoth };

constexpr int32_t kWhole = 0;  // the class of full tiles, which has no descriptor

// A descriptor is a header word (kind and number of words), followed by
//   kRows      pairs (first row, bitmask of keys), each valid up to the next first row;
//   kDiagonal  one bit for each distance: if bit n is set, the last query has key n, and the query r rows before it has
//              key n - r. The bits do not depend on the tile's position;
//   kEither    two classes, a kRows and a kDiagonal: the union of their cells;
//   kBoth      two classes: the intersection of their cells.
class MaskClasses {
 public:
  // Returns storage for up to `count` words of a descriptor after its header.
  uint64_t* next(size_t count) {
    if (formula_.size() <= count) formula_.resize(count + 1);
    return formula_.data() + 1;
  }

  // Inserts the descriptor in next() and returns its class, or returns the class of an equal descriptor.
  int32_t number(MaskClass of, size_t count) {
    formula_[0] = uint64_t(count) << 32 | uint64_t(of), ++count;
    while (factors_.size() < count) factors_.push_back(factors_.empty() ? kFactor : kFactor * factors_.back());
    uint64_t hash = 0;
    for (size_t n = 0; n < count; ++n) hash += formula_[n] * factors_[n];
    hash = (hash ^ hash >> 32) * kFactor, hash ^= hash >> 32;
    const int32_t number = 1 + numbers_.number(hash, [&](int32_t known) {
      // For so few words an inline loop is faster than memcmp.
      const uint64_t* own = words_.data() + ends_[known];
      size_t same = 0;
      while (same < count && own[same] == formula_[same]) ++same;
      return same == count;
    });
    if (number == size()) {
      words_.insert(words_.end(), formula_.data(), formula_.data() + count);
      ends_.push_back(words_.size());
    }
    return number;
  }

  int32_t pair(MaskClass of, int32_t one, int32_t other) {
    uint64_t* const words = next(2);
    words[0] = uint64_t(one), words[1] = uint64_t(other);
    return number(of, 2);
  }

  MaskClass kind(int32_t number) const { return MaskClass(uint32_t(words_[ends_[number - 1]])); }
  // The words after the header are [begin, end).
  const uint64_t* begin(int32_t number) const { return words_.data() + ends_[number - 1] + 1; }
  const uint64_t* end(int32_t number) const { return words_.data() + ends_[number]; }
  // Returns the number of classes, including kWhole.
  int64_t size() const { return int64_t(ends_.size()); }

 private:
  static constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u;  // odd, so that its powers are odd too

  HashedNumbers numbers_;
  std::vector<uint64_t> formula_, words_, factors_;
  std::vector<size_t> ends_{0};
};

}  // namespace spattn
