// Memory on its way to the second-level cache, a few rows at a time: a burst of prefetches fills the buffers that every
// other miss needs as well, and work waits for it.
#pragma once
#include "pack.h"
#include "tile.h"

namespace spattn {
namespace SPATTN_ISA {

class Ahead {
 public:
  // The rows of a tile, `bytes` bytes each, if they lie in whole lines.
  void add(const Head& head, const Tile& tile, int64_t bytes) {
    if (head.feature < 0 || head.feature > 8) return;
    const char* first = head.data + tile.start * head.position;
    for (int64_t i = 0; i < tile.count[0] * tile.count[1] && count_ < kMost; ++i) {
      const int64_t line = i / tile.count[1] * tile.stride[0] + i % tile.count[1] * tile.stride[1];
      lines_[count_++] = {first + line * head.position, tile.stride[2] * head.position, tile.count[2], bytes};
      rows_ += tile.count[2];
    }
  }

  // Prefetches one of `shares` equal shares of all rows.
  void run(int64_t shares) {
    for (int64_t left = (rows_ + shares - 1) / shares; left > 0 && done_ < count_;) {
      Line& line = lines_[done_];
      const int64_t rows = line.count < left ? line.count : left;
      const char* row = line.row;
      for (int64_t i = 0; i < rows; ++i, row += line.stride) {
        for (int64_t at = 0; at < line.bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
      }
      left -= rows;
      line.row = row;
      if ((line.count -= rows) == 0) ++done_;
    }
  }

 private:
  struct Line {
    const char* row;
    int64_t stride, count, bytes;  // from row to row, how many, of a row
  };
  static constexpr int kMost = 64;  // what does not fit is not waited for either
  int count_ = 0, done_ = 0;
  int64_t rows_ = 0;
  Line lines_[kMost];
};

}  // namespace SPATTN_ISA
}  // namespace spattn
