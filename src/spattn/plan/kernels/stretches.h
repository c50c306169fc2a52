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

// A list that is written anew for each query tile. Behind the last stretch stands one from kEnd on.
class StretchList {
 public:
  StretchList() : room_(1, kLast) {}

  // Where to write up to `most` of them; end() says where they end.
  Stretch* begin(int64_t most) {
    if (int64_t(room_.size()) <= most) room_.resize(most + most / 2 + 1);
    return room_.data();
  }
  void end(Stretch* end) { *end = kLast, size_ = end - room_.data(); }
  void clear() { end(room_.data()); }

  const Stretch* begin() const { return room_.data(); }
  int64_t size() const { return size_; }
  bool empty() const { return !size_; }

 private:
  static constexpr Stretch kLast{kEnd, kEnd, 0};

  std::vector<Stretch> room_;
  int64_t size_ = 0;
};

// What is left of a list.
struct Cursor {
  int32_t first, stop, look;
  const Stretch* at;

  explicit Cursor(const StretchList& list) : at(list.begin()) { load(); }
  void next() { ++at, load(); }
  // Goes to what is left behind a tile of this stretch.
  void past(int32_t tile) {
    first = tile;
    if (first == stop) next();
  }
  bool at_end() const { return first == kEnd; }

 private:
  void load() { first = at->first, stop = at->stop, look = at->look; }
};

// Writes the stretches of either list in order; where both have one it looks as `joined` says.
template <class Joined>
void either(const StretchList& one, const StretchList& other, const Joined& joined, StretchList& list) {
  Cursor a(one), b(other);
  Stretch* at = list.begin(2 * (one.size() + other.size()));
  for (;;) {
    if (a.stop <= b.first) {
      if (a.at_end()) break;
      *at++ = {a.first, a.stop, a.look}, a.next();
    } else if (b.stop <= a.first) {
      *at++ = {b.first, b.stop, b.look}, b.next();
    } else if (a.first < b.first) {
      *at++ = {a.first, b.first, a.look}, a.past(b.first);
    } else if (b.first < a.first) {
      *at++ = {b.first, a.first, b.look}, b.past(a.first);
    } else {
      const int32_t stop = std::min(a.stop, b.stop);
      *at++ = {a.first, stop, joined(a.look, b.look)}, a.past(stop), b.past(stop);
    }
  }
  list.end(at);
}

// Writes what stretches of both lists share.
template <class Joined>
void both(const StretchList& one, const StretchList& other, const Joined& joined, StretchList& list) {
  Cursor a(one), b(other);
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
