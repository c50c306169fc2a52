// A work item of one query head: its operands and its list of key tiles.
#pragma once
#include "kernels.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// A position in a key tile list: index among the tiles of all lists, run of tiles, and tile index in the run's view.
struct Listed {
  int64_t number, run, tile;
};

struct Item {
  const Call& call;
  int64_t batch, head;
  const Work& work;

  int64_t head_kv() const { return head / call.group; }
  // Returns the index of the key-value head among those of all batch entries.
  int64_t kv_number() const { return batch * (call.heads_q / call.group) + head_kv(); }

  Head queries() const { return {call.q, batch, head}; }
  Head keys() const { return {call.k, batch, head_kv()}; }
  Head values() const { return {call.v, batch, head_kv()}; }

  const Component& component() const { return call.plan.components[work.component]; }
  Tile query_tile() const {
    return locate(call.plan.views[component().query_view], work.query_tile, own(call.plan.q_order, call.q_len));
  }
  int64_t key_view(const Listed& at) const { return component().key_view + call.plan.key_view[at.run]; }
  Tile key_tile(const Listed& at) const {
    return locate(call.plan.views[key_view(at)], at.tile, own(call.plan.kv_order, call.kv_len));
  }
  Mask mask(const Listed& at) const { return {call.plan, at.run}; }

  // Return the first and last key tile of the item, and the neighbours of a tile, which may be out of range.
  Listed first() const { return find(work.begin); }
  Listed last() const { return find(work.end - 1); }
  Listed after(Listed at) const {
    ++at.tile;
    if (++at.number < work.end && at.number == call.plan.tile_indptr[at.run + 1]) at.tile = call.plan.indices[++at.run];
    return at;
  }
  Listed before(Listed at) const {
    --at.tile;
    return --at.number >= work.begin && at.number < call.plan.tile_indptr[at.run] ? in_run(at.run - 1, at.number) : at;
  }

  // Calls visit(cells, mask) for each key tile after writing the positions of its cells to `position`.
  template <class Visit> void each_tile(int64_t* position, const Visit& visit) const {
    for (Listed at = first(); at.number < work.end; at = after(at)) {
      visit(list_positions(key_tile(at), position), mask(at));
    }
  }

 private:
  // Returns the permutation of the item's variant, or null.
  const int32_t* own(const int32_t* order, int64_t length) const {
    return order ? order + component().variant * length : nullptr;
  }

  Listed in_run(int64_t run, int64_t number) const {
    return {number, run, call.plan.indices[run] + number - call.plan.tile_indptr[run]};
  }

  Listed find(int64_t number) const {
    const int32_t* runs = call.plan.indptr + component().first_row + work.query_tile;
    int64_t low = runs[0], high = runs[1] - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (call.plan.tile_indptr[middle] <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return in_run(low, number);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
