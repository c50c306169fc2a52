// Scratch of the AMX forward: operands in tiles of 1 KiB, sixteen consecutive cache lines each.
#pragma once
#include "amx/panel.h"
#include "softmax/softmax.h"
#include "tile/arena.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/scratch.h"
#include "tile/tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// A panel of queries has two columns, each a vector of queries and as wide as a tile.
static_assert(kLanes<float> == kTileColumns, "a lane is a query");

// A key tile packed for both products.
struct PackedTile {
  TileFactor keys, values;
  int64_t rows;  // keys, padded
  bool unfit;    // whether any key fails the path's check
};

// A key tile of an item's list.
struct Entry {
  PackedTile tile;
  Mask mask;
  Listed at;
};

// Numbers of tiles along head_dim, head_dim_v and the keys.
struct TileCounts {
  int64_t key_steps, value_tiles, steps;

  explicit TileCounts(const Call& call)
      : key_steps((call.head_dim + kTileTerms - 1) / kTileTerms),
        value_tiles((call.head_dim_v + kTileRows - 1) / kTileRows), steps(call.plan.block_kv / kTileTerms) {}

  // Elements of a row, in whole tiles.
  int64_t key_width() const { return key_steps * kTileTerms; }
  int64_t value_width() const { return value_tiles * kTileRows; }
  int64_t larger_width() const { return key_width() > value_width() ? key_width() : value_width(); }
};

// A thread's packed key tiles: K [part][keys / 16][key_steps], then V' [part][value_tiles][steps].
template <class Path> struct PackedTiles {
  TileCache* cache;
  TileCounts counts;
  int64_t key_part, value_part, bytes;  // of a part of K or V', of a tile
  int capacity;
  char* data;

  PackedTiles(const Call& call, TileCache* cache, Arena& arena)
      : cache(cache), counts(call), key_part(call.plan.block_kv / kTileRows * counts.key_steps * kTileSize),
        value_part(counts.value_tiles * counts.steps * kTileSize), bytes(Path::kParts * (key_part + value_part)),
        capacity(TileCache::capacity_for(bytes)), data(arena.array<char>(capacity * bytes)) {}

  char* keys(int index) const { return data + index * bytes; }
  char* values(int index) const { return keys(index) + Path::kParts * key_part; }
  PackedTile tile(int index, int64_t rows) const {
    return {{keys(index), kTileBytes, counts.key_steps * kTileSize, kTileSize, key_part},
            {values(index), kTileBytes, counts.steps * kTileSize, kTileSize, value_part},
            rows,
            cache->unfit[index]};
  }
};

template <class Path> struct AmxScratch {
  static constexpr int kParts = Path::kParts;
  TileCache* cache;  // first, as the scratch starts zeroed
  Widths<float> width;
  int64_t panels;  // of queries
  Positions position;
  RowStatistics<float> rows;
  FallbackRowBuffer exact;
  TileCounts counts;
  float* output;               // (width.query, value_width()): O
  char* query_tiles;           // [panel][part][key_steps]: Q' times the scale's sign, pairs of features by queries
  float* panel_scores;         // (keys, kPanel): S'
  char* weight_tiles;          // [part][steps]: P' of a key tile and a panel, pairs of keys by queries
  float* output_tiles;         // [panel][value_tiles]: O'
  float* product;              // [value_tiles]: V' P', before it is added to O'
  typename Path::Row* staged;  // rows to pack
  PackedTiles<Path> tiles;
  Entry* entries;  // as many as tiles fit the cache

  AmxScratch(const Call& call, Arena& arena)
      : cache(arena.array<TileCache>(1)), width(call), panels((width.query + kPanel - 1) / kPanel),
        position(call, arena), rows(width.query, arena), exact(width.query, call.head_dim_v, arena), counts(call),
        output(arena.array<float>(width.query * counts.value_width())),
        query_tiles(arena.array<char>(panels * kParts * counts.key_steps * kPanelSize)),
        panel_scores(arena.array<float>(call.plan.block_kv * kPanel)),
        weight_tiles(arena.array<char>(kParts * weight_part())),
        output_tiles(arena.array<float>(panels * counts.value_tiles * kPanelSize / 4)),
        product(arena.array<float>(counts.value_tiles * kPanelSize / 4)),
        staged(arena.array<typename Path::Row>(call.plan.block_kv * counts.larger_width())), tiles(call, cache, arena),
        entries(arena.array<Entry>(tiles.capacity)) {}

  // The tile column of the query cell `first`.
  char* query_column(int64_t first) const {
    return query_tiles + first / kPanel * kParts * counts.key_steps * kPanelSize + first % kPanel * 4;
  }
  float* output_column(int64_t first) const {
    return output_tiles + first / kPanel * counts.value_tiles * (kPanelSize / 4) + first % kPanel;
  }
  int64_t weight_part() const { return counts.steps * kPanelSize; }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
