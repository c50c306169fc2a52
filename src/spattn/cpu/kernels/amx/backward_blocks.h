// The blocks of keys that an item of the bfloat16 backward visits, one after the other.
#pragma once
#include "amx/backward_rows.h"
#include "amx/backward_scratch.h"
#include "tile/mask.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// An entry of the list and a block of it.
struct TileBlock {
  Tile place;
  KeyRows keys, values;
  int64_t entry, entry_side;
  int64_t blocks;      // of the entry
  int64_t index, side;
  int64_t begin, end;  // vectors of queries from the first to the last that attends to a key of the block

  int64_t rows() const { return blocks * kTileTerms; }
  bool straight() const { return place.even() && place.cells() == rows(); }  // keys evenly spaced, none of them padding
};

struct TileWalk {
  const Call& call;
  const Component& component;
  const Work& item;
  Head keys, values;
  int64_t vectors;  // of queries
  TileBackwardScratch& s;

  TileWalk(const Call& call, int64_t batch, int64_t head, const Work& item, int64_t cells, TileBackwardScratch& s)
      : call(call), component(call.plan.components[item.component]), item(item),
        keys(call.k, batch, head / call.group), values(call.v, batch, head / call.group),
        vectors((cells + kLanes<float> - 1) / kLanes<float>), s(s) {}

  // Before the first block.
  TileBlock start() const {
    TileBlock block = {};
    block.entry = item.begin - 1;
    return block;
  }

  // The next block with an allowed pair; false after the last one.
  bool advance(TileBlock& block) {
    const int64_t other = 1 - block.entry_side;
    do {
      if (++block.index >= block.blocks) {
        if (++block.entry == item.end) return false;
        open(block, other);
      }
      find_active(block);
    } while (block.begin == block.end);
    block.side = 1 - block.side;
    return true;
  }

 private:
  void open(TileBlock& block, int64_t side) {
    const Plan& plan = call.plan;
    block.place = locate(plan.views[component.key_view + plan.key_view[block.entry]], plan.indices[block.entry]);
    block.entry_side = side;
    block.blocks = (block.place.cells() + kTileTerms - 1) / kTileTerms;
    block.index = 0;
    block.keys = tile_rows(keys, block.place, block.rows(), call.head_dim, s.depth_key, s.key_position,
                           s.key_rows + side * plan.block_kv * s.depth_key);
    block.values = tile_rows(values, block.place, block.rows(), call.head_dim_v, s.depth_value, s.key_position,
                             s.value_rows + side * plan.block_kv * s.depth_value);
  }

  void find_active(TileBlock& block) {
    constexpr int L = kLanes<float>;
    const Mask allowed(call.plan, block.entry);
    const auto idle = [&](int64_t at) {
      return allowed && !allowed.any(at * L, L, block.index * kTileTerms, kTileTerms);
    };
    block.begin = 0, block.end = vectors;
    while (block.begin < block.end && idle(block.begin)) ++block.begin;
    while (block.begin < block.end && idle(block.end - 1)) --block.end;
    s.first_active[block.entry_side * s.blocks + block.index] = block.begin;
    s.last_active[block.entry_side * s.blocks + block.index] = block.end;
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
