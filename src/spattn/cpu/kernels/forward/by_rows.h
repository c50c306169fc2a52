// Forward dispatch: runs the pairwise kernel for plans with one-query tiles, the decode kernel for query tiles of at
// most kFew cells, and Many for others.
#pragma once
#include "decode/decode.h"
#include "finish/results.h"
#include "kernels.h"
#include "pairwise/forward.h"
#include "tile/arena.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

template <class E, class Many, int64_t kFew> struct ByRows {
  using T = typename E::Compute;

  // Not a union, because Many may keep data in its scratch between items.
  struct Scratch {
    typename Many::Scratch many;
    DecodeScratch<T> few;

    Scratch(const Call& call, Arena& arena) : many(call, arena), few(call, arena) {}
  };

  static size_t bytes(const Call& call) noexcept {
    if (by_pairs(call)) return scratch_bytes<PairwiseScratch<T>>(call);
    return always_few(call) ? scratch_bytes<DecodeScratch<T>>(call) : scratch_bytes<Scratch>(call);
  }

  // Computes `count` items for the call.together heads from `head` on.
  static void forward(const Call& call, int64_t batch, int64_t head, const Work* work, int64_t count,
                      char* scratch) noexcept {
    if (count == 0) return;
    Arena arena(scratch);
    const int64_t end = head + call.together;
    const auto each = [&](const auto& run) {
      for (int64_t i = 0; i < count; ++i) run(Item{call, batch, head, work[i]});
    };
    if (by_pairs(call)) {
      PairwiseScratch<T> pairs(call, arena);
      return each([&](const Item& item) { pairwise<E>(item, end, pairs); });
    }
    if (always_few(call)) {
      DecodeScratch<T> few(call, arena);
      return each([&](const Item& item) { decode<E>(item, end, few); });
    }
    typename Many::Scratch many(call, arena);
    DecodeScratch<T> few(call, arena);
    each([&](const Item& item) {
      if (item.query_tile().cells() <= kFew) return decode<E>(item, end, few);
      for (int64_t own = head; own < end; ++own) Many::run({call, batch, own, item.work}, many);
    });
  }

 private:
  static bool always_few(const Call& call) { return call.plan.block_q <= kFew; }
};

template <class E, class Rows> constexpr ForwardKernels forward_kernels() {
  return {Rows::bytes, Rows::forward, merge<E>};
}

}  // namespace SPATTN_ISA
}  // namespace spattn
