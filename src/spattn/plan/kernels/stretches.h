// Key tiles beside each other that look alike, in lists that are merged.
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

// A list that is written anew for each query tile. Behind the last stretch stand two from kEnd on.
class StretchList {
 public:
  StretchList() : room_(2, kLastStretch) {}

  // Where to write up to `most` of them; end() says where they end.
  Stretch* begin(int64_t most) {
    if (int64_t(room_.size()) < most + 2) room_.resize(most + most / 2 + 2);
    return room_.data();
  }
  void end(Stretch* end) { end[0] = end[1] = kLastStretch, size_ = end - room_.data(); }
  void clear() { end(room_.data()); }

  const Stretch* begin() const { return room_.data(); }
  int64_t size() const { return size_; }
  bool empty() const { return !size_; }

 private:
  std::vector<Stretch> room_;
  int64_t size_ = 0;
};

// What is left of a list.
struct Cursor {
  int32_t first, stop, look;
  const Stretch* at;

  explicit Cursor(const Stretch* list) : at(list) { load(); }
  void next() { ++at, load(); }
  // Goes on if it should, without a guess whether it should.
  void next_if(bool should) {
    const Stretch following = at[1];
    at += should, first = should ? following.first : first, stop = should ? following.stop : stop;
    look = should ? following.look : look;
  }
  // Goes to what is left behind a tile of this stretch.
  void past(int32_t tile) {
    first = tile;
    if (first == stop) next();
  }
  bool at_end() const { return first == kEnd; }

 private:
  void load() { first = at->first, stop = at->stop, look = at->look; }
};

// Writes the stretches of either list in order, at most twice as many as there are, and returns where they end. A stretch
// of one list alone looks as `alone` says of its look and of whether it is of the first list, others as `shared` says of
// both looks. Behind each list stand two stretches that begin at kEnd.
template <class Alone, class Shared>
Stretch* either(const Stretch* one, const Stretch* other, const Alone& alone, const Shared& shared, Stretch* at) {
  Cursor a(one), b(other);
  for (;;) {
    const bool of_a = a.first < b.first;
    const int32_t first = of_a ? a.first : b.first, stop = of_a ? a.stop : b.stop, next = of_a ? b.first : a.first;
    const int32_t look = of_a ? a.look : b.look;
    if (stop <= next) {
      if (first == kEnd) return at;
      *at++ = {first, stop, alone(look, of_a)}, a.next_if(of_a), b.next_if(!of_a);
    } else if (first < next) {
      *at++ = {first, next, alone(look, of_a)}, (of_a ? a : b).first = next;
    } else {
      const int32_t end = std::min(a.stop, b.stop);
      *at++ = {first, end, shared(a.look, b.look)}, a.past(end), b.past(end);
    }
  }
}

// Writes what stretches of both lists share.
template <class Joined>
void both(const StretchList& one, const StretchList& other, const Joined& joined, StretchList& list) {
  Cursor a(one.begin()), b(other.begin());
  Stretch* at = list.begin(one.size() + other.size());
  while (!a.at_end() && !b.at_end()) {
    const int32_t first = std::max(a.first, b.first), stop = std::min(a.stop, b.stop);
    if (first < stop) *at++ = {first, stop, joined(a.look, b.look)};
    if (a.stop <= b.stop) {
      a.next();
    } else {
      b.next();
    }
  }
  list.end(at);
}

}  // namespace spattn
