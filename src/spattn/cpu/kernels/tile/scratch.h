// A thread's working memory for one item, and the register blocking that its layout follows.
//
// Scores are kept transposed, one row per key: the keys of a tile then enter S' = K Q' as scalars and need no packing,
// the softmax statistics of neighbouring queries lie side by side in one vector, so that no reduction crosses lanes,
// and P' is at once the packed left operand of O += P V.
#pragma once
#include "kernels.h"
#include "tile/tile_cache.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// Accumulators fill the register file, leaving room for one row of the right operand and a broadcast scalar.
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 vector registers
constexpr int kKeyRows = 8, kQueryVectors = 3;    // S': 8 keys by 3 vectors of queries
constexpr int kOutputRows = 6, kOutputVectors = 4;
#else                                             // 16
constexpr int kKeyRows = 4, kQueryVectors = 3;
constexpr int kOutputRows = 6, kOutputVectors = 2;
#endif

template <class T> struct Scratch {
  int64_t ld_query;  // queries of a tile, rounded up to whole vectors
  int64_t ld_key;    // head_dim, likewise
  int64_t ld_value;  // head_dim_v, likewise
  T* query;          // (head_dim, ld_query): Q', times the sign of the scale
  T* scores;         // (block_kv, ld_query): S', then P'
  T* output;         // (ld_query, ld_value): O, not yet divided by row_sum
  T* keys;           // (block_kv, ld_key): rows on their way to where they are packed
  T* values;         // (block_kv, ld_value)
  T *row_max, *row_sum, *weight_sum, *tile_max, *origin, *rescale;  // (ld_query)
  double* lse;             // (ld_query)
  Word<T>* allowed;        // (block_kv / bits of a word, ld_query): the tile's bitmask, one word per query lane
  Word<T>* reached;        // (block_kv / bits of a word, ld_query / lanes): the same, or-ed over a vector of queries
  int64_t* query_position;  // (block_q)
  int64_t* key_position;    // (block_kv)
  bool* exact;              // (ld_query): rows left to the exact path
  double* exact_output;     // (head_dim_v)
  size_t bytes;

  // May any of the vector of queries from `column` on attend to any of kKeyRows keys from `key` on? See unpack().
  bool reaches(int64_t column, int64_t key) const {
    constexpr int64_t kBits = 8 * sizeof(T);
    const Word<T> found = reached[(key / kBits * ld_query + column) / kLanes<T>];
    return found >> (key % kBits) & ((Word<T>(1) << kKeyRows) - 1);
  }

  Scratch(const Call& call, char* memory, size_t begin = 0) : bytes(begin) {  // whole lines
    const int64_t lanes = kLanes<T>, block_q = call.plan.block_q, block_kv = call.plan.block_kv;
    ld_query = round_up(block_q, lanes);
    ld_key = round_up(call.head_dim, lanes);
    ld_value = round_up(call.head_dim_v, lanes);
    carve(memory, query, call.head_dim * ld_query);
    carve(memory, scores, block_kv * ld_query);
    carve(memory, output, ld_query * ld_value);
    carve(memory, keys, (block_kv < lanes ? lanes : block_kv) * ld_key);
    carve(memory, values, block_kv * ld_value);
    carve(memory, row_max, ld_query);
    carve(memory, row_sum, ld_query);
    carve(memory, weight_sum, ld_query);
    carve(memory, tile_max, ld_query);
    carve(memory, origin, ld_query);
    carve(memory, rescale, ld_query);
    carve(memory, lse, ld_query);
    carve(memory, allowed, block_kv / int64_t(8 * sizeof(T)) * ld_query);
    carve(memory, reached, block_kv / int64_t(8 * sizeof(T)) * ld_query / lanes);
    carve(memory, query_position, block_q);
    carve(memory, key_position, block_kv);
    carve(memory, exact, ld_query);
    carve(memory, exact_output, call.head_dim_v);
  }

 protected:
  template <class U> void carve(char* memory, U*& array, int64_t count) {
    array = reinterpret_cast<U*>(memory + bytes);
    bytes += size_t(round_up(count * int64_t(sizeof(U)), 64));
  }
};

// The same with key tiles that cannot be read in place, as the products read them, so that they are gathered or
// converted once for all query tiles that meet them.
template <class T> struct TileScratch : Scratch<T> {
  TileCache& cache;
  int slots;
  int64_t slot_size;            // elements
  T* packed;                    // [slots] of K, then V
  T *tile_keys, *tile_values;   // (block_kv, ld_key), (block_kv, ld_value) of the tile in work
  bool fresh;                   // to be read from the arrays, and packed

  TileScratch(const Call& call, char* memory)
      : Scratch<T>(call, memory, offset()), cache(*reinterpret_cast<TileCache*>(memory)) {
    slot_size = call.plan.block_kv * (this->ld_key + this->ld_value);
    slots = TileCache::slots_for(slot_size * int64_t(sizeof(T)));
    this->carve(memory, packed, slots * slot_size);
  }

  static constexpr size_t offset() { return size_t(round_up(sizeof(TileCache), 64)); }

  void enter(int64_t pair, int64_t view, int64_t number, int64_t block_kv) {
    bool hit;
    tile_keys = packed + cache.find(pair, view, number, slots, hit) * slot_size;
    tile_values = tile_keys + block_kv * this->ld_key;
    fresh = !hit;
  }
};

template <class T> size_t tile_scratch_bytes(const Call& call) noexcept {
  alignas(64) char none[TileScratch<T>::offset() + 1];
  return TileScratch<T>(call, none).bytes;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
