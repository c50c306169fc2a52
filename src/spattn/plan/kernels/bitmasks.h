// Bitmasks by number: each different one has the next number, found by a hash of its words and compared word by word.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

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
    const int64_t before = known_;
    for (int64_t n = 0; n < count; ++n) {
      if (2 * (known_ + 1) > int64_t(places_.size())) grow();
      const uint64_t* mask = masks + n * words;
      for (size_t at = hashes[n] & (places_.size() - 1);; at = (at + 1) & (places_.size() - 1)) {
        Known& own = places_[at];
        if (own.number < 0) {
          fresh[known_ - before] = n;
          own = {hashes[n], int32_t(known_++)};
          numbers[n] = own.number;
          break;
        }
        if (own.hash != hashes[n]) continue;
        const uint64_t* same =
            own.number < before ? stored + own.number * words : masks + fresh[own.number - before] * words;
        if (!memcmp(same, mask, 8 * words)) {
          numbers[n] = own.number;
          break;
        }
      }
    }
    return known_ - before;
  }

  int64_t known() const { return known_; }

 private:
  struct Known {
    uint64_t hash;
    int32_t number;
  };

  void grow() {
    std::vector<Known> before(std::max<size_t>(64, 2 * places_.size()), Known{0, -1});
    before.swap(places_);
    for (const Known& own : before) {
      if (own.number < 0) continue;
      size_t at = own.hash & (places_.size() - 1);
      while (places_[at].number >= 0) at = (at + 1) & (places_.size() - 1);
      places_[at] = own;
    }
  }

  std::vector<Known> places_;
  int64_t known_ = 0;
};

}  // namespace spattn
