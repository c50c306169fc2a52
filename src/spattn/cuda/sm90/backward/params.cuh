// Kernel parameters, and the device form of the work in schedule/subtiles.py. The dtypes of tables.py and params.py
// describe these structs; static assertions check that both agree.
#pragma once

#include <cstdint>

#include "sm90/forward/params.cuh"

namespace spattn::sm90_backward {

using sm90::Strides;
using sm90::Task;
using sm90::TensorMap;
using sm90::View;  // maps[map + n] is array n: q, dout, dq, row statistics; or k, v, dk, dv

// A work item: two sub-tiles of 64 rows with origins `subtile` (axis 2, 1, 0). Its columns are entries [begin, end),
// for each of `heads` query heads, with views counted from `columns`. slot >= 0: writes float32 partials to the
// workspace; slot <= -2: in-kernel reduction -2 - slot, which adds the other items' partials of its rows.
struct Work {
  int32_t view, begin, end, columns, slot, heads;
  int32_t subtile[2][3];
};

// A sub-tile of 64 columns: its origin as lattice coordinates, view, query head, and masks with the two row sub-tiles.
struct Entry {
  int32_t x, y, z, view, head;
  int32_t masks[2];
  int32_t subtile, rank;  // index of the query sub-tile's sums, and how many additions precede this one
};

// Statistics of a query row: log-sum-exp in base 2 (+inf for an empty row), and rowsum(dout * out) - dlse. The size is
// 16 bytes, the minimum of a TMA box row.
struct alignas(16) Statistic {
  float lse, delta;
  float unused[2];
};

constexpr int kTables = 8;  // captured arrays whose gradients a fused backward can sum

struct Params {
  TensorMap maps[SPATTN_MAPS];
  const Task* tasks;
  const Work* work;
  const Entry* entries;
  const uint32_t* masks;
  const View* row_views;
  const View* column_views;
  const int32_t *rest_indptr, *rest_sources;  // workspace rows to add to each row of an in-kernel reduction, in order
  const void* q;
  const void* k;
  const void* v;
  const void* dout;
  const Statistic* statistics;  // (batch, heads_q, q_len)
  float* partial[2];            // workspaces (batch·heads, partial_rows, features) of dQ or dK, and of dV
  float* query_sums;            // (batch·heads_q, query_subtiles, 64 · features): dQ in accumulator order
  int32_t* added;               // (batch·heads_q, query_subtiles): how many additions these sums have received
  const int32_t* gate;          // null, or a device flag: the kernel does nothing if it is 0
  int32_t* counter;             // task counter: 0 before and after a launch
  Strides q_stride, k_stride, v_stride, dout_stride;
  int64_t partial_rows, q_len;
  int32_t task_count, heads_q, heads_kv, head_dim, head_dim_v, query_subtiles;
  int32_t q_batch, kv_batch;  // tensor map coordinate of a head: batch * q_batch + head
  int32_t batch_maps;         // tensor map of a batch entry: map + batch * batch_maps
  int32_t waits;              // 1: wait for the preceding launch before starting; 0: only before ending
  float scale_log2, sign;     // |scale| * log2(e) and the sign of scale; 1 and 0 for scale 0
  float scale;
  int32_t q_offset;           // position of query row 0
  const ScoreArgs* score;     // captured values of the score function; null for the identity
  unsigned long long* words;  // exact accumulators of the gradients of captured arrays, see table_sums.cuh
  int64_t first[kTables];     // index of each array's first accumulator
};

// Parameters of statistics.cu.
struct Rows {
  const void* dout;
  const void* out;
  const float* lse;
  const float* dlse;  // may be null
  Statistic* statistics;
  int32_t* added;  // set to zero
  Strides dout_stride, out_stride, lse_stride, dlse_stride;
  int64_t rows;  // batch * heads_q * count
  int32_t heads_q, q_len, head_dim_v, added_count;
  int32_t first, count;  // the queries whose statistics are computed
};

// Parameters of sum.cu.
struct Sum {
  const int32_t *rows, *indptr, *sources;
  const int4* heads;  // {begin, end of the rows to sum, batch, head} of every (batch, head)
  const float* partial;
  void* target;
  const int32_t* gate;  // see Params::gate
  Strides target_stride;
  int64_t partial_rows;
  int32_t heads_count, features, head_blocks, unused;  // head_blocks: CTAs per head
};

// Parameters of convert.cu, for the dQ sums of one query view.
struct Converted {
  const float* query_sums;
  const int32_t* added;
  int32_t* nonfinite;  // set to 1 if a sum is not finite
  const View* view;
  const int32_t* subtiles;  // (query_subtiles, 3): lattice coordinates of the origin, axis 2, 1, 0
  void* dq;
  Strides dq_stride;
  int32_t query_subtiles, heads_q, head_dim;
  float scale;
};

}  // namespace spattn::sm90_backward
