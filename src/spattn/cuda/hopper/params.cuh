// What a launch is given: the plan in the form that request/layout.py uploads, and the parameters that params.py fills. The
// dtypes there describe these structs; each compilation asserts that both agree.
#pragma once

#include <cstdint>

#include "hopper/tma.cuh"

namespace spattn::hopper {

// A view as TMA sees it (maps[map] reads k or q, maps[map + 1] reads v or writes out; `shift_*` adds the place of the
// view inside a map that several views share) and as positions of the sequence. Where places are looked up, `map` is the
// number of its first tile in the table of rows instead. It belongs to one of the launch's problems.
struct View {
  int32_t map, shift_y, shift_z, problem;
  int32_t half[3];  // query views: coordinates of the second warpgroup's box relative to the first's
  int32_t cells;    // of a box; one of keys may have fewer than a tile has: those of cells that are left are anything
  int64_t offset;
  int64_t stride[3];
  int32_t extent[3];
  int32_t box[3];
};

// A work item. slot >= 0: it writes float32 rows to the workspace. slot == -1: it alone knows its rows and writes the
// output. slot <= -2: it writes the output of rows that one other item has put into the workspace in an earlier launch;
// row r of the tile finds them in workspace row priors[(-2 - slot) * kBlockQ + r].
struct Work {
  // First lattice coordinates of the query tile: axis 2, 1, 0. Where rows are looked up, x is the tile's number.
  int32_t query_view, x, y, z;
  int32_t begin, end, key_view, slot;
};

struct Entry {
  // First lattice coordinates of the key tile, and its view, counted from the work item's key_view. Where keys are
  // looked up, x is the tile's number in its view.
  int32_t x, y, z, view;
};

// A work item of one head.
struct Task {
  int32_t item, batch, head_q, head_kv;
};

struct Strides {
  int64_t batch, head, token;  // in elements
};

// What the problems of a launch differ in. An ordinary call is one problem.
struct Problem {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  float* partial_out;  // workspace (batch·heads_q, partial_rows, head_dim_v)
  float* partial_lse;  // workspace (batch·heads_q, partial_rows)
  Strides q_stride, k_stride, v_stride, out_stride;
  int64_t partial_rows, q_len;
  int64_t moved;  // by which views of the last keys, those with an offset, lie further on than they say
  int32_t head_dim, head_dim_v;
  int32_t block_q;            // rows of a query tile: kBlockQ or, where one warpgroup computes it, fewer
  int32_t q_batch, kv_batch;  // map coordinate of a head: batch * q_batch + head
  int32_t batch_maps;         // map of a batch entry: map + batch * batch_maps
  int32_t heads_q, group;     // group: query heads that share a head of keys
  float scale_log2, sign;     // |scale| * log2(e) and the sign of scale; 1 and 0 for scale 0
};

// The tables are those of all problems, one problem's after the other's.
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
  const int32_t* query_rows;  // (query tiles, block_q): the row of each query, -1 for padding; null where TMA reads q
  const int32_t* key_rows;    // (key tiles, kBlockKV): the key of each cell, -1 for padding, where keys are looked up
  int32_t* counter;           // work-stealing counter: 0 before and after a launch
  int32_t task_count;
  int32_t short_tiles;  // whether a box of keys has fewer cells than a tile
};

// What merge.cu is given.
struct Merge {
  const int32_t *rows, *indptr, *sources;
  const int4* heads;  // {first merge, last merge, batch, head} of every (batch, head)
  const float *partial_out, *partial_lse;
  void* out;
  float* lse;
  int64_t partial_rows, q_len;
  Strides out_stride;
  int32_t heads_q, head_dim_v, head_blocks, unused;  // head_blocks: CTAs of a head
};

// Position of row-major cell `cell` of the box that starts at (x, y, z) of a view; false for padding.
__device__ __forceinline__ bool cell_position(const View& view, int x, int y, int z, int cell, int64_t& position) {
  const int c2 = x + cell % view.box[2];
  const int c1 = y + cell / view.box[2] % view.box[1];
  const int c0 = z + cell / (view.box[2] * view.box[1]);
  position = view.offset + c0 * view.stride[0] + c1 * view.stride[1] + c2 * view.stride[2];
  return c0 < view.extent[0] && c1 < view.extent[1] && c2 < view.extent[2];
}

}  // namespace spattn::hopper
