// A work item of one query head: what it reads, and its list of key tiles.
#pragma once
#include "kernels.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

struct Item {
  const Call& call;
  int64_t batch, head;
  const Work& work;

  int64_t head_kv() const { return head / call.group; }
  // The key-value head's number among those of all batch entries.
  int64_t kv_number() const { return batch * (call.heads_q / call.group) + head_kv(); }

  Head queries() const { return {call.q, batch, head}; }
  Head keys() const { return {call.k, batch, head_kv()}; }
  Head values() const { return {call.v, batch, head_kv()}; }

  const Component& component() const { return call.plan.components[work.component]; }
  Tile query_tile() const { return locate(call.plan.views[component().query_view], work.query_tile); }
  int64_t key_view(int64_t entry) const { return component().key_view + call.plan.key_view[entry]; }
  Tile key_tile(int64_t entry) const { return locate(call.plan.views[key_view(entry)], call.plan.indices[entry]); }

  // visit(cells, mask) for every key tile, the positions of its cells in `position`.
  template <class Visit> void each_tile(int64_t* position, const Visit& visit) const {
    for (int64_t entry = work.begin; entry < work.end; ++entry) {
      visit(list_positions(key_tile(entry), position), Mask(call.plan, entry));
    }
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
