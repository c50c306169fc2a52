// Scratch of the query-vectorized forward.
#pragma once
#include "kernels.h"
#include "softmax/softmax.h"
#include "tile/arena.h"
#include "tile/mask.h"
#include "tile/scratch.h"
#include "tile/tile_cache.h"

namespace spattn {
namespace SPATTN_ISA {

// K and V of a key tile in the layout of the products.
template <class T> struct CachedTile {
  T *keys, *values;  // (block_kv, width.key), (block_kv, width.value)
  bool fresh;        // still to be gathered and packed
};

// Key tiles that cannot be read in place, gathered or converted once for all query tiles that use them.
template <class T> struct KeyTiles {
  TileCache* cache;
  int64_t key_size, size;  // elements: of K, of K and V
  int capacity;
  T* packed;  // [capacity] of K, then V

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
  TileCache* cache;  // first, as the scratch starts zeroed
  Widths<T> width;
  T* query;   // (head_dim, width.query): Q', times the sign of the scale
  T* scores;  // (block_kv, width.query): S', then the weights
  T* output;  // (width.query, width.value): O, unnormalized
  T* staged;  // (lanes, the larger of width.key and width.value): rows before packing
  RowStatistics<T> rows;
  LaneMask<T> mask;
  Positions position;
  FallbackRowBuffer exact;
  KeyTiles<T> tiles;

  ForwardScratch(const Call& call, Arena& arena)
      : cache(arena.array<TileCache>(1)), width(call), query(arena.array<T>(call.head_dim * width.query)),
        scores(arena.array<T>(call.plan.block_kv * width.query)), output(arena.array<T>(width.query * width.value)),
        staged(arena.array<T>(kLanes<T> * (width.key > width.value ? width.key : width.value))),
        rows(width.query, arena), mask(call, width.query, arena), position(call, arena),
        exact(width.query, call.head_dim_v, arena), tiles(call, width, cache, arena) {}
};

}  // namespace SPATTN_ISA
}  // namespace spattn
