// Bitmasks by number: each different one has the next number, found by a hash of its words and compared word by word.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace spattn {

// A number of 64 bits for `words` words. Products lose no bit of a word, because the factors are odd, but move it up:
// bits are mixed down before and after.
inline uint64_t hash_of(const uint64_t* mask, int64_t words) {
  constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u;
  uint64_t even = 0, odd = kFactor;
  for (int64_t n = 0; n + 1 < words; n += 2) {  // two chains of products at once
    even = (even ^ mask[n]) * kFactor, odd = (odd ^ mask[n + 1]) * kFactor;
    even ^= even >> 32, odd ^= odd >> 32;
  }
  if (words % 2) even = (even ^ mask[words - 1]) * kFactor;
  even = (even ^ odd >> 29 ^ odd << 35) * kFactor;
  return even ^ even >> 32;
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

}  // namespace spattn
