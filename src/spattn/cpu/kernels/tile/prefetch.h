// Prefetches operands of the next item during this one, little by little: a burst would fill the line-fill buffers and
// stall other loads.
#pragma once
#include "kernels.h"
#include "tile/item.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

class Ahead {
 public:
  // Lists the rows to prefetch: the output rows of the item, the next query tile and, with `with_keys`, the key tile
  // after the last one of the item. Elements have `size` bytes.
  Ahead(const Item& item, int64_t size, bool with_keys) {
    const Call& call = item.call;
    const Work& work = item.work;
    if (call.plan.q_order) return;  // rows are scattered
    const View& rows = call.plan.views[item.component().query_view];
    if (work.slot < 0) add(Head(call.out, item.batch, item.head), rows, work.query_tile, call.head_dim_v * size);
    add(item.queries(), rows, work.query_tile + 1, call.head_dim * size);
    if (work.begin == work.end || !with_keys) return;
    const Listed last = item.last();
    const View& columns = call.plan.views[item.key_view(last)];
    const int64_t next = last.tile + 1;
    add(item.keys(), columns, next, call.head_dim * size);
    add(item.values(), columns, next, call.head_dim_v * size);
  }

  // Prefetches the next 1 / `shares` of the listed rows.
  void run(int64_t shares) {
    for (int64_t left = (rows_ + shares - 1) / shares; left > 0 && done_ < count_;) {
      Run& run = runs_[done_];
      const int64_t rows = run.rows < left ? run.rows : left;
      const char* row = run.row;
      for (int64_t i = 0; i < rows; ++i, row += run.stride) {
        for (int64_t at = 0; at < run.bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
      }
      left -= rows;
      run.row = row;
      if ((run.rows -= rows) == 0) ++done_;
    }
  }

 private:
  struct Run {
    const char* row;
    int64_t stride, rows, bytes;  // stride in bytes, number of rows, bytes per row
  };

  // Lists the rows of tile `number` if it exists and the features are contiguous.
  void add(const Head& head, const View& view, int64_t number, int64_t bytes) {
    if (number >= view.tiles || head.feature < 0 || head.feature > 8) return;
    const Tile tile = locate(view, number, nullptr);
    for (int64_t i = 0; i < tile.count[0] * tile.count[1] && count_ < kMost; ++i) {
      const int64_t first = tile.start + i / tile.count[1] * tile.stride[0] + i % tile.count[1] * tile.stride[1];
      runs_[count_++] = {head.data + first * head.position, tile.stride[2] * head.position, tile.count[2], bytes};
      rows_ += tile.count[2];
    }
  }

  static constexpr int kMost = 64;  // maximum number of runs; the rest is not prefetched
  int count_ = 0, done_ = 0;
  int64_t rows_ = 0;
  Run runs_[kMost];
};

}  // namespace SPATTN_ISA
}  // namespace spattn
