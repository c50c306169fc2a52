// Epilogue of a forward item: divides the rows of O by the sums of their weights and writes them.
#pragma once
#include "finish/exact.h"
#include "finish/results.h"
#include "finish/sink.h"
#include "simd/vec.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Multiplies a row of O by `factor`; returns whether all values are finite. `width` is a multiple of kLanes. Adding 0
// turns -0 into 0, because the sign of an underflowed sum would depend on terms of weight 0.
template <class T> bool scale_row(T* row, int64_t width, T factor) {
  IntVec<T> strange = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const Vec<T> x = load<Vec<T>>(row + j) * factor + Vec<T>{};
    store(row + j, x);
    strange |= not_finite(x);
  }
  return !any(strange);
}

// Writes the results of an item, O divided by `divisor` and, with dropout, by 1 - p. Rows that are non-finite or chosen
// in `exact` take the float64 fallback. output(cell) returns the unnormalized row, `ld` values; the statistics of a cell
// are at `first` + cell.
template <class E, class Output, class T = typename E::Compute>
void finish_item(const Item& item, int64_t cells, Logits<T> logits, const T* divisor, const Positions& position,
                 const RowStatistics<T>& rows, int64_t ld, const Output& output, const FallbackRowBuffer& exact,
                 int64_t first = 0) {
  rows.find_lse(first, cells, logits);
  const Call& call = item.call;
  const Sink sink(call, item.head);
  const T kept = call.dropout ? T(call.dropout->factor) : T(1);
  for (int64_t cell = 0; cell < cells; ++cell) {
    if (position.query[cell] == kPadding) continue;
    const T sum = rows.row_sum[first + cell];
    T* row = output(cell);
    double lse = rows.lse[first + cell];
    const bool nothing =
        sum == T(0) && rows.row_max[first + cell] == -kInfinity<T>;  // no allowed key, or all scores -inf
    if (nothing && !exact.chosen[cell]) {
      lse = -kInfinity<double>;  // rows.lse is NaN if the scale is 0: 0 * row_max
      clear(row, call.head_dim_v);
    } else if (exact.chosen[cell] || sum == T(0) || !scale_row(row, ld, kept / divisor[first + cell])) {
      report_nonfinite(call);
      lse = FallbackRow<E>(item, cell, position).compute(exact.sum, row);
    }
    if (item.work.slot < 0) {
      if (sink) sink.add_to(row, call.head_dim_v, lse);
      write_result<E>(call, item.batch, item.head, position.query[cell], row, T(lse));
    } else {
      T* slot = slot_row<T>(call, item.batch, item.head, item.work.slot * call.plan.block_q + cell);
      memcpy(slot, row, size_t(call.head_dim_v) * sizeof(T));
      memcpy(slot + call.head_dim_v, &lse, sizeof lse);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
