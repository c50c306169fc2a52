// Sorted lists of runs; a run has consecutive key tiles of one equivalence class.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace spattn {

struct Stretch {
  int32_t first, stop, look;  // key tiles [first, stop) of class `look`
};

constexpr int32_t kEnd = INT32_MAX;
constexpr Stretch kLastStretch{kEnd, kEnd, 0};

// A reusable list of runs, which kLastStretch terminates.
class StretchList {
 public:
  StretchList() : room_(1, kLastStretch) {}

  // Returns room for up to `most` runs; end() then sets the actual end.
  Stretch* begin(int64_t most) {
    if (int64_t(room_.size()) <= most) room_.resize(most + most / 2 + 1);
    return room_.data();
  }
  void end(Stretch* end) { *end = kLastStretch, size_ = end - room_.data(); }
  void clear() { end(room_.data()); }

  const Stretch* begin() const { return room_.data(); }
  int64_t size() const { return size_; }
  bool empty() const { return !size_; }

 private:
  std::vector<Stretch> room_;
  int64_t size_ = 0;
};

// Writes the union of two lists that end with kLastStretch to `at`, which has room for twice their runs; returns its
// end. A tile in only one list gets class alone(class, is_first_list); a tile in both gets shared(class_a, class_b).
template <class Alone, class Shared>
Stretch* either(const Stretch* a, const Stretch* b, const Alone& alone, const Shared& shared, Stretch* at) {
  int32_t from_a = a->first, from_b = b->first;  // starts of the remaining runs
  for (;;) {
    const bool of_a = from_a < from_b;
    const Stretch& own = of_a ? *a : *b;
    const int32_t first = std::min(from_a, from_b), next = std::max(from_a, from_b);
    if (own.stop <= next) {
      if (first == kEnd) return at;
      *at++ = {first, own.stop, alone(own.look, of_a)};
      if (of_a) {
        from_a = (++a)->first;
      } else {
        from_b = (++b)->first;
      }
    } else {  // both have tiles from `next` on
      if (first < next) *at++ = {first, next, alone(own.look, of_a)};
      from_a = from_b = std::min(a->stop, b->stop);
      *at++ = {next, from_a, shared(a->look, b->look)};
      if (a->stop == from_a) from_a = (++a)->first;
      if (b->stop == from_b) from_b = (++b)->first;
    }
  }
}

// Writes the intersection of two lists; a tile gets class joined(class_a, class_b).
template <class Joined>
void both(const StretchList& one, const StretchList& other, const Joined& joined, StretchList& list) {
  const Stretch *a = one.begin(), *b = other.begin();
  Stretch* at = list.begin(one.size() + other.size());
  while (a->first != kEnd && b->first != kEnd) {
    const int32_t first = std::max(a->first, b->first), stop = std::min(a->stop, b->stop);
    if (first < stop) *at++ = {first, stop, joined(a->look, b->look)};
    if (a->stop <= b->stop) {
      ++a;
    } else {
      ++b;
    }
  }
  list.end(at);
}

}  // namespace spattn
