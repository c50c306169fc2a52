// Register-blocked micro-kernel of the matrix products, and transposition of their operands.
#pragma once
#include "simd/vec.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Adds left[i * row + n * step] * right[n][j] to sum[i][j] for every n that `terms` visits; j counts vectors.
template <class Path, int R, int N, class Terms>
SPATTN_INLINE void multiply(const typename Path::Element* left, int64_t row, int64_t step,
                            Operand<typename Path::Element> right, const Terms& terms,
                            Vec<typename Path::T> (&sum)[R][N]) {
  using Vector = typename Path::Vector;
  terms.template each<Path::kTerms>([&](int64_t n) __attribute__((always_inline)) {
    Vector factor[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) factor[j] = load<Vector>(right.data + n * right.ld + j * kLanes<typename Path::T>);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vector scalar = Path::splat(left[i * row + n * step]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = Path::multiply_add(sum[i][j], scalar, factor[j]);
    }
  });
}

// Loads a block of kLanes x kLanes elements, multiplies it by `factor` and transposes it.
template <class Path, class T = typename Path::T>
SPATTN_INLINE void transpose_block(const typename Path::Element* from, int64_t ld, T factor,
                                   Vec<T> (&block)[kLanes<T>]) {
  SPATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i)
    block[i] = (Vec<T>)Path::times(load<typename Path::Vector>(from + i * ld), factor);
  transpose<T>(block);
}

// Writes the transpose of factor * from to `to`, (width, rows). `from` is padded to multiples of kLanes.
template <class Path, class U, class T = typename Path::T>
void transpose_rows(const typename Path::Element* from, int64_t ld_from, int64_t rows, int64_t width, T factor, U* to,
                    int64_t ld_to) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L) {
    for (int64_t d = 0; d < width; d += L) {
      Vec<T> block[L];
      transpose_block<Path>(from + first * ld_from + d, ld_from, factor, block);
      for (int i = 0; i < L && i < width - d; ++i) store(to + (d + i) * ld_to + first, block[i]);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
