// Dispatch of every forward: plans whose tiles have one query are computed pair by pair, query tiles of at most kFew
// cells by the decode kernel, others by Many.
#pragma once
#include "decode/decode.h"
#include "kernels.h"
#include "pairwise/forward.h"
#include "tile/arena.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

template <class E, class Many, int64_t kFew> struct ByRows {
  using T = typename E::Compute;

  // Apart from each other, because Many may keep something in its scratch from item to item.
  struct Scratch {
    typename Many::Scratch many;
    DecodeScratch<T> few;

    Scratch(const Call& call, Arena& arena) : many(call, arena), few(call, arena) {}
  };

  static size_t bytes(const Call& call) noexcept {
    return by_pairs(call) ? scratch_bytes<PairwiseScratch<T>>(call) : scratch_bytes<Scratch>(call);
  }

  // An item of the heads that a task computes together, which are `head` and the ones after it.
  static void forward(const Call& call, int64_t batch, int64_t head, const Work& work, char* scratch) noexcept {
    Arena arena(scratch);
    const int64_t end = head + call.together;
    if (by_pairs(call)) {
      PairwiseScratch<T> pairs(call, arena);
      return pairwise<E>({call, batch, head, work}, end, pairs);
    }
    typename Many::Scratch many(call, arena);
    if (Item{call, batch, head, work}.query_tile().cells() <= kFew) {
      DecodeScratch<T> few(call, arena);
      decode<E>({call, batch, head, work}, end, few);
    } else {
      for (; head < end; ++head) Many::run({call, batch, head, work}, many);
    }
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
