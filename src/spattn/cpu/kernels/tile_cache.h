// Which packed key tiles a thread still has: neighbouring query tiles of a head, and the query heads of a group, meet
// the same ones. What is in the cache changes no result.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kMostTiles = 64;               // that a cache holds
constexpr int64_t kCacheBytes = 768 * 1024;  // about: they have to stay in the second-level cache

// The tags; tile `i` itself is wherever the owner keeps it. All zero: empty.
struct TileCache {
  struct Tag {
    uint64_t head, tile;  // 0: none
    uint64_t used;        // the clock at that time
    uint64_t unfit;       // are there keys that the products cannot take?
  };
  uint64_t clock;
  Tag tags[kMostTiles];

  static int slots_for(int64_t tile_bytes) {  // two at least: the tile in work, and the next one
    const int64_t room = kCacheBytes / tile_bytes;
    return int(room < 2 ? 2 : room > kMostTiles ? kMostTiles : room);
  }

  // The slot of a tile, or else the one that has not been used for the longest time, which is the tile's from now on.
  int find(uint64_t head, uint64_t tile, int slots, bool& hit) {
    int oldest = 0;
    ++clock;
    for (int i = 0; i < slots; ++i) {
      if (tags[i].tile == tile && tags[i].head == head) {
        tags[i].used = clock;
        hit = true;
        return i;
      }
      if (tags[i].used < tags[oldest].used) oldest = i;
    }
    tags[oldest] = {head, tile, clock, 0};
    hit = false;
    return oldest;
  }
};
static_assert(sizeof(TileCache) <= kZeroedScratch, "tags start as empty");

}  // namespace SPATTN_ISA
}  // namespace spattn
