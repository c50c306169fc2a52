// The keys that one query may attend to: bits of its tiles, chunk after chunk, and rows of K and V at them.
#pragma once
#include "decode/products.h"
#include "kernels.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Are the tiles of a call's plan lists of keys of one query?
inline bool by_pairs(const Call& call) { return call.plan.block_q == 1; }

// Positions of keys, as many as a tile has cells.
struct Chunk {
  static constexpr int64_t kStep = 4;  // positions that are written at once

  int64_t most;
  int64_t *position, *cells;  // (most + kStep); of the cells of a tile that do not lie on one line

  Chunk(const Call& call, int64_t* cells, Arena& arena)
      : most(call.plan.block_kv), position(arena.array<int64_t>(most + kStep)), cells(cells) {}

  // Appends place(cell) for every bit: in whole steps, because processors do not foresee how many bits a word has.
  template <class Place> SPATTN_INLINE void append(uint64_t bits, int64_t& count, const Place& place) const {
    int64_t* to = position + count;
    count += __builtin_popcountll(bits);
    for (; bits; to += kStep) {
      SPATTN_UNROLL
      for (int i = 0; i < kStep; ++i, bits &= bits - 1) to[i] = place(__builtin_ctzll(bits | uint64_t(1) << 63));
    }
  }
};

// visit(count) whenever the chunk holds the positions of `count` more of the keys that the item's only row may attend
// to. Repeats of the last one fill it up to a multiple of `lanes`.
template <class Visit> void each_chunk(const Item& item, const Chunk& chunk, int64_t lanes, const Visit& visit) {
  const Plan plan = item.call.plan;  // a copy: as far as compilers know, positions could be written over the original
  const View* views = plan.views + item.component().key_view;
  const int64_t words = plan.block_kv / 64;
  int64_t count = 0;
  const auto leave = [&] {
    for (int64_t i = count; i < round_up(count, lanes); ++i) chunk.position[i] = chunk.position[count - 1];
    if (count) visit(count);
    count = 0;
  };
  Listed at = item.first();
  for (const int64_t end = item.work.end; at.number < end;
       at.tile = plan.indices[at.number < end ? ++at.run : at.run]) {
    const View& view = views[plan.key_view[at.run]];
    const uint64_t* mask = plan.mask[at.run] < 0 ? nullptr : plan.masks + plan.mask[at.run] * words;
    const bool line = view.box[2] == plan.block_kv && view.tiles == view.grid[2];
    const int64_t step = view.stride[2], run_end = plan.tile_indptr[at.run + 1];
    for (; at.number < (run_end < end ? run_end : end); ++at.number, ++at.tile) {
      const int64_t start = view.offset + at.tile * view.box[2] * step;
      if (!line) list_positions(locate(view, at.tile), chunk.cells);
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

// Rows at the positions of a chunk that are needed soon.
struct Soon {
  const char* data;
  int64_t stride, bytes;  // from position to position, of a row
};

// Rows of K or V in memory, anywhere; products with them prefetch others at the same positions meanwhile.
struct ScatteredRows {
  const char* data;
  const int64_t* position;
  int64_t stride;  // bytes
  Soon soon;

  SPATTN_INLINE const char* row(int64_t key) const { return data + position[key] * stride; }
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = soon.data + position[first + i] * soon.stride;
      for (int64_t at = 0; at < soon.bytes; at += 64) __builtin_prefetch(row + at);
    }
  }
};

template <class E> Soon read_soon(const Head& head, int64_t width) {
  constexpr int64_t kSize = sizeof(typename E::Storage);
  return {head.data, head.position, head.feature == kSize ? width * kSize : 0};
}

// visit(element type, rows) of the first `count` keys of a chunk: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_keys(const Head& head, const Chunk& chunk, int64_t count, int64_t width, int64_t ld,
                              typename E::Compute* copy, Soon soon, const Visit& visit) {
  if (width == ld && head.feature == int64_t(sizeof(typename E::Storage))) {
    visit(E{}, ScatteredRows{head.data, chunk.position, head.position, soon});
  } else {
    gather_positions<E>(head, chunk.position, count, count, width, ld, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
