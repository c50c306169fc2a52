// Converts the mask bits of a query's tiles to positions of allowed keys, chunk by chunk.
#pragma once
#include "decode/rows.h"
#include "kernels.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// True if the plan has one-query tiles.
inline bool by_pairs(const Call& call) { return call.plan.block_q == 1; }

// Positions of up to block_kv keys.
struct Chunk {
  static constexpr int64_t kStep = 4;  // positions written per iteration
  static_assert(kStep <= kSoon, "there is room for a whole step");

  int64_t most;
  int64_t *position, *cells;  // (most + kSoon); (block_kv): positions of a tile whose keys are not evenly spaced

  Chunk(const Call& call, int64_t* cells, Arena& arena)
      : most(call.plan.block_kv), position(arena.array<int64_t>(most + kSoon)), cells(cells) {}

  // Appends place(i) for each set bit i, kStep at a time, because branches on the popcount are hard to predict.
  template <class Place> SPATTN_INLINE void append(uint64_t bits, int64_t& count, const Place& place) const {
    int64_t* to = position + count;
    count += __builtin_popcountll(bits);
    for (; bits; to += kStep) {
      SPATTN_UNROLL
      for (int i = 0; i < kStep; ++i, bits &= bits - 1) to[i] = place(__builtin_ctzll(bits | uint64_t(1) << 63));
    }
  }
};

// Fills the chunk with the positions of the allowed keys of the item's single row and calls visit(count), repeatedly.
// Copies of the last position pad the chunk to a multiple of `lanes`, plus kSoon.
template <class Visit> void each_chunk(const Item& item, const Chunk& chunk, int64_t lanes, const Visit& visit) {
  const Plan plan = item.call.plan;  // a copy, which the stores to position[] cannot alias
  const View* views = plan.views + item.component().key_view;
  const int64_t words = plan.block_kv / 64;
  int64_t count = 0;
  const auto leave = [&] {
    if (!count) return;
    for (int64_t i = count; i < round_up(count, lanes) + kSoon; ++i) chunk.position[i] = chunk.position[count - 1];
    visit(count);
    count = 0;
  };
  Listed at = item.first();
  for (const int64_t end = item.work.end; at.number < end;
       at.tile = plan.indices[at.number < end ? ++at.run : at.run]) {
    const View& view = views[plan.key_view[at.run]];
    const uint64_t* mask = plan.mask[at.run] < 0 ? nullptr : plan.masks + plan.mask[at.run] * words;
    const bool line = view.box[2] == plan.block_kv && view.tiles == view.grid[2] && !plan.kv_order;
    const int64_t step = view.stride[2], run_end = plan.tile_indptr[at.run + 1];
    for (; at.number < (run_end < end ? run_end : end); ++at.number, ++at.tile) {
      const int64_t start = view.offset + at.tile * view.box[2] * step;
      if (!line) list_positions(item.key_tile(at), chunk.cells);
      for (int64_t word = 0; word < words; ++word) {
        const uint64_t bits = mask ? mask[word] : ~uint64_t(0);
        if (count + __builtin_popcountll(bits) > chunk.most) leave();
        if (line) {
          chunk.append(bits, count, [&](int64_t bit) { return start + (word * 64 + bit) * step; });
        } else {
          chunk.append(bits, count, [&](int64_t bit) { return chunk.cells[word * 64 + bit]; });
        }
      }
    }
  }
  leave();
}

}  // namespace SPATTN_ISA
}  // namespace spattn
