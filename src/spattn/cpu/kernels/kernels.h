// Interface of the Cython core, the dispatcher and the kernels: plain data and function pointers.
//
// It must not define inline functions: each instruction set compiles this header with its own flags, and the linker
// could keep the AVX-512 copy of an inline function for all of them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "records.h"  // View, Component, Work, Unit, Instruction, Variant and Use, generated from the NumPy dtypes

namespace spattn {

enum Dtype { kFloat32, kFloat64, kFloat16, kBfloat16, kDtypes };

// Operations of score programs. The suffix is the dtype of the last operand: f, i or b (float, integer, truth value).
// clang-format off
#define SPATTN_OPERATIONS(X) \
  X(input_product) X(input_scale) X(input_b) X(input_h) X(input_q) X(input_k) X(input_offset) \
  X(number_f) X(number_i) X(number_b) X(look_up) \
  X(add_f) X(sub_f) X(mul_f) X(div_f) X(floordiv_f) X(mod_f) X(pow_f) X(neg_f) X(abs_f) X(minimum_f) X(maximum_f) \
  X(exp_f) X(log_f) X(tanh_f) X(sigmoid_f) X(sqrt_f) X(sign_f) X(adjoint_f) X(multiply_add_f) X(where_f) \
  X(eq_f) X(ne_f) X(lt_f) X(le_f) X(to_int_f) \
  X(add_i) X(sub_i) X(mul_i) X(floordiv_i) X(mod_i) X(neg_i) X(abs_i) X(minimum_i) X(maximum_i) X(where_i) \
  X(eq_i) X(ne_i) X(lt_i) X(le_i) X(to_float_i) \
  X(and_b) X(or_b) X(xor_b) X(not_b) X(to_int_b) X(to_float_b)
// clang-format on
#define SPATTN_OPERATION_(name) k_##name,
enum Operation { SPATTN_OPERATIONS(SPATTN_OPERATION_) kOperations };
#undef SPATTN_OPERATION_

// Spaces of registers: cpu/_score.py. A register is `space << kSpaceShift | index`. A register of kPairs holds a strip
// of rows of a tile, a register of kTiles a whole tile. kProducts is S before the scale.
enum Space { kScalars, kQueries, kKeys, kDiagonals, kPairs, kTiles, kProducts, kSingle };
constexpr int kSpaceShift = 24;

constexpr const char* kOperationNames[] = {
#define SPATTN_OPERATION_(name) #name,
    SPATTN_OPERATIONS(SPATTN_OPERATION_)
#undef SPATTN_OPERATION_
};

// _score.py::TABLE_DTYPES
enum TableDtype {
  kTableFloat32,
  kTableFloat64,
  kTableFloat16,
  kTableBfloat16,
  kTableInt8,
  kTableInt16,
  kTableInt32,
  kTableInt64,
  kTableUint8,
  kTableUint16,
  kTableUint32,
  kTableUint64,
  kTableBool
};

constexpr int kMostAxes = 8;
// Exact accumulator of an element of the gradient of a table or of the sinks: word w < 9 counts multiples of
// 2^(32 w - 160), the last has flags.
constexpr int kSumWords = 10;
enum SumFlag { kPlusInfinity = 1, kMinusInfinity = 2, kNotANumber = 4 };

// An array that a score function looks up.
struct ScoreTable {
  const char* data;
  int64_t shape[kMostAxes], stride[kMostAxes];  // in bytes
  int32_t dtype, axes;
  // Backward: `sums` are accumulators of the elements [begin, end) of the gradient. `direct` replaces them if each
  // element has at most one term: the gradient itself, contiguous, in the compute type. Both null: no gradient.
  int64_t* sums;
  char* direct;
  int64_t begin, end;
};

// A score function: _score.py::Encoded.
struct ScoreProgram {
  const Instruction* instructions;
  const int32_t* indices;
  const Variant* variants;
  const Use* uses;
  int32_t scalars, registers[8];
  const double* numbers;
  const ScoreTable* tables;
  int64_t most_axes;
  // Backward: the batch entries, query heads and queries [begin, end) whose items run; others have no terms of the
  // elements that this pass sums.
  int64_t batches[2], heads[2], queries[2];
  bool shared;  // whether several threads add to the accumulators
};

// Dropout of attention weights: softmax/dropout.h.
struct DropoutWords {
  uint32_t threshold;                   // 2^32 times the share of dropped pairs
  double factor;                        // of the kept weights
  const uint32_t *offset, *multiplier;  // (batch, heads_q, q_len)
  const uint32_t* key;                  // (batch, heads_q, kv_len)
};

struct Plan {
  const View* views;
  const Component* components;
  const int32_t* indptr;
  const int64_t* tile_indptr;
  const int32_t *indices, *key_view, *mask;
  const uint64_t* masks;
  const Work* work;
  const int32_t *merge_rows, *merge_indptr, *merge_sources;
  const int32_t *q_order, *kv_order;  // (variants, q_len), (variants, kv_len): permutations; null: identity
  int64_t block_q, block_kv, slots;
};

// A four-dimensional array, (batch, head, position, feature); strides are in bytes and may be negative.
struct Array {
  char* data;
  int64_t stride[4];
};

// Softmax statistics of a row in the float64 fallback: the maximum unscaled score, the sum of the weights
// exp((score - largest) * |scale|) and, in the backward, the sum of weight * (dO . V).
struct Normaliser {
  double largest, total, product;
};

struct Call {
  Plan plan;
  Array q, k, v, out, lse;
  Array dout, dlse, dq, dk, dv;  // backward only; null dlse.data: zeros
  Array exact_k, exact_v;        // the caller's K and V, for the float64 fallback; `k` or `v` may be a finite copy
  // (batch, heads_kv, kv_len): whether a key is non-finite; null: none is. Rows that may attend to one take the
  // float64 fallback.
  const uint8_t* marked;
  int* nonfinite;  // output: 1 if a row of the result is, or might be, non-finite
  // Backward: rows with |lse| > far_lse, except -inf, take the float64 fallback, which computes their weights from
  // `normalisers`, (batch, heads_q, q_len); null: there are no such rows.
  double far_lse;
  Normaliser* normalisers;
  int64_t q_len, kv_len;
  int64_t heads_q, group;  // query heads; query heads per key-value head
  int64_t together;        // query heads per forward task: 1 or `group`
  int64_t head_dim, head_dim_v;
  double scale;
  const double* sinks;          // (heads_q): logits of the sinks, -inf for a head without one; null: no sinks
  int64_t* dsinks;              // backward output, (batch, heads_q, kSumWords): gradients of the sinks; null: unwanted
  const uint8_t* sink_rows;     // (q_len): rows whose terms `dsinks` has; null: all
  const ScoreProgram* score;    // null: the identity
  const DropoutWords* dropout;  // null: none
  char* slots;                  // split-KV partials: partial_row() in finish/results.h
};

// Maximum q_len for which a task computes all heads of a group, so that it reads K and V once: decode/decode.h.
constexpr int64_t kFewQueries = 16;

// Each thread has scratch_bytes() bytes of scratch, 64-byte aligned, which keep their contents between the items of a
// pass. Number of leading bytes that are zero before the first item:
constexpr size_t kZeroedScratch = 2176;

// Computes `count` work items for Call::together heads from `head` on, in `scratch`.
using ItemsFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work*, int64_t count,
                               char* scratch) noexcept;
// Processes one work item.
using ItemFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work&, char* scratch) noexcept;
// Combines the split-KV partials of rows [begin, end) of the plan's merge_rows.
using MergeFunction = void (*)(const Call&, int64_t batch, int64_t head, int64_t begin, int64_t end,
                               char* scratch) noexcept;

// Accumulators of one gradient unit, which runs on one thread: rows [begin, end) of dK and dV of a key-value head. Rows
// hold values of the compute type and are padded to a multiple of 64 bytes; `ld` is in elements.
struct Sums {
  char *dk, *dv;
  int64_t ld_dk, ld_dv, begin, end;
};

// Computes the backward of one work item: writes dQ of its rows and adds its terms to dK and dV.
using BackwardFunction = void (*)(const Call&, int64_t batch, int64_t head, const Work&, const Sums&,
                                  char* scratch) noexcept;
// Writes rows [begin, end) of dK and dV of a key-value head: the sum over `count` units.
using AddFunction = void (*)(const Call&, int64_t batch, int64_t head_kv, const Sums*, int64_t count, int64_t begin,
                             int64_t end, char* scratch) noexcept;

// Computes the gradient of the sink of a query head over the rows of a batch entry.
using HeadFunction = void (*)(const Call&, int64_t batch, int64_t head, char* scratch) noexcept;

using ScratchFunction = size_t (*)(const Call&) noexcept;

// Kernels of a dtype.
struct ForwardKernels {
  ScratchFunction scratch_bytes;
  ItemsFunction run;
  MergeFunction merge;
};

struct BackwardKernels {
  ScratchFunction scratch_bytes;
  ItemFunction normalise;  // adds an item's keys to the softmax statistics of its rows
  BackwardFunction run;
  MergeFunction merge_dq;
  AddFunction add_units;
  HeadFunction sink_gradient;
};

struct KernelTable {
  const char* name;
  const ForwardKernels* forward[kDtypes];
  const BackwardKernels* backward[kDtypes];
};

namespace baseline { extern const KernelTable table; }
namespace avx2 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
namespace avx512bf16 { extern const KernelTable table; }
namespace amx { extern const KernelTable table; }

// Returns the sum that an exact accumulator of kSumWords words holds, within 2^-50 of it.
double exact_sum(const int64_t* words) noexcept;

// Lists the tables that this build includes and this machine supports, best first; returns their number.
constexpr int kMaxTables = 5;
int usable_tables(const KernelTable** tables) noexcept;

}  // namespace spattn
