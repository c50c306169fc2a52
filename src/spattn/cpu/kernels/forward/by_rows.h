// Dispatch of every forward: query tiles of at most kFew cells use the decode kernel, others use Many.
#pragma once
#include "decode/decode.h"
#include "kernels.h"
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

  static size_t bytes(const Call& call) noexcept { return scratch_bytes<Scratch>(call); }

  // An item of the heads that a task computes together, which are `head` and the ones after it.
  static void forward(const Call& call, int64_t batch, int64_t head, const Work& work, char* scratch) noexcept {
    Arena arena(scratch);
    typename Many::Scratch many(call, arena);
    const int64_t end = head + call.together;
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
