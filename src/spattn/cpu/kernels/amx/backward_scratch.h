// A thread's working memory for one item of the bfloat16 backward on AMX tiles.
#pragma once
#include "amx/strips.h"
#include "backward/scratch.h"
#include "kernels.h"

namespace spattn {
namespace SPATTN_ISA {

// Every product takes whole steps of kTileTerms terms, so each operand is padded with zeros to them. As everywhere, S'
// and its kin have one row per key. A block is kTileTerms keys: what one step of dQ' = K' dS' takes. Two keys that lie
// kTileRows apart in it make a pair. Arrays with two sides serve two neighbouring blocks or entries in turn.
//
// Of the base class, the three `..._rows` hold bfloat16 rows of `depth` features, `scores` and `score_gradients` S' and
// dP' of two blocks, `allowed` one block's bitmask, and `dq` is filled last.
struct TileBackwardScratch : BackwardScratch<float> {
  int64_t depth_key, depth_value;  // head_dim and head_dim_v, rounded up to whole steps
  int64_t terms;                   // queries, likewise
  int64_t blocks;                  // of a tile

  uint32_t *query_columns, *dout_columns;  // (depth / 2, ld_query): pairs of features
  uint32_t *query_pairs, *dout_pairs;      // (terms / 2, ld_key or ld_value): pairs of queries
  uint16_t *key_rows, *value_rows;         // (2 sides, block_kv, depth): K and V that cannot be read in place
  uint16_t* weights;                       // (2 sides, kTileTerms, terms): P' of a block
  uint16_t* gradients;                     // (2 sides, kTileTerms, terms): dS' of a block
  uint32_t* gradient_pairs;                // (2 sides, block_kv / 2, ld_query): dS' of an entry, pairs of keys
  int64_t *first_active, *last_active;     // (2 sides, blocks): the vectors of queries that attend to a block
  uint16_t* key_columns;                   // (depth_key, block_kv): K', the keys of a block pair after pair
  float* dq_columns;                       // (depth_key, ld_query): dQ'
  float* partial;                          // (kTileTerms, ld_key or ld_value): dK or dV of a block; 16 x 16 of O dO'
  Strip* strips;                           // as many as can wait

  TileBackwardScratch(const Call& call, char* memory) : BackwardScratch<float>(call, memory) {
    const int64_t block_kv = call.plan.block_kv, ld_sums = ld_key > ld_value ? ld_key : ld_value;
    depth_key = round_up(call.head_dim, kTileTerms);
    depth_value = round_up(call.head_dim_v, kTileTerms);
    terms = round_up(ld_query, kTileTerms);
    blocks = block_kv / kTileTerms;
    carve(memory, query_columns, depth_key / 2 * ld_query);
    carve(memory, dout_columns, depth_value / 2 * ld_query);
    carve(memory, query_pairs, terms / 2 * ld_key);
    carve(memory, dout_pairs, terms / 2 * ld_value);
    carve(memory, key_rows, 2 * block_kv * depth_key);
    carve(memory, value_rows, 2 * block_kv * depth_value);
    carve(memory, weights, 2 * kTileTerms * terms);
    carve(memory, gradients, 2 * kTileTerms * terms);
    carve(memory, gradient_pairs, 2 * block_kv / 2 * ld_query);
    carve(memory, first_active, 2 * blocks);
    carve(memory, last_active, 2 * blocks);
    carve(memory, key_columns, depth_key * block_kv);
    carve(memory, dq_columns, depth_key * ld_query);
    carve(memory, partial, kTileTerms * ld_sums);
    const int64_t key_strips = (depth_key + depth_value) / kTileTerms, query_strips = terms / kTileTerms;
    carve(memory, strips, key_strips + query_strips * (2 + depth_key / kTileTerms));
  }
};

inline size_t tile_backward_scratch_bytes(const Call& call) noexcept {
  alignas(64) char none[1];
  return TileBackwardScratch(call, none).bytes;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
