// Per-thread LRU cache of packed key tiles, which neighbouring query tiles and the query heads of a group reuse. Cache
// hits do not change results.
#pragma once
#include "kernels.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kMostTiles = 64;
constexpr int64_t kCacheBytes = 1024 * 1024;  // about the size of an L2 cache

// The tags of the cache; its owner stores the tiles. Zeroed memory is an empty cache.
struct TileCache {
  static constexpr int kStep = 8;
  uint64_t clock;
  int64_t last;                                 // index of the last hit
  uint64_t head[kMostTiles], tile[kMostTiles];  // head 0: empty
  uint64_t used[kMostTiles];                    // clock of the last use
  bool unfit[kMostTiles];                       // set by the AMX kernels: PackedTile::unfit

  static int capacity_for(int64_t tile_bytes) {
    const int64_t room = kCacheBytes / tile_bytes;
    return int(room < 1 ? 1 : room > kMostTiles ? kMostTiles : room);
  }

  // Returns the cache index, below `capacity`, of tile `number` of `view` for key-value head `kv_number`. On a miss,
  // evicts the least recently used tile and returns its index.
  int find(int64_t kv_number, int64_t view, int64_t number, int capacity, bool& hit) {
    const uint64_t of_head = uint64_t(kv_number) + 1, wanted = uint64_t(view) << 32 | uint64_t(number);
    // Items usually read the tiles in the same order as the previous item, or in reverse.
    const auto guess = [&](int64_t index) {
      if (head[index] != of_head || tile[index] != wanted) return false;
      last = index;
      used[index] = ++clock;
      return hit = true;
    };
    if (guess(last + 1 < capacity ? last + 1 : 0) || guess(last ? last - 1 : capacity - 1)) return int(last);
    uint64_t found = 0;
    for (int i = 0; i < capacity; i += kStep) {  // has no data-dependent branch
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
    int index = hit ? __builtin_ctzll(found) : 0;
    for (int i = 1; !hit && i < capacity; ++i) index = used[i] < used[index] ? i : index;
    head[index] = of_head, tile[index] = wanted, used[index] = ++clock;
    last = index;
    return index;
  }
};
static_assert(sizeof(TileCache) <= kZeroedScratch, "tags start as empty");

}  // namespace SPATTN_ISA
}  // namespace spattn
