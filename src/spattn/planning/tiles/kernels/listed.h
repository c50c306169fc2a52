// Groups listed pairs by tile in O(pairs), with a counting sort over the key tiles of each query tile. For gathered KV,
// it first gathers the keys of each query tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "marks.h"

namespace spattn {

class ListedPairs {
 public:
  // Keys outside [first_key, first_key + keys) are ignored.
  ListedPairs(int64_t block_q, int64_t block_kv, int64_t first_key, int64_t keys)
      : block_q_(block_q), block_kv_(block_kv), first_key_(first_key), keys_(keys),
        shift_(block_kv & (block_kv - 1) ? -1 : __builtin_ctzll(block_kv)),
        next_(size_t((keys + block_kv - 1) / block_kv)), marks_(int64_t(next_.size())) {}

  // Groups sorted pairs whose rows are relative to query tile `number`. Writes the tiles, sorted by query tile and key
  // tile; tile t has the cells cell[first[t]:first[t + 1]]. Returns the number of tiles, at most `pairs`.
  int64_t group(const int64_t* row, const int64_t* key, int64_t pairs, int64_t number, int32_t* query_tile,
                int32_t* key_tile, int64_t* first, int32_t* cell) {
    int64_t tiles = 0, cells = 0;
    for (int64_t begin = 0, end = 0; begin < pairs; begin = end) {
      const int64_t tile = row[begin] / block_q_, before = tiles;
      if (block_q_ == 1) {  // already sorted
        for (; end < pairs && row[end] == tile; ++end) {
          const int64_t place = key[end] - first_key_;
          if (place < 0 || place >= keys_) continue;
          const int64_t at = tile_of(place);
          if (tiles == before || key_tile[tiles - 1] != at) {
            query_tile[tiles] = int32_t(number + tile), key_tile[tiles] = int32_t(at), first[tiles++] = cells;
          }
          cell[cells++] = int32_t(place - at * block_kv_);
        }
        continue;
      }
      for (; end < pairs && row[end] < (tile + 1) * block_q_; ++end) {
        const int64_t place = key[end] - first_key_;
        if (place < 0 || place >= keys_) continue;
        const int64_t at = tile_of(place);
        if (next_[at]++ == 0) marks_.set(at);
      }
      for (int64_t at = marks_.next(0); at < int64_t(next_.size()); at = marks_.next(at + 1)) {
        query_tile[tiles] = int32_t(number + tile), key_tile[tiles] = int32_t(at), first[tiles++] = cells;
        cells += next_[at];
        next_[at] = first[tiles - 1];
      }
      for (int64_t n = begin; n < end; ++n) {
        const int64_t place = key[n] - first_key_;
        if (place < 0 || place >= keys_) continue;
        const int64_t at = tile_of(place);
        cell[next_[at]++] = int32_t((row[n] - tile * block_q_) * block_kv_ + place - at * block_kv_);
      }
      for (int64_t n = before; n < tiles; ++n) next_[key_tile[n]] = 0;
      marks_.clear();
    }
    first[tiles] = cells;
    return tiles;
  }

 private:
  int64_t tile_of(int64_t place) const { return shift_ < 0 ? place / block_kv_ : place >> shift_; }

  int64_t block_q_, block_kv_, first_key_, keys_, shift_;
  std::vector<int64_t> next_;  // number of cells of each key tile, then index of its next cell; 0 between calls
  Marks marks_;                // non-empty key tiles
};

// Gathers the keys of each query tile into contiguous key tiles.
class GatheredKeys {
 public:
  // Keys are in [0, keys).
  GatheredKeys(int64_t block_q, int64_t block_kv, int64_t keys)
      : block_q_(block_q), block_kv_(block_kv), place_(size_t(keys)), marks_(keys) {}

  // Returns the key at each index: the sorted and unique keys of each query tile, padded to whole tiles with copies of
  // the last key. Pairs must be sorted; the index of each pair's key is written to `place`. Stops after the query tile
  // that exceeds `most` indices.
  std::vector<int32_t> gather(const int64_t* row, const int64_t* key, int64_t pairs, int64_t most, int64_t* place) {
    std::vector<int32_t> found;
    for (int64_t begin = 0, end = 0; begin < pairs && int64_t(found.size()) <= most; begin = end) {
      const int64_t stop = (row[begin] / block_q_ + 1) * block_q_;
      for (; end < pairs && row[end] < stop; ++end) marks_.set(key[end]);
      for (int64_t at = marks_.next(0); at < int64_t(place_.size()); at = marks_.next(at + 1)) {
        place_[at] = int32_t(found.size());
        found.push_back(int32_t(at));
      }
      marks_.clear();
      for (int64_t n = begin; n < end; ++n) place[n] = place_[key[n]];
      while (int64_t(found.size()) % block_kv_) found.push_back(found.back());
    }
    return found;
  }

 private:
  int64_t block_q_, block_kv_;
  std::vector<int32_t> place_;  // index of each key in the current query tile
  Marks marks_;                 // keys in the current query tile
};

// Writes the bitmasks of the given tiles, `words` words each.
inline void write_cells(const int64_t* first, const int32_t* cell, const int64_t* tiles, int64_t count, int64_t words,
                        uint64_t* masks) {
  std::fill(masks, masks + count * words, 0);
  for (int64_t n = 0; n < count; ++n, masks += words) {
    for (int64_t at = first[tiles[n]]; at < first[tiles[n] + 1]; ++at)
      masks[cell[at] / 64] |= uint64_t{1} << cell[at] % 64;
  }
}

}  // namespace spattn
