// What the kernels that select tiles are given; select.py fills it, and each compilation asserts that both agree.
//
// A selection is what indices on the device allow. select_table.cu turns them into a table in which a pair is looked up
// in a step or two, select_tiles.cu looks at the tiles of a plan and keeps those that hold an allowed pair, and
// select_masks.cu writes the bitmasks of those that hold others, too.
#pragma once

#include <cstdint>

#include "hopper/params.cuh"

namespace spattn::hopper {

enum Form : int32_t {
  kBlocks,     // table: for each block of queries a bit for each block of keys
  kLengths,    // table: the first key and the one after the last
  kDocuments,  // table: for each token the number of its document, -1 in front of the first one and kNowhere behind all
  kLines       // table: a bit for each column, then one for each diagonal
};

constexpr int32_t kNowhere = INT32_MAX;

// An array of indices and the rows of the table that it fills: those of every selection, one after the other.
struct Table {
  const void* source;
  int64_t batch_stride, head_stride, row_stride, stride;  // of `source`, in elements
  uint32_t* target;
  int64_t target_stride;              // words from one selection's part to the next
  int32_t form, wide;                 // wide: of int64
  int32_t heads, rows, count, limit;  // limit: numbers from here on stand for none
  int32_t words, left;
  int32_t* masks_taken;  // set to 0 for select_tiles.cu
};

// A bitmask that is to be written: of an entry of a new item, of which the plan has this one.
struct Job {
  int32_t item, entry, mask;
};

struct Select {
  const Work* work;
  const Entry* entries;
  const int32_t* entry_masks;
  const uint32_t* masks;
  const View* query_views;
  const View* key_views;
  const int32_t* items;       // which item of the plan, and
  const int32_t* selections;  // which selection, each new item is made of
  const int64_t* starts;      // where the entries of each new item may start
  Work* new_work;
  Entry* new_entries;
  int32_t* new_entry_masks;
  uint32_t* new_masks;
  Job* jobs;
  int32_t* masks_taken;
  const uint32_t* table;
  int64_t table_stride;
  int32_t form, count, warpgroups, mask_room;
  int32_t words, block_q, block_kv, unused;  // words: of a row of the table
  int32_t q_len, q_offset;                   // row r is query r % q_len, and stands at q_offset + r % q_len
};

}  // namespace spattn::hopper
