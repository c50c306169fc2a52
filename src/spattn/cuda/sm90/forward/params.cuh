// Kernel parameters and the device form of the plan. The dtypes of tables.py and params.py describe these structs;
// static assertions check that both agree.
#pragma once

#include <cstdint>

#include "sm90/isa/tma.cuh"

namespace spattn {
struct ScoreArgs;  // common/score.cuh
}

namespace spattn::sm90 {

// A view, as a tensor map and as token positions. maps[map] reads k or q; maps[map + 1] reads v or writes out;
// `shift_*` is the view's origin in a map that several views share. For gathered rows, `map` is the index of the view's
// first tile in the row table. `problem` is an index into Params::problems.
struct View {
  int32_t map, shift_y, shift_z, problem;
  int32_t half[3];  // query views: offset of the second warpgroup's TMA box from the first's
  int32_t unused;
  int64_t offset;
  int64_t stride[3];
  int32_t extent[3];
  int32_t box[3];
};

// A work item, whose `slot` says where its rows go:
// slot >= 0: a split-KV partial. Writes float32 rows to the workspace.
// slot == -1: the only source of its rows. Writes the output.
// slot <= -2: an in-kernel reduction. Combines row r of the tile with the partial that an earlier launch left in
// workspace row priors[(-2 - slot) * kBlockQ + r], and writes the output.
struct Work {
  // Lattice coordinates of the query tile's origin: axis 2, 1, 0. For gathered rows, x is the tile's index.
  int32_t query_view, x, y, z;
  int32_t begin, end, key_view, slot;
};

struct Entry {
  // Lattice coordinates of the key tile's origin, and its view, counted from the work item's key_view. For gathered
  // keys, x is the tile's index in its view.
  int32_t x, y, z, view;
};

// A work item of one batch entry and head.
struct Task {
  int32_t item, batch, head_q, head_kv;
};

struct Strides {
  int64_t batch, head, token;  // in elements
};

// Parameters of one problem. A call that is not grouped has one problem.
struct Problem {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  float* partial_out;  // workspace (batch·heads_q, partial_rows, head_dim_v)
  float* partial_lse;  // workspace (batch·heads_q, partial_rows)
  const float* sinks;  // logits of the sinks, one for `sink_rows` rows: see row_sink(); null without kSinks
  Strides q_stride, k_stride, v_stride, out_stride;  // of the arrays of the call, not of their terms
  int64_t partial_rows, q_len;
  int64_t moved;  // run-time kv_len minus the plan's: shifts the views of the last keys (offset > 0)
  int32_t head_dim, head_dim_v;
  int32_t block_q;            // rows of a query tile: kBlockQ, or fewer with one consumer warpgroup
  int32_t q_batch, kv_batch;  // tensor map coordinate of a head: batch * q_batch + head
  int32_t batch_maps;         // tensor map of a batch entry: map + batch * batch_maps
  int32_t heads_q, group;     // group: query heads per key head
  float scale_log2, sign;     // |scale| * log2(e) and the sign of scale; 1 and 0 for scale 0
  int32_t q_offset;           // position of query row 0, without `moved`
  int32_t sink_rows;          // rows per sink: q_len divided by the number of packed heads
  const ScoreArgs* score;     // captured values of the score function; null for the identity
  const float2* scales;       // (batch, heads_q), of dot products and values; null without kFloat8
};

// Parameters of attention.cu; the tables of all problems are concatenated.
struct Params {
  TensorMap maps[SPATTN_MAPS];
  Problem problems[SPATTN_PROBLEMS];
  const Task* tasks;
  const Work* work;
  const Entry* entries;
  const int32_t* entry_masks;
  const uint32_t* masks;
  const View* query_views;
  const View* key_views;
  const int32_t* priors;
  const int32_t* query_rows;  // (query tiles, block_q): row of each query, -1 for padding; null if TMA reads q
  const int32_t* key_rows;    // (key tiles, kBlockKV): position of each key, -1 for padding; gathered KV only
  int32_t* counter;           // task counter: 0 before and after a launch
  const void* terms[3];       // of q, k and v if kTerms > 1: (batch, heads, rows, kTerms, kDim)
  int32_t task_count;
  int32_t kv_len;  // rows of a head in terms[1] and terms[2]
};

// Parameters of merge.cu.
struct Merge {
  const int32_t *rows, *indptr, *sources;
  const int4* heads;  // {begin, end of the rows to combine, batch, head} of every (batch, head)
  const float *partial_out, *partial_lse;
  void* out;
  float* lse;
  const float* sinks;  // see Problem
  int64_t partial_rows, q_len;
  Strides out_stride;
  int32_t heads_q, head_dim_v, head_blocks, sink_rows;  // head_blocks: CTAs per head
};

// Finds the position of row-major cell `cell` of the box that starts at (x, y, z) of a view; returns false for padding.
__device__ __forceinline__ bool cell_position(const View& view, int x, int y, int z, int cell, int64_t& position) {
  const int c2 = x + cell % view.box[2];
  const int c1 = y + cell / view.box[2] % view.box[1];
  const int c0 = z + cell / (view.box[2] * view.box[1]);
  position = view.offset + c0 * view.stride[0] + c1 * view.stride[1] + c2 * view.stride[2];
  return c0 < view.extent[0] && c1 < view.extent[1] && c2 < view.extent[2];
}

}  // namespace spattn::sm90
