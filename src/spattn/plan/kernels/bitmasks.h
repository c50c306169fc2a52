// Bitmasks by number: each different one has the next number, found by a hash of its words and compared word by word.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.h"

namespace spattn {

// Words [first, stop) of a bitmask.
struct Part {
  int64_t first, stop;
};

// The rows that are true, each of so many words.
inline std::vector<Part> parts_of(const uint8_t* rows, int64_t count, int64_t words) {
  std::vector<Part> parts;
  for (int64_t row = 0; row < count; ++row) {
    if (!rows[row]) continue;
    if (parts.empty() || parts.back().stop < row * words) parts.push_back({row * words, row * words});
    parts.back().stop += words;
  }
  return parts;
}

// A number of 64 bits for the words of some parts. Products lose no bit of a word, because the factors are odd, but move
// it up: bits are mixed down before and after.
inline uint64_t hash_of(const uint64_t* mask, const std::vector<Part>& parts) {
  constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u;
  uint64_t even = 0, odd = kFactor;
  for (const Part& part : parts) {
    for (int64_t n = part.first; n + 1 < part.stop; n += 2) {  // two chains of products at once
      even = (even ^ mask[n]) * kFactor, odd = (odd ^ mask[n + 1]) * kFactor;
      even ^= even >> 32, odd ^= odd >> 32;
    }
    if ((part.stop - part.first) % 2) even = (even ^ mask[part.stop - 1]) * kFactor, even ^= even >> 32;
  }
  even = (even ^ odd >> 29 ^ odd << 35) * kFactor;
  return even ^ even >> 32;
}

inline bool alike(const uint64_t* one, const uint64_t* other, const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (memcmp(one + part.first, other + part.first, 8 * (part.stop - part.first))) return false;
  }
  return true;
}

class BitmaskNumbers {
 public:
  // The number of each of `count` bitmasks with these hashes; `stored` has those that were new in calls before. Writes
  // which of the masks are new; returns how many.
  int64_t number(const uint64_t* hashes, const uint64_t* masks, int64_t count, int64_t words, const uint64_t* stored,
                 int32_t* numbers, int64_t* fresh) {
    const int64_t before = numbers_.known();
    for (int64_t n = 0; n < count; ++n) {
      const int64_t known = numbers_.known();
      numbers[n] = numbers_.number(hashes[n], [&](int32_t own) {
        const uint64_t* same = own < before ? stored + own * words : masks + fresh[own - before] * words;
        return !memcmp(same, masks + n * words, 8 * words);
      });
      if (numbers[n] == known) fresh[known - before] = n;
    }
    return numbers_.known() - before;
  }

  int64_t known() const { return numbers_.known(); }

 private:
  HashedNumbers numbers_;
};

// For each of `count` bitmasks the first one whose words in these parts are the same: of `known` stored ones, or else of
// the masks themselves, which are numbered from `known` on. `hashes` are of the parts, of all of both.
inline void find_first_alike(const uint64_t* hashes, const uint64_t* stored, int64_t known, const uint64_t* masks,
                             int64_t count, int64_t words, const std::vector<Part>& parts, int64_t* found) {
  HashedNumbers numbers;
  std::vector<int64_t> first;
  const auto mask = [=](int64_t n) { return n < known ? stored + n * words : masks + (n - known) * words; };
  for (int64_t n = 0; n < known + count; ++n) {
    const int32_t number =
        numbers.number(hashes[n], [&](int32_t own) { return alike(mask(first[own]), mask(n), parts); });
    if (number == int64_t(first.size())) first.push_back(n);
    if (n >= known) found[n - known] = first[number];
  }
}

}  // namespace spattn
