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

// Positions of keys, as many as a tile has cells.
struct Chunk {
  int64_t most;
  int64_t *position, *cells;  // (most); of the cells of a tile that are not evenly spaced

  Chunk(const Call& call, int64_t* cells, Arena& arena)
      : most(call.plan.block_kv), position(arena.array<int64_t>(most)), cells(cells) {}
};

// visit(count) whenever the chunk holds the positions of `count` more of the keys that the item's only row may attend
// to. Repeats of the last one fill it up to a multiple of `lanes`.
template <class Visit> void each_chunk(const Item& item, const Chunk& chunk, int64_t lanes, const Visit& visit) {
  int64_t count = 0;
  const auto leave = [&] {
    for (int64_t i = count; i < round_up(count, lanes); ++i) chunk.position[i] = chunk.position[count - 1];
    if (count) visit(count);
    count = 0;
  };
  for (Listed at = item.first(); at.number < item.work.end; at = item.after(at)) {
    const Tile tile = item.key_tile(at);
    const Mask mask = item.mask(at);
    const bool even = tile.even();
    if (!even) list_positions(tile, chunk.cells);
    for (int64_t word = 0; word < mask.words; ++word) {
      uint64_t bits = mask ? mask.bits[word] : ~uint64_t(0);
      if (count + __builtin_popcountll(bits) > chunk.most) leave();
      for (; bits; bits &= bits - 1) {
        const int64_t cell = word * 64 + __builtin_ctzll(bits);
        chunk.position[count++] = even ? tile.start + cell * tile.stride[2] : chunk.cells[cell];
      }
    }
  }
  leave();
}

// Rows of K or V in memory, anywhere.
struct ScatteredRows {
  const char* data;
  const int64_t* position;
  int64_t stride;  // bytes

  SPATTN_INLINE const char* row(int64_t key) const { return data + position[key] * stride; }
  SPATTN_INLINE void prefetch(int64_t, int) const {}  // lists are too short to be ahead of
};

// visit(element type, rows) of the first `count` keys of a chunk: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_keys(const Head& head, const Chunk& chunk, int64_t count, int64_t width, int64_t ld,
                              typename E::Compute* copy, const Visit& visit) {
  if (width == ld && head.feature == int64_t(sizeof(typename E::Storage))) {
    visit(E{}, ScatteredRows{head.data, chunk.position, head.position});
  } else {
    gather_positions<E>(head, chunk.position, count, count, width, ld, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
