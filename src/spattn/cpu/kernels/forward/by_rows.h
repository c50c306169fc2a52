// Forward dispatch: plans with one-query tiles run pair by pair, query tiles of at most kFew cells the decode kernel,
// others Many.
#pragma once
#include "decode/boxes.h"
#include "decode/decode.h"
#include "kernels.h"
#include "pairwise/forward.h"
#include "tile/arena.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

template <class E, class Many, int64_t kFew> struct ByRows {
  using T = typename E::Compute;

  // Disjoint, because Many may keep data in its scratch between items.
  struct Scratch {
    typename Many::Scratch many;
    DecodeScratch<T> few;

    Scratch(const Call& call, Arena& arena) : many(call, arena), few(call, arena) {}
  };

  // Calls with only few-query items may interleave keys.
  struct Few : DecodeScratch<T> {
    Few(const Call& call, Arena& arena) : DecodeScratch<T>(call, arena, call.reach, values_as_computed<E>(call)) {}
  };

  static size_t bytes(const Call& call) noexcept {
    if (by_pairs(call)) return scratch_bytes<PairwiseScratch<T>>(call);
    return always_few(call) ? scratch_bytes<Few>(call) : scratch_bytes<Scratch>(call);
  }

  // Runs items for the call.together heads from `head` on.
  static void forward(const Call& call, int64_t batch, int64_t head, const Work* work, int64_t count,
                      char* scratch) noexcept {
    if (count == 0) return;
    Arena arena(scratch);
    const int64_t end = head + call.together;
    const KeyHead keys = Item{call, batch, head, *work}.key_head();  // of all items
    const auto each = [&](const auto& run) {
      for (int64_t i = 0; i < count; ++i) run(Item{call, batch, head, work[i]});
    };
    if (by_pairs(call)) {
      PairwiseScratch<T> pairs(call, arena);
      return each([&](const Item& item) { pairwise<E>(item, end, pairs); });
    }
    if (always_few(call)) {
      Few few(call, arena);
      if (few.interleaved) few.interleaved.align(odd_starts(call, work, count));
      Boxes<E> boxes({call, batch, head, *work}, keys, few);
      for (int64_t i = 0, taken; i < count; i += taken) {
        taken = end - head == 1 ? boxes.take(work + i, count - i) : 0;
        if (taken) {
          decode(boxes, few);
        } else {
          decode<E>({call, batch, head, work[i]}, keys, end, few), taken = 1;
        }
      }
      return;
    }
    typename Many::Scratch many(call, arena);
    DecodeScratch<T> few(call, arena);
    each([&](const Item& item) {
      if (item.query_tile().cells() <= kFew) return decode<E>(item, keys, end, few);
      for (int64_t own = head; own < end; ++own) Many::run({call, batch, own, item.work}, many);
    });
  }

 private:
  static bool always_few(const Call& call) { return call.plan.block_q <= kFew; }

  // Whether most key tiles start at an odd key; samples five items, since up to two may touch an image border.
  static bool odd_starts(const Call& call, const Work* work, int64_t count) {
    const int64_t first = count / 2, end = first + 5 < count ? first + 5 : count;
    int64_t odd = 0;
    for (int64_t i = first; i < end; ++i) {
      const Item item = {call, 0, 0, work[i]};
      if (item.work.begin < item.work.end) odd += item.key_tile(item.first()).start & 1;
    }
    return 2 * odd > end - first;
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
