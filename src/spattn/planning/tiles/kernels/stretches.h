// Runs of consecutive key tiles of one equivalence class, in sorted lists.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace spattn {

struct Stretch {
  int32_t first, stop, look;  // key tiles [first, stop)
};

constexpr int32_t kEnd = INT32_MAX;
constexpr Stretch kLastStretch{kEnd, kEnd, 0};

// A reusable list of runs, terminated by kLastStretch.
class StretchList {
 public:
  StretchList() : room_(1, kLastStretch) {}

  // Room for up to `most` runs; end() sets the actual end.
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

// Writes the union of two sorted lists, at most twice their total length, and returns its end. Tiles of one list have
// the class alone(look, is_first_list), tiles of both shared(look_a, look_b). Both lists end with kLastStretch.
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

// Writes the intersection of two lists.
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
