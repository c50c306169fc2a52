// What the kernels of this folder are given: the passes of schedule/slabs.py in the form that request/layout.py uploads, and the
// parameters that params.py fills. The dtypes there describe these structs; each compilation asserts that both agree.
#pragma once

#include <cstdint>

#include "hopper/params.cuh"

namespace spattn::hopper_backward {

using hopper::Strides;
using hopper::Task;
using hopper::TensorMap;
using hopper::View;  // maps[map + n] is that of array n: q, dout, dq, row statistics; or k, v, dk, dv

// A work item: two slabs of 64 rows at the first lattice coordinates axis 2, 1, 0; columns [begin, end) of the entries,
// for each of `heads` query heads, of views counted from `columns`. slot >= 0: it writes float32 rows to the workspace;
// slot <= -2: it is finisher number -2 - slot, which adds what others have left of its rows there.
struct Work {
  int32_t view, begin, end, columns, slot, heads;
  int32_t slab[2][3];
};

// A slab of 64 columns: first lattice coordinates, view, query head, and the mask of each of the two slabs of rows.
struct Entry {
  int32_t x, y, z, view, head;
  int32_t masks[2];
  int32_t slab, rank;  // of the query: number of its sums, and how many are added to them before
};

// What a query row brings to every pair of it: log-sum-exp in base 2 (+inf for a row that attends to nothing) and
// rowsum(dout * out) - dlse. 16 bytes, because the copy engine copies no less.
struct alignas(16) Statistic {
  float lse, delta;
  float unused[2];
};

struct Params {
  TensorMap maps[SPATTN_MAPS];
  const Task* tasks;
  const Work* work;
  const Entry* entries;
  const uint32_t* masks;
  const View* row_views;
  const View* column_views;
  const int32_t *rest_indptr, *rest_sources;  // of the rows of finishers: workspace rows, in the order to add them
  const void* q;
  const void* k;
  const void* v;
  const void* dout;
  const Statistic* statistics;  // (batch, heads_q, q_len)
  float* partial[2];            // workspaces (batch·heads, partial_rows, features): of dQ or dK, and of dV
  float* query_sums;            // (batch·heads_q, query_slabs, 64 · features): dQ in the order of accumulators
  int32_t* added;               // (batch·heads_q, query_slabs): how often something was added to them
  const int32_t* gate;          // null, or where 0 says that there is nothing to do
  int32_t* counter;             // work-stealing counter: 0 before and after a launch
  Strides q_stride, k_stride, v_stride, dout_stride;
  int64_t partial_rows, q_len;
  int32_t task_count, heads_q, heads_kv, head_dim, head_dim_v, query_slabs;
  int32_t q_batch, kv_batch;  // map coordinate of a head: batch * q_batch + head
  int32_t batch_maps;         // map of a batch entry: map + batch * batch_maps
  int32_t waits;              // for the launch before; otherwise it runs beside it, and ends after it
  float scale_log2, sign;     // |scale| * log2(e) and the sign of scale; 1 and 0 for scale 0
  float scale;
};

// What statistics.cu is given.
struct Rows {
  const void* dout;
  const void* out;
  const float* lse;
  const float* dlse;  // or null
  Statistic* statistics;
  int32_t* added;  // set to zero
  Strides dout_stride, out_stride, lse_stride, dlse_stride;
  int64_t rows;  // batch * heads_q * q_len
  int32_t heads_q, q_len, head_dim_v, added_count;
};

// What sum.cu is given.
struct Sum {
  const int32_t *rows, *indptr, *sources;
  const int4* heads;  // {first merge, last merge, batch, head} of every (batch, head)
  const float* partial;
  void* target;
  const int32_t* gate;  // as above
  Strides target_stride;
  int64_t partial_rows;
  int32_t heads_count, features, head_blocks, unused;  // head_blocks: CTAs of a head
};

// What convert.cu is given: the sums of dQ of one query view.
struct Converted {
  const float* query_sums;
  const int32_t* added;
  int32_t* nonfinite;  // becomes 1 where a sum is not finite
  const View* view;
  const int32_t* slabs;  // (query_slabs, 3): first lattice coordinates, axis 2, 1, 0
  void* dq;
  Strides dq_stride;
  int32_t query_slabs, heads_q, head_dim;
  float scale;
};

}  // namespace spattn::hopper_backward
