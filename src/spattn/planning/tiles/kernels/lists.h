// The key tile lists of a plan, as runs of key tiles.
#pragma once

#include <cstdint>

#include "growing.h"

namespace spattn {

constexpr int32_t kFullTile = -1, kEmptyTile = -2;

class RunLists {
 public:
  RunLists(const Memory& indptr, const Memory& tile_indptr, const Memory& key_tile, const Memory& mask)
      : indptr_(indptr), tile_indptr_(tile_indptr), key_tile_(key_tile), mask_(mask) {
    indptr_.push(0), tile_indptr_.push(0);
  }

  // Room for up to `most` runs, which add() then commits; `tiles` is the number of tiles so far.
  struct Room {
    int32_t* key_tile;
    int32_t* mask;
    int64_t* tile_indptr;
    int64_t tiles;
  };
  Room next(int64_t most) {
    return {key_tile_.next(most), mask_.next(most), tile_indptr_.next(most), tile_indptr_.data()[runs()]};
  }
  void add(int64_t runs) { key_tile_.add(runs), mask_.add(runs), tile_indptr_.add(runs); }
  // Appends a copy of the last list.
  void repeat_list() {
    const int64_t before = indptr_.data()[lists() - 1], count = runs() - before;
    const Room room = next(count);
    const int64_t more = room.tiles - tile_indptr_.data()[before];
    for (int64_t n = 0; n < count; ++n) {
      room.key_tile[n] = key_tile_.data()[before + n], room.mask[n] = mask_.data()[before + n];
      room.tile_indptr[n] = tile_indptr_.data()[before + n + 1] + more;
    }
    add(count), end_list();
  }
  // Makes a list of all runs since the previous list.
  void end_list() { indptr_.push(int32_t(runs())); }

  // Appends `lists` lists; run n belongs to list list[n], in ascending order.
  void add(int64_t lists, const int32_t* list, const int32_t* key_tile, const int32_t* length, const int32_t* mask,
           int64_t count) {
    const Room room = next(count);
    int64_t tiles = room.tiles, n = 0;
    for (int64_t own = 0; own < lists; ++own) {
      for (; n < count && list[n] == own; ++n) {
        room.key_tile[n] = key_tile[n], room.mask[n] = mask[n], room.tile_indptr[n] = tiles += length[n];
      }
      indptr_.push(int32_t(runs() + n));
    }
    add(n);
  }

  // Removes the last `lists` lists, which must be empty.
  void drop_empty(int64_t lists) { indptr_.add(-lists); }

  void fit() { indptr_.fit(), tile_indptr_.fit(), key_tile_.fit(), mask_.fit(); }
  int64_t lists() const { return indptr_.size() - 1; }
  int64_t runs() const { return mask_.size(); }

 private:
  Growing<int32_t> indptr_;
  Growing<int64_t> tile_indptr_;
  Growing<int32_t> key_tile_, mask_;
};

}  // namespace spattn
