// Which packed key tiles a thread still has: neighbouring query tiles of a head, and the query heads of a group, meet
// the same ones. What is in the cache changes no result.
#pragma once
#include "kernels.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kMostTiles = 64;                // that a cache holds
constexpr int64_t kCacheBytes = 1024 * 1024;  // about, as second-level caches

// The tags; tile `i` itself is wherever the owner keeps it. All zero: empty.
struct TileCache {
  static constexpr int kStep = 8;
  uint64_t clock;
  int64_t last;                                 // the slot found last
  uint64_t head[kMostTiles], tile[kMostTiles];  // 0: none
  uint64_t used[kMostTiles];                    // the clock at that time
  bool unfit[kMostTiles];                       // the owner's remark

  static int slots_for(int64_t tile_bytes) {
    const int64_t room = kCacheBytes / tile_bytes;
    return int(room < 1 ? 1 : room > kMostTiles ? kMostTiles : room);
  }

  // The slot of tile `number` of a view, of K and V of a pair (batch entry, head), or else the one that has not been used
  // for the longest time, which is the tile's from now on.
  int find(int64_t pair, int64_t view, int64_t number, int slots, bool& hit) {
    const uint64_t of_head = uint64_t(pair) + 1, wanted = uint64_t(view) << 32 | uint64_t(number);
    // Tiles come in the order in which they came before, or the other way round.
    const auto guess = [&](int64_t slot) {
      if (head[slot] != of_head || tile[slot] != wanted) return false;
      last = slot;
      used[slot] = ++clock;
      return hit = true;
    };
    if (guess(last + 1 < slots ? last + 1 : 0) || guess(last ? last - 1 : slots - 1)) return int(last);
    uint64_t found = 0;
    for (int i = 0; i < slots; i += kStep) {  // without a branch that depends on where it is
      BitsVec<double> same[kStep / kLanes<double>];
      SPATTN_UNROLL
      for (int j = 0; j < kStep / kLanes<double>; ++j) {
        const int at = i + j * kLanes<double>;
        same[j] = (BitsVec<double>)((load<BitsVec<double>>(head + at) == of_head) &
                                    (load<BitsVec<double>>(tile + at) == wanted));
      }
      uint64_t each[kStep];
      memcpy(each, same, sizeof each);
      for (int j = 0; j < kStep; ++j) found |= (each[j] & 1) << (i + j);
    }
    hit = found != 0;
    int slot = hit ? __builtin_ctzll(found) : 0;
    for (int i = 1; !hit && i < slots; ++i) slot = used[i] < used[slot] ? i : slot;
    head[slot] = of_head, tile[slot] = wanted, used[slot] = ++clock;
    last = slot;
    return slot;
  }
};
static_assert(sizeof(TileCache) <= kZeroedScratch, "tags start as empty");

}  // namespace SPATTN_ISA
}  // namespace spattn
