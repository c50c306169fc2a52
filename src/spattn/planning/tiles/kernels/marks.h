// A sparse two-level bitmap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spattn {

// A set of few integers in [0, count), iterated in ascending order.
class Marks {
 public:
  explicit Marks(int64_t count) : count_(count), words_(count / 64 + 1), used_(count / 4096 + 1) {}

  void set(int64_t number) {
    words_[number / 64] |= uint64_t{1} << number % 64;
    used_[number / 4096] |= uint64_t{1} << number / 64 % 64;
  }

  // Returns the first element >= `from`, or `count` if there is none.
  int64_t next(int64_t from) const {
    if (from >= count_) return count_;
    int64_t word = from / 64;
    const uint64_t here = words_[word] >> from % 64;
    if (here) return from + __builtin_ctzll(here);
    ++word;
    for (int64_t group = word / 64; group < int64_t(used_.size()); ++group, word = 64 * group) {
      const uint64_t rest = used_[group] >> word % 64;
      if (rest) {
        word += __builtin_ctzll(rest);
        return 64 * word + __builtin_ctzll(words_[word]);
      }
    }
    return count_;
  }

  void clear() {
    for (size_t group = 0; group < used_.size(); ++group) {
      for (; used_[group]; used_[group] &= used_[group] - 1) {
        words_[64 * group + __builtin_ctzll(used_[group])] = 0;
      }
    }
  }

 private:
  int64_t count_;
  std::vector<uint64_t> words_, used_;  // used_: bitmap of the words that are not zero
};

}  // namespace spattn
