// What the Cython core, the dispatcher and every instruction set's kernels share: plain data and function pointers.
//
// Nothing here may be an inline function: each instruction set compiles this header with its own flags, and an inline
// function emitted with AVX-512 instructions could be the copy that the linker keeps for all of them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "records.h"  // View, Component, Work and Unit, as NumPy has them

namespace spattn {

enum Dtype { kFloat32, kFloat64, kFloat16, kBfloat16, kDtypes };

struct Plan {
  const View* views;
  const Component* components;
  const int32_t* indptr;
  const int64_t* tile_indptr;
  const int32_t *indices, *key_view, *mask;
  const uint64_t* masks;
  const Work* work;
  const int32_t *merge_rows, *merge_indptr, *merge_sources;
  const int32_t *q_order, *kv_order;  // (variants, q_len), (variants, kv_len): what is at each place; null: its number
  int64_t block_q, block_kv, slots;
};

// A four-dimensional array (batch, head, position, feature); strides in bytes, of any sign.
struct Array {
  char* data;
  int64_t stride[4];
};

// How the exact path normalises a row: the largest score, the sum of all weights exp((score - largest) * |scale|) and,
// in the backward, that of the weights times dO V'.
struct Normaliser {
  double largest, total, product;
};

struct Call {
  Plan plan;
  Array q, k, v, out, lse;
  Array dout, dlse, dq, dk, dv;  // the backward's; dlse without data is zero
  Array exact_k, exact_v;        // as the exact path reads them: the caller's, where `k` or `v` is a copy
  // (batch, heads_kv, kv_len): keys whose numbers the tiles cannot do; rows that may attend to one are left to the
  // exact path. Null: none.
  const uint8_t* marked;
  int* nonfinite;           // becomes 1 when a row comes out non-finite, or might have
  double far_lse;           // of the backward: rows whose |lse| is above it, but for -inf, are left to the exact path,
  Normaliser* normalisers;  // (batch, heads_q, q_len), which finds their weights with these. Null: there are none
  int64_t q_len, kv_len;
  int64_t heads_q, group;  // query heads; query heads per key-value head
  int64_t together;        // query heads that a task of the forward computes: 1, or the whole group
  // How far keys of one view lie apart, where items of few queries meet each so often that it pays to interleave K for
  // them: decode/interleaved.h. 0: not so.
  int64_t reach;
  int64_t head_dim, head_dim_v;
  double scale;
  char* slots;  // see slot_row() in finish/results.h, dq_slot() in backward/sums.h
};

// Up to this many queries a task computes the heads of a group together, which are read K and V for once:
// decode/decode.h.
constexpr int64_t kFewQueries = 16;

// Scratch is scratch_bytes() bytes, 64-byte aligned, one per thread and the same for all items of a pass. What an item
// leaves there the next one finds. Before the first one, this many bytes at its beginning are zero:
constexpr size_t kZeroedScratch = 2176;

// Computes `count` work items for Call::together heads from `head` on, in `scratch`.
using ItemsFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work*, int64_t count,
                               char* scratch) noexcept;
// The same of one.
using ItemFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work&, char* scratch) noexcept;
// Combines the partial results of the merges [begin, end) of the plan.
using MergeFunction = void (*)(const Call&, int64_t batch, int64_t head, int64_t begin, int64_t end,
                               char* scratch) noexcept;

// Where a unit of the backward, one that runs on one thread, adds up dK and dV of a key-value head: rows of the type
// that the kernel computes in, of whole 64-byte blocks, for the keys [begin, end). `ld` counts elements from key to
// key.
struct Sums {
  char *dk, *dv;
  int64_t ld_dk, ld_dv, begin, end;
};

// The backward of one work item: dQ of its rows, and their part of dK and dV.
using BackwardFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work&, const Sums&,
                                  char* scratch) noexcept;
// Writes dK and dV of the keys [begin, end) of a key-value head, the sum over `count` units.
using AddFunction = void (*)(const Call&, int64_t batch, int64_t head_kv, const Sums*, int64_t count, int64_t begin,
                             int64_t end, char* scratch) noexcept;

using ScratchFunction = size_t (*)(const Call&) noexcept;

struct KernelTable {
  const char* name;
  ScratchFunction scratch_bytes[kDtypes];
  ItemsFunction forward[kDtypes];
  MergeFunction merge[kDtypes];
  ScratchFunction backward_scratch_bytes[kDtypes];
  ItemFunction normalise[kDtypes];  // adds an item's keys to the normalisers of its rows
  BackwardFunction backward[kDtypes];
  MergeFunction merge_dq[kDtypes];
  AddFunction add_units[kDtypes];
};

namespace baseline { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
namespace avx512bf16 { extern const KernelTable table; }
namespace amx { extern const KernelTable table; }

// Writes the tables that this build has and this machine can run, best first, at most kMaxTables; returns how many.
constexpr int kMaxTables = 5;
int usable_tables(const KernelTable** tables) noexcept;

}  // namespace spattn
