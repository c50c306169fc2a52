// Scratch of the forward in forward.h.
#pragma once
#include "kernels.h"
#include "softmax/dropout.h"
#include "softmax/score.h"
#include "softmax/softmax.h"
#include "tile/arena.h"
#include "tile/mask.h"
#include "tile/scratch.h"
#include "tile/tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// K and V of a key tile, packed for the products.
template <class T> struct CachedTile {
  T *keys, *values;  // (block_kv, width.key), (block_kv, width.value)
  bool fresh;        // a cache miss: the caller must pack the tile
};

// Cache of packed key tiles, for tiles that the products cannot read in place.
template <class T> struct KeyTiles {
  TileCache* cache;
  int64_t key_size, size;  // elements of K, and of K and V
  int capacity;
  T* packed;  // (capacity, size): K, then V

  KeyTiles(const Call& call, const Widths<T>& width, TileCache* cache, Arena& arena)
      : cache(cache), key_size(call.plan.block_kv * width.key), size(call.plan.block_kv * (width.key + width.value)),
        capacity(TileCache::capacity_for(size * int64_t(sizeof(T)))), packed(arena.array<T>(capacity * size)) {}

  CachedTile<T> find(int64_t kv_number, int64_t view, int64_t number) {
    bool hit;
    T* keys = packed + cache->find(kv_number, view, number, capacity, hit) * size;
    return {keys, keys + key_size, !hit};
  }
};

template <class T> struct ForwardScratch {
  TileCache* cache;  // first, because only the start of the scratch is zeroed
  Widths<T> width;
  T* query;   // (head_dim, width.query): sign(scale) * Q'
  T* scores;  // (block_kv, width.query): S', then P'
  T* output;  // (width.query, width.value): O, unnormalized
  T* staged;  // (kLanes, max(width.key, width.value)): rows before packing
  RowStatistics<T> rows;
  LaneMask<T> mask;
  Positions position;
  FallbackRowBuffer exact;
  Score<T> score;
  Dropout<T> dropout;
  LinearScore<T> linear;  // of the current key tile; its rows are those of `scores`
  KeyTiles<T> tiles;

  ForwardScratch(const Call& call, Arena& arena)
      : cache(arena.array<TileCache>(1)), width(call), query(arena.array<T>(call.head_dim * width.query)),
        scores(arena.array<T>(call.plan.block_kv * width.query)), output(arena.array<T>(width.query * width.value)),
        staged(arena.array<T>(kLanes<T> * (width.key > width.value ? width.key : width.value))),
        rows(width.query, arena), mask(call, width.query, arena), position(call, arena),
        exact(width.query, call.head_dim_v, arena), score(call, call.plan.block_kv, width.query, 1, arena),
        dropout(call, width.query, call.plan.block_kv, arena), tiles(call, width, cache, arena) {}
};

}  // namespace SPATTN_ISA
}  // namespace spattn
