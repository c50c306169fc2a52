// A thread's working memory for the forward by AMX: operands lie in tiles of 1 KiB, so that a tile is sixteen whole
// cache lines in a row.
#pragma once
#include "amx/panel.h"
#include "tile/mask.h"
#include "tile/scratch.h"
#include "tile/tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// Queries are taken in panels of two columns, each a vector of queries and the width of a tile.
static_assert(kLanes<float> == kTileColumns, "a lane is a query");

// A key tile as both products read it.
struct PackedTile {
  TileFactor keys, values;
  int64_t rows;  // keys, with padding
  bool unfit;    // are there keys that the path's check does not pass?
};

// A key tile of an item's list.
struct Entry {
  PackedTile tile;
  Mask mask;
};

template <class Path> struct AmxScratch : Scratch<float> {
  static constexpr int kParts = Path::kParts;
  TileCache& cache;
  int64_t key_steps, value_tiles, tile_steps;  // tiles along head_dim, head_dim_v and the keys
  char* query_tiles;            // [panel][part][key_steps]: Q' times the scale's sign, pairs of features by queries
  float* panel_scores;          // (keys, kPanel): S'
  char* weight_tiles;           // [part][tile_steps]: P' of a key tile and a panel, pairs of keys by queries
  float* output_tiles;          // [panel][value_tiles]: O'
  float* product;               // [value_tiles]: V' P', on its way to O'
  typename Path::Row* staged;   // rows to pack
  int slots;                    // of the cache
  Entry* entries;               // [slots]
  int64_t key_part, value_part, slot_bytes;
  char* packed;  // [slots] of K [part][keys / 16][key_steps] and V' [part][value_tiles][tile_steps]

  AmxScratch(const Call& call, char* memory)
      : Scratch<float>(call, memory, offset()), cache(*reinterpret_cast<TileCache*>(memory)) {
    const int64_t block_kv = call.plan.block_kv, panels = (ld_query + kPanel - 1) / kPanel;
    key_steps = (call.head_dim + kTileTerms - 1) / kTileTerms;
    value_tiles = (call.head_dim_v + kTileRows - 1) / kTileRows;
    tile_steps = block_kv / kTileTerms;
    carve(memory, query_tiles, panels * kParts * key_steps * kPanelSize);
    carve(memory, panel_scores, block_kv * kPanel);
    carve(memory, weight_tiles, kParts * tile_steps * kPanelSize);
    carve(memory, output_tiles, panels * value_tiles * kPanelSize / 4);
    carve(memory, product, value_tiles * kPanelSize / 4);
    carve(memory, staged, block_kv * (staged_keys() > staged_values() ? staged_keys() : staged_values()));
    key_part = block_kv / kTileRows * key_steps * kTileSize;
    value_part = value_tiles * tile_steps * kTileSize;
    slot_bytes = kParts * (key_part + value_part);
    slots = TileCache::slots_for(slot_bytes);
    carve(memory, entries, slots);
    carve(memory, packed, slots * slot_bytes);
  }

  static constexpr size_t offset() { return size_t(round_up(sizeof(TileCache), 64)); }
  int64_t staged_keys() const { return key_steps * kTileTerms; }
  int64_t staged_values() const { return value_tiles * kTileRows; }
  // Where the column of tiles begins that the query cell `first` begins.
  char* query_column(int64_t first) const {
    return query_tiles + first / kPanel * kParts * key_steps * kPanelSize + first % kPanel * 4;
  }
  float* output_column(int64_t first) const {
    return output_tiles + first / kPanel * value_tiles * (kPanelSize / 4) + first % kPanel;
  }
  char* keys_of(int slot) const { return packed + slot * slot_bytes; }
  char* values_of(int slot) const { return keys_of(slot) + kParts * key_part; }
};

template <class Path> size_t amx_scratch_bytes(const Call& call) noexcept {
  alignas(64) char none[AmxScratch<Path>::offset() + 1];
  return AmxScratch<Path>(call, none).bytes;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
