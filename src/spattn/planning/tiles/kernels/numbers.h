// A hash table that assigns consecutive indices to values, in order of insertion. The caller stores the values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace spattn {

class HashedNumbers {
 public:
  // Returns the index of the value with this hash for which same(index) is true, or assigns the next index.
  template <class Same> int32_t number(uint64_t whole_hash, const Same& same) {
    const uint32_t hash = uint32_t(whole_hash >> 32);
    if (2 * (size_t(known_) + 1) > places_.size()) grow();
    for (size_t at = hash & (places_.size() - 1);; at = (at + 1) & (places_.size() - 1)) {
      Known& own = places_[at];
      if (own.number < 0) {
        own = {hash, known_};
        return known_++;
      }
      if (own.hash == hash && same(own.number)) return own.number;
    }
  }

  int64_t known() const { return known_; }

 private:
  // 32 bits of the hash suffice to filter comparisons and to address a table of 32-bit indices.
  struct Known {
    uint32_t hash;
    int32_t number;
  };

  void grow() {
    std::vector<Known> before(std::max<size_t>(64, 4 * places_.size()), Known{0, -1});
    before.swap(places_);
    for (const Known& own : before) {
      if (own.number < 0) continue;
      size_t at = own.hash & (places_.size() - 1);
      while (places_[at].number >= 0) at = (at + 1) & (places_.size() - 1);
      places_[at] = own;
    }
  }

  std::vector<Known> places_;
  int32_t known_ = 0;
};

}  // namespace spattn
