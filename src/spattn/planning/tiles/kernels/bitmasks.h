// A table of distinct bitmasks, which are found by hash, compared word by word and indexed in order of insertion.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "growing.h"
#include "numbers.h"

namespace spattn {

// Words [first, stop) of a bitmask.
struct Part {
  int64_t first, stop;
};

// Returns the words of the rows that are true in `rows`, as parts; a row has `words` words.
inline std::vector<Part> parts_of(const uint8_t* rows, int64_t count, int64_t words) {
  std::vector<Part> parts;
  for (int64_t row = 0; row < count; ++row) {
    if (!rows[row]) continue;
    if (parts.empty() || parts.back().stop < row * words) parts.push_back({row * words, row * words});
    parts.back().stop += words;
  }
  return parts;
}

// Returns a 64-bit hash of the words in some parts. Multiplication by an odd factor is invertible but moves bits up
// only, so each step then folds the high bits down.
inline uint64_t hash_of(const uint64_t* mask, const std::vector<Part>& parts) {
  constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u;
  const auto mix = [](uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * kFactor;
    return hash ^ hash >> 32;
  };
  constexpr int kChains = 8;  // independent products hide the latency of multiplication
  uint64_t chains[kChains];
  for (int n = 0; n < kChains; ++n) chains[n] = n * kFactor;
  for (const Part& part : parts) {
    const uint64_t* at = mask + part.first;
    const uint64_t* const stop = mask + part.stop;
    for (; stop - at >= kChains; at += kChains) {
      for (int n = 0; n < kChains; ++n) chains[n] = mix(chains[n], at[n]);
    }
    for (; at < stop; ++at) chains[0] = mix(chains[0], *at);
  }
  for (int left = kChains / 2; left; left /= 2) {
    for (int n = 0; n < left; ++n) chains[n] = mix(chains[n], chains[n + left] << 24 | chains[n + left] >> 40);
  }
  return chains[0];
}

inline bool alike(const uint64_t* one, const uint64_t* other, const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (memcmp(one + part.first, other + part.first, 8 * (part.stop - part.first))) return false;
  }
  return true;
}

// The distinct bitmasks of a plan.
class Bitmasks {
 public:
  // A bitmask has `rows` rows of `words` words. too_many() is true beyond `most` bitmasks.
  Bitmasks(const Memory& memory, int64_t rows, int64_t words, int64_t most)
      : words_(rows * words), row_words_(words), most_(most), whole_{{0, words_}}, masks_(memory) {}

  // Returns storage for the next bitmask.
  uint64_t* next() { return masks_.next(words_); }

  const uint64_t* of(int32_t number) const { return masks_.data() + number * words_; }

  // Inserts the bitmask in next() and returns its index, or returns the index of an equal bitmask.
  int32_t number() {
    const uint64_t* const mask = masks_.next(words_);
    const int32_t number =
        numbers_.number(hash_of(mask, whole_), [&](int32_t known) { return !memcmp(of(known), mask, 8 * words_); });
    if (number == size_) masks_.add(words_), ++size_;
    return number;
  }

  // Returns the index of the first bitmask that agrees in `parts` with the one in next(), or inserts that one.
  int32_t number_alike(const std::vector<Part>& parts) {
    if (!std::equal(parts.begin(), parts.end(), parts_.begin(), parts_.end(), same_part)) {
      parts_ = parts, first_.clear(), alike_ = HashedNumbers();
      compared_ = 0;
    }
    while (compared_ < size()) compare(compared_++);
    masks_.next(words_);
    const int32_t first = compare(size());
    if (first < size()) return first;
    ++compared_;
    return number();
  }

  // Inserts bitmasks until too_many(); compares them in `parts`, or in all words if this is null.
  void add(const uint64_t* masks, int64_t count, const std::vector<Part>* parts, int32_t* numbers) {
    for (int64_t n = 0; n < count && !too_many(); ++n) {
      memcpy(next(), masks + n * words_, 8 * words_);
      numbers[n] = parts ? number_alike(*parts) : number();
    }
  }

  int64_t size() const { return size_; }
  bool too_many() const { return size_ > most_; }
  int64_t words() const { return words_; }
  int64_t row_words() const { return row_words_; }
  void fit() { masks_.fit(); }

 private:
  static bool same_part(const Part& a, const Part& b) { return a.first == b.first && a.stop == b.stop; }

  // Returns the index of the first bitmask that agrees in parts_ with bitmask `number`.
  int32_t compare(int64_t number) {
    const uint64_t* const mask = of(int32_t(number));
    const int32_t kind =
        alike_.number(hash_of(mask, parts_), [&](int32_t known) { return alike(of(first_[known]), mask, parts_); });
    if (kind == int64_t(first_.size())) first_.push_back(int32_t(number));
    return first_[kind];
  }

  int64_t words_, row_words_, most_, size_ = 0;
  std::vector<Part> whole_;
  Growing<uint64_t> masks_;
  HashedNumbers numbers_;
  // Bitmasks that agree in parts_ form a class; first_ has the first one of each. [0, compared_) are classified.
  std::vector<Part> parts_;
  std::vector<int32_t> first_;
  HashedNumbers alike_;
  int64_t compared_ = 0;
};

}  // namespace spattn
