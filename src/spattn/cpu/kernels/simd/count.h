// Compile-time blocks of rows or columns.
#pragma once
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

template <int N> struct Count {
  static constexpr int value = N;
};

// Rows of a block: their accumulators, for several keys or features, fill the registers.
template <class T> constexpr int kRowsAtOnce = kLanes<T> < 4 ? kLanes<T> : 4;

// Calls run(Count<R>, first) for blocks of R rows, then for the remainder in halves of R.
template <int R, class Run> SPATTN_INLINE void in_blocks(int64_t rows, Run run, int64_t first = 0) {
  for (; rows - first >= R; first += R) run(Count<R>{}, first);
  if constexpr (R > 1) in_blocks<R / 2>(rows, run, first);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
