// Kernel parameters. params.py describes these structs; each compilation asserts that both agree.
#pragma once
#include "common/element.cuh"
#include "sm80/forward/params.cuh"

namespace spattn::sm80_backward {

using sm80::Array;
using sm80::View;

// spattn.schedule.subtiles.FULL and EMPTY: indices of masks without bits.
constexpr int kFull = -1, kEmpty = -2;

// spattn.schedule.subtiles.SUBTILE_WORK and SUBTILE_ENTRY, spattn.schedule.tasks.TASK
struct Work {
  int view, tile, begin, end, columns, slot, heads;
};

struct Entry {
  int view, tile, part, head;
};

struct Task {
  int item, batch, head_q, head_kv;
};

// The work of one kernel (dK/dV or dQ): a task for every (batch, head) and item; CTAs per task: sub-tiles × parts of
// kRows rows.
struct Pass {
  const View* views;
  const Task* tasks;
  const Work* work;
  const Entry* entries;
  const int* masks;                // (entries, sub-tiles)
  const unsigned long long* bits;  // (n, rows of a sub-tile): bit c of row r of a pair of sub-tiles
  long long partial_rows;
  int subtiles, subtile_rows, subtile_columns,
      row_parts;  // row_parts, column_parts: sub-tiles per row tile, per column tile
  int column_parts, unused;
};

struct Params {
  Array q, k, v, dout, out, lse, dlse;  // dlse.data is null for dlse = 0
  Array scores, values;                 // results: dQ or dK, and dV
  void* statistics;                     // (batch, heads_q, q_len, 2): log-sum-exp and delta
  void *partial_scores, *partial_values;
  double scale;
  long long rows;  // batch * heads_q * q_len
  Pass pass;
  int heads_q, heads_kv, q_len, head_dim, head_dim_v;
};

// Parameters of sum.cu.
struct Rows {
  const int *rows, *indptr, *sources;
  const int4* heads;  // {begin, end of the rows to sum, batch, head} of every (batch, head)
  const void* partial;
  Array target;
  long long partial_rows;
  int heads_count, features, head_blocks, unused;
};

template <typename T>
__device__ inline T* token(const Array& array, int batch, int head, long long position) {
  return sm80::head_of<T>(array, batch, head) + position * array.row;
}

}  // namespace spattn::sm80_backward
