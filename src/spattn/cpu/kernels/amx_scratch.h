// A thread's working memory for the forward by AMX: operands lie in tiles of 1 KiB, so that a tile is sixteen whole
// cache lines in a row.
#pragma once
#include "amx.h"
#include "scratch.h"
#include "tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// Queries are taken in panels of two columns, each a vector of queries and the width of a tile. Every factor or result
// with queries along its rows is made of panel tiles, whose rows are twice as long as those of a tile: the two tiles of
// a panel lie side by side.
constexpr int kPanel = 2 * kTileColumns;           // queries
constexpr int kPanelBytes = 2 * kTileBytes;        // of a row
constexpr int64_t kTileSize = kTileRows * kTileBytes, kPanelSize = kTileRows * kPanelBytes;  // bytes
static_assert(kLanes<float> == kTileColumns, "a lane is a query");

template <class Path> struct AmxScratch : Scratch<float> {
  static constexpr int kParts = Path::kParts;
  TileCache& cache;
  int64_t key_steps, value_tiles, tile_steps;  // tiles along head_dim, head_dim_v and the keys
  char* query_tiles;            // [panel][part][key_steps]: Q' times the scale's sign, pairs of features by queries
  float* scores_of[2];          // (keys, kPanel): S' of a step; the next one's is already being computed
  char* weight_tiles[2];        // [part][tile_steps]: P' of a step, pairs of keys by queries; and of the one before
  float* output_tiles;          // [panel][value_tiles]: O'
  float* product;               // [value_tiles]: V' P' of a step, on its way to O'
  typename Path::Row* staged;   // rows to pack
  bool* exact;                  // (ld_query): rows left to the exact path
  int slots;
  int64_t key_part, value_part, slot_bytes;
  uint64_t* unfit;  // [slots][keys / 64]: the keys of a tile that are not finite
  char* packed;     // [slots] of K [part][keys / 16][key_steps] and V' [part][value_tiles][tile_steps]

  AmxScratch(const Call& call, char* memory)
      : Scratch<float>(call, memory, offset()), cache(*reinterpret_cast<TileCache*>(memory)) {
    const int64_t block_kv = call.plan.block_kv, panels = (ld_query + kPanel - 1) / kPanel;
    key_steps = (call.head_dim + kTileTerms - 1) / kTileTerms;
    value_tiles = (call.head_dim_v + kTileRows - 1) / kTileRows;
    tile_steps = block_kv / kTileTerms;
    carve(memory, query_tiles, panels * kParts * key_steps * kPanelSize);
    carve(memory, scores_of[0], block_kv * kPanel);
    carve(memory, scores_of[1], block_kv * kPanel);
    carve(memory, weight_tiles[0], kParts * tile_steps * kPanelSize);
    carve(memory, weight_tiles[1], kParts * tile_steps * kPanelSize);
    carve(memory, output_tiles, panels * value_tiles * kPanelSize / 4);
    carve(memory, product, value_tiles * kPanelSize / 4);
    carve(memory, exact, ld_query);
    carve(memory, staged, block_kv * (staged_keys() > staged_values() ? staged_keys() : staged_values()));
    key_part = block_kv / kTileRows * key_steps * kTileSize;
    value_part = value_tiles * tile_steps * kTileSize;
    slot_bytes = kParts * (key_part + value_part);
    slots = TileCache::slots_for(slot_bytes);
    carve(memory, unfit, slots * block_kv / 64);
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
