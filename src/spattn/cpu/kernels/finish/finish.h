// Epilogue of a forward item: divides the rows of O by their sums and writes them.
#pragma once
#include "finish/exact.h"
#include "finish/results.h"
#include "simd/vec.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The unnormalized rows of an item's O.
template <class T> struct OutputBlock {
  int64_t ld;
  T* data;  // (rows, ld), ld in whole vectors

  OutputBlock(int64_t rows, int64_t ld, Arena& arena) : ld(ld), data(arena.array<T>(rows * ld)) {}

  T* row(int64_t cell) const { return data + cell * ld; }
};

// Multiplies a row of O, in whole vectors, by `factor`; returns whether all values are finite. Adding 0 turns -0 into
// 0: the sign of an underflowed sum would depend on terms of weight 0.
template <class T> bool scale_row(T* row, int64_t width, T factor) {
  IntVec<T> strange = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const Vec<T> x = load<Vec<T>>(row + j) * factor + Vec<T>{};
    store(row + j, x);
    strange |= not_finite(x);
  }
  return !any(strange);
}

// Writes the results of an item: O divided by `divisor`. Non-finite and chosen rows take the float64 fallback.
template <class E, class Output, class T = typename E::Compute>
void finish_item(const Item& item, int64_t cells, Logits<T> logits, const T* divisor, const Positions& position,
                 const RowStatistics<T>& rows, const Output& output, const FallbackRowBuffer& exact) {
  rows.find_lse(cells, logits);
  const Call& call = item.call;
  const Results<E> results(call, item.batch, item.head);
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (position.query[cell] == kPadding) continue;
    const T sum = rows.row_sum[cell];
    T* row = output.row(cell);
    double lse = rows.lse[cell];
    const bool nothing = sum == T(0) && rows.row_max[cell] == -kInfinity<T>;  // no allowed key, or all scores -inf
    if (nothing && !exact.chosen[cell]) {
      lse = -kInfinity<double>;  // log(sum), also where scale 0 makes 0 * row_max undefined
      clear(row, call.head_dim_v);
    } else if (exact.chosen[cell] || sum == T(0) || !scale_row(row, output.ld, T(1) / divisor[cell])) {
      report_nonfinite(call);
      lse = FallbackRow<E>(item, cell, position).compute(exact.sum, row);
    }
    if (item.work.slot < 0) {
      results.write(position.query[cell], row, T(lse));
    } else {
      T* slot = slot_row<T>(call, item.batch, item.head, item.work.slot * call.plan.block_q + cell);
      memcpy(slot, row, size_t(call.head_dim_v) * sizeof(T));
      memcpy(slot + call.head_dim_v, &lse, sizeof lse);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
