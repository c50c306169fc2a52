// Register blocking of the matrix products, which determines the layout of scratch and masks.
//
// Scores are transposed, one row per key: S' = K Q' reads keys as scalars without packing, the softmax statistics of
// adjacent queries share a vector, so that no reduction crosses lanes, and P' is already the packed left operand of
// O += P V.
#pragma once
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// Accumulators fill the 32 or 16 vector registers, except for one row of the right operand and a broadcast scalar.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kKeyRows = 8, kQueryVectors = 3;  // S': 8 keys by 3 vectors of queries
constexpr int kOutputRows = 6, kOutputVectors = 4;
#else
constexpr int kKeyRows = 4, kQueryVectors = 3;
constexpr int kOutputRows = 6, kOutputVectors = 2;
#endif

// Compile-time blocks of rows or columns.
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
