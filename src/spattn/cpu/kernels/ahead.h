// Memory on its way to the second-level cache, a few lines at a time: a burst of prefetches fills the buffers that
// every other miss needs as well, and work waits for it.
#pragma once
#include "pack.h"
#include "tile.h"

namespace spattn {
namespace SPATTN_ISA {

class Ahead {
 public:
  // The rows of a tile, `bytes` bytes each, as far as they lie in whole lines.
  void add(const Head& head, const Tile& tile, int64_t bytes) {
    if (count_ == kMost || head.feature < 0 || head.feature > 8) return;
    arrays_[count_++] = {head.data, head.position, bytes, tile};
    lines_ += tile.count[0] * tile.count[1] * tile.count[2] * ((bytes + kLine - 1) / kLine);
  }

  // Prefetches one of `shares` equal shares of all lines.
  void run(int64_t shares) {
    for (int64_t left = (lines_ + shares - 1) / shares; left > 0 && done_ < count_; --left) {
      const Rows& rows = arrays_[done_];
      const Tile& tile = rows.tile;
      const int64_t position = tile.start + at_[0] * tile.stride[0] + at_[1] * tile.stride[1] + at_[2] * tile.stride[2];
      __builtin_prefetch(rows.data + position * rows.stride + byte_, 0, 2);
      if ((byte_ += kLine) < rows.bytes) continue;
      byte_ = 0;
      int axis = 2;
      while (axis >= 0 && ++at_[axis] == tile.count[axis]) at_[axis--] = 0;
      if (axis < 0) ++done_;
    }
  }

 private:
  static constexpr int kMost = 4, kLine = 64;
  struct Rows {
    const char* data;
    int64_t stride, bytes;
    Tile tile;
  };
  Rows arrays_[kMost];
  int count_ = 0, done_ = 0;
  int64_t lines_ = 0, at_[3] = {}, byte_ = 0;
};

}  // namespace SPATTN_ISA
}  // namespace spattn
