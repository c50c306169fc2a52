// Register blocking of the matrix products, which determines the layout of scratch and masks.
//
// S is stored transposed, one row per key. S' = K Q' broadcasts elements of K, which needs no packing. Each lane holds
// one query, so that no softmax reduction crosses lanes, and P' is already the packed left operand of O += P V.
#pragma once
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// The accumulators, one row of the right operand and a broadcast scalar fit the 32 or 16 vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kKeyRows = 8, kQueryVectors = 3;  // block of S': 8 keys by 3 vectors of queries
constexpr int kOutputRows = 6, kOutputVectors = 4;
#else
constexpr int kKeyRows = 4, kQueryVectors = 3;
constexpr int kOutputRows = 6, kOutputVectors = 2;
#endif

// A compile-time integer, passed as an argument.
template <int N> struct Count {
  static constexpr int value = N;
};

// Query rows per register block of the decode kernel.
template <class T> constexpr int kRowsAtOnce = kLanes<T> < 4 ? kLanes<T> : 4;

// Calls run(Count<R>, first) for each block of R rows, then for blocks of R / 2, R / 4, ... of the remaining rows.
template <int R, class Run> SPATTN_INLINE void in_blocks(int64_t rows, Run run, int64_t first = 0) {
  for (; rows - first >= R; first += R) run(Count<R>{}, first);
  if constexpr (R > 1) in_blocks<R / 2>(rows, run, first);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
