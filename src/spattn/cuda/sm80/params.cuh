// Kernel parameters: arrays, the plan's records and the launch lists. sm80/params.py describes these structs; static
// assertions check that both agree.
#pragma once

#ifndef SPATTN_TABLES
#define SPATTN_TABLES 0  // captured arrays of a score function, in a kernel that accumulates their gradients
#endif

namespace spattn {
struct ScoreArgs;  // common/score.cuh
}

namespace spattn::sm80 {

constexpr int kAxes = 3;

// spattn.planning.contract.types.VIEW: an affine lattice of positions, cut into boxes.
struct View {
  long long offset;
  long long stride[kAxes];
  int extent[kAxes];
  int box[kAxes];
  int grid[kAxes];
  int tiles;
};

// spattn.planning.contract.types.COMPONENT
struct Component {
  int query_view, key_view, first_row, query_tiles, variant;
};

// spattn.planning.contract.types.WORK
struct Work {
  int component, query_tile, begin, end, slot;
};

// An array (batch, heads, rows, columns); strides in elements.
struct Array {
  char* data;
  long long batch, head, row, column;
};

// Score function of a call (common/score.cuh).
struct ScoreParams {
  const ScoreArgs* args;  // null for the identity, which reads none of these fields
  double scale;           // factor on q · k
  int query_offset;       // position of query row 0: kv_len - q_len
};

// Tasks (work items or combines) per variant, for all (batch, head) pairs that use the variant. The tasks of a head are
// adjacent, so that concurrent CTAs share its K and V in L2.
struct LaunchList {
  const int* task_indptr;         // (variants + 1): offsets of each variant's tasks
  const int* head_indptr;         // (variants + 1): offsets of each variant's range in `heads`
  const int* heads;               // batch * heads_q + head
  const long long* first_number;  // (variants + 1): index of each variant's first (task, head) pair
  long long numbers;
  int variants;
};

struct Params {
  Array q, k, v, out;
  void* lse;              // (batch, heads_q, q_len), or null if not requested
  void* partial;          // workspace: (batch * heads_q, slots, block_q, head_dim_v)
  void* partial_lse;      // workspace: (batch * heads_q, slots, block_q)
  const void* sinks;      // (heads_q,): logits of the sinks, of the type of lse; null without kSinks
  long long first_block;  // index of this launch's first CTA; a grid has at most 2^31 - 1 CTAs
  double scale_log2;      // |scale| · log2(e), 1 if scale is 0; log2(e) with a score function
  int sign;               // sign of scale, multiplied into Q so that scale_log2 is positive; 1 with a score function
  int heads_q;
  int group;  // heads_q / heads_kv
  int head_dim, head_dim_v;
  const View* views;
  const Component* components;
  const int* indices;
  const int* key_view;
  const int* mask;
  const unsigned long long* masks;
  const Work* work;
  const int* merge_rows;
  const int* merge_indptr;
  const int* merge_sources;
  LaunchList items, merges;
  int q_len, slots, block_q;
  ScoreParams score;
};

// A task for one head.
struct Task {
  int number;      // index of a work item or a combine of the plan
  int batch_head;  // batch * heads_q + head
};

// Returns the task with index `number` in the launch list.
__device__ inline Task find_task(const LaunchList& list, long long number) {
  int variant = 0;
  for (int after = list.variants; after - variant > 1;) {
    const int middle = (variant + after) / 2;
    (list.first_number[middle] <= number ? variant : after) = middle;
  }
  const long long local = number - list.first_number[variant];
  const int first = list.task_indptr[variant];
  const int tasks = list.task_indptr[variant + 1] - first;
  const int head = static_cast<int>(local / tasks);
  return {first + static_cast<int>(local - static_cast<long long>(head) * tasks),
          list.heads[list.head_indptr[variant] + head]};
}

// Returns the address of an array's first element for one head.
template <typename T>
__device__ inline T* head_of(const Array& array, int batch, int head) {
  return reinterpret_cast<T*>(array.data) + batch * array.batch + head * array.head;
}

// Returns the position of cell `cell` of tile `tile` of a view, -1 for padding. Divides only if the view has more than
// one axis. Positions are 32-bit; partial sums may wrap modulo 2^32.
__device__ inline int position_of(const View& view, int tile, int cell) {
  const int box1 = view.box[1], box2 = view.box[2], grid1 = view.grid[1], grid2 = view.grid[2];
  int at0 = 0, at1 = 0, at2 = cell;
  if (box1 != 1 || view.box[0] != 1) {
    const int rest = cell / box2;
    at2 = cell - rest * box2;
    at0 = rest / box1;
    at1 = rest - at0 * box1;
  }
  int tile0 = 0, tile1 = 0, tile2 = tile;
  if (grid1 != 1 || view.grid[0] != 1) {
    const int rest = tile / grid2;
    tile2 = tile - rest * grid2;
    tile0 = rest / grid1;
    tile1 = rest - tile0 * grid1;
  }
  at0 += tile0 * view.box[0];
  at1 += tile1 * box1;
  at2 += tile2 * box2;
  const bool inside = at0 < view.extent[0] && at1 < view.extent[1] && at2 < view.extent[2];
  const unsigned position = static_cast<unsigned>(view.offset) + static_cast<unsigned>(view.stride[0]) * at0 +
                            static_cast<unsigned>(view.stride[1]) * at1 + static_cast<unsigned>(view.stride[2]) * at2;
  return inside ? static_cast<int>(position) : -1;
}

}  // namespace spattn::sm80

namespace spattn::sm80_backward {

using sm80::Array;
using sm80::ScoreParams;
using sm80::View;

// Sentinel mask indices of full and empty sub-tiles, which have no bitmask: FULL and EMPTY of schedule.subtiles.
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

// Work of one kernel (dK/dV or dQ): a task per (batch, head) and item, a CTA per kRows rows of each sub-tile.
struct Pass {
  const View* views;
  const Task* tasks;
  const Work* work;
  const Entry* entries;
  const int* masks;                // (entries, sub-tiles)
  const unsigned long long* bits;  // (n, rows of a sub-tile): bit c of row r allows that pair
  long long partial_rows;
  int subtiles, subtile_rows, subtile_columns,
      row_parts;  // sub-tiles per row tile and, in column_parts, per column tile
  int column_parts, unused;
};

#if SPATTN_TABLES
// Destinations of the gradients of captured arrays. The elements of all arrays have consecutive numbers; a launch
// accumulates elements [begin, begin + count).
struct Captured {
  void* words;  // (count, 10): accumulators (common/accumulator.cuh)
  long long begin, count;
  long long first[SPATTN_TABLES];  // number of each array's first element
  void* direct[SPATTN_TABLES];     // gradients that are stored without an accumulator
};
#endif

// Parameters of captured.cu, which converts accumulators to numbers. It reads `words`, or `exact` if the device flag
// `gate` is set; `gate` may be null.
struct Accumulated {
  const void* words;
  const void* exact;
  const int* gate;
  void* target;
  long long count;
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
  ScoreParams score;
  const int* gate;  // null, or a device flag: the kernel does nothing if it is 0
#if SPATTN_TABLES
  Captured captured;
#endif
};

__device__ inline bool is_skipped(const Params& params) { return params.gate != nullptr && *params.gate == 0; }

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
