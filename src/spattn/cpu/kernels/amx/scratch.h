// Scratch of the AMX forward. Operands are stored as tiles of 1 KiB, sixteen consecutive cache lines each.
#pragma once
#include "amx/panel.h"
#include "softmax/dropout.h"
#include "softmax/score.h"
#include "softmax/softmax.h"
#include "tile/arena.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/scratch.h"
#include "tile/tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// A tile column holds one vector of queries, and a panel two tile columns.
static_assert(kLanes<float> == kTileColumns, "a lane is a query");

// A key tile packed for both products.
struct PackedTile {
  TileFactor keys, values;
  int64_t rows;  // keys, rounded up to a multiple of kTileTerms
  bool unfit;    // whether any key fails Path::Check
};

// A key tile of an item, with its mask and position in the list.
struct Entry {
  PackedTile tile;
  Mask mask;
  Listed at;
};

// Numbers of tiles along head_dim, head_dim_v and block_kv.
struct TileCounts {
  int64_t key_steps, value_tiles, steps;

  explicit TileCounts(const Call& call)
      : key_steps((call.head_dim + kTileTerms - 1) / kTileTerms),
        value_tiles((call.head_dim_v + kTileRows - 1) / kTileRows), steps(call.plan.block_kv / kTileTerms) {}

  // Return head_dim and head_dim_v, rounded up to tiles, and the larger of both.
  int64_t key_width() const { return key_steps * kTileTerms; }
  int64_t value_width() const { return value_tiles * kTileRows; }
  int64_t larger_width() const { return key_width() > value_width() ? key_width() : value_width(); }
};

// Cache of packed key tiles. Each consists of K, (part, keys / 16, key_steps), and V', (part, value_tiles, steps).
template <class Path> struct PackedTiles {
  TileCache* cache;
  TileCounts counts;
  int64_t key_part, value_part, bytes;  // bytes of a part of K, of a part of V', and of a key tile
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
  TileCache* cache;  // first, because only the start of the scratch is zeroed
  Widths<float> width;
  int64_t panels;
  Positions position;
  RowStatistics<float> rows;
  FallbackRowBuffer exact;
  TileCounts counts;
  float* output;               // (width.query, value_width()): O
  char* query_tiles;           // (panels, part, key_steps) tiles: sign(scale) * Q', pairs of features by queries
  float* panel_scores;         // (block_kv, kPanel): S' of a panel
  char* weight_tiles;          // (part, steps) tiles: P' of a panel, pairs of keys by queries
  float* output_tiles;         // (panels, value_tiles) tiles: O'
  float* product;              // (value_tiles) tiles: V' P' of a key tile
  typename Path::Row* staged;  // rows before packing
  Score<float> score;
  Dropout<float> dropout;
  PackedTiles<Path> tiles;
  Entry* entries;  // (tiles.capacity)

  AmxScratch(const Call& call, Arena& arena)
      : cache(arena.array<TileCache>(1)), width(call), panels((width.query + kPanel - 1) / kPanel),
        position(call, arena), rows(width.query, arena), exact(width.query, call.head_dim_v, arena), counts(call),
        output(arena.array<float>(width.query * counts.value_width())),
        query_tiles(arena.array<char>(panels * kParts * counts.key_steps * kPanelSize)),
        panel_scores(arena.array<float>(call.plan.block_kv * kPanel)),
        weight_tiles(arena.array<char>(kParts * weight_part())),
        output_tiles(arena.array<float>(panels * counts.value_tiles * kPanelSize / 4)),
        product(arena.array<float>(counts.value_tiles * kPanelSize / 4)),
        staged(arena.array<typename Path::Row>(call.plan.block_kv * counts.larger_width())),
        score(call, call.plan.block_kv, kPanel, 1, arena), dropout(call, width.query, call.plan.block_kv, arena),
        tiles(call, cache, arena), entries(arena.array<Entry>(tiles.capacity)) {}

  // Return Q' and O' of the tile column that starts at query cell `first`.
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
