// Parameters of the kernels that apply a dynamic mask, given by device-side indices. __init__.py fills these structs;
// static assertions check that both agree.
//
// table.cu turns the indices into a table that looks up a pair in constant time, tiles.cu selects the plan's tiles that
// hold an allowed pair, and masks.cu writes the bitmasks of the partial ones.
#pragma once

#include <cstdint>

#include "sm90/forward/params.cuh"

namespace spattn::sm90 {

enum Form : int32_t {
  kBlocks,     // table: per query block, a bit per key block
  kLengths,    // table: the first allowed key, and one past the last
  kDocuments,  // table: the document of each token, -1 before the first and kNowhere after the last
  kLines       // table: a bit per column, then one per diagonal
};

constexpr int32_t kNowhere = INT32_MAX;

// An index array and the table that it fills, one mask after the other.
struct Table {
  const void* source;
  int64_t batch_stride, head_stride, row_stride, stride;  // of `source`, in elements
  uint32_t* target;
  int64_t target_stride;              // words per mask
  int32_t form, wide;                 // wide: indices are int64
  int32_t heads, rows, count, limit;  // limit: larger indices are ignored
  int32_t words, left;                // words: per table row; left: padding precedes the keys (kLengths)
  int32_t* masks_taken;               // reset to 0 for tiles.cu
};

// A bitmask to write for an entry of a new work item: the dynamic mask intersected with the plan's bitmask `mask`.
struct Job {
  int32_t item, entry, mask;
};

// Parameters of tiles.cu and masks.cu: the plan, and the new tables with prefix new_.
struct Select {
  const Work* work;
  const Entry* entries;
  const int32_t* entry_masks;
  const uint32_t* masks;
  const View* query_views;
  const View* key_views;
  const int32_t* items;       // per new work item: the plan's work item
  const int32_t* selections;  // per new work item: the mask
  const int64_t* starts;      // per new work item: its first entry
  Work* new_work;
  Entry* new_entries;
  int32_t* new_entry_masks;
  uint32_t* new_masks;
  Job* jobs;
  int32_t* masks_taken;
  const uint32_t* table;
  int64_t table_stride;
  int32_t form, count, warpgroups, mask_room;
  int32_t words, block_q, block_kv, unused;  // words: per table row
  int32_t q_len, q_offset;                   // row r is query r % q_len, at position q_offset + r % q_len
};

}  // namespace spattn::sm90
