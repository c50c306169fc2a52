// The online softmax of one tile, in base 2, one query per vector lane.
#pragma once
#include "exp2.h"
#include "scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The reference point of a row moves only when the maximum outgrows it by this many bits: weights then stay below 2^8,
// which costs no accuracy, and O is almost never rescaled after the first tiles.
constexpr int kSlack = 8;

template <class T> void reset_softmax(int64_t vectors, Scratch<T>& s) {
  for (int64_t i = 0; i < vectors * kLanes<T>; ++i) {
    s.row_max[i] = -kInfinity<T>;
    s.row_sum[i] = T(0);
  }
}

// s.scores: S' becomes P' = exp2(S' - row_max). Updates row_max and row_sum, and leaves in s.rescale the factors by
// which what was accumulated so far has to be multiplied.
template <class T> void exponentiate(int64_t rows, int64_t vectors, Scratch<T>& s) {
  constexpr int L = kLanes<T>;
  using V = Vec<T>;
  const int64_t ld = s.ld_query;
  for (int64_t column = 0; column < vectors * L; column += L) {
    const V before = load<V>(s.row_max + column), tile_max = load<V>(s.tile_max + column);
    const V row_max = tile_max > before + T(kSlack) ? tile_max : before;
    const V origin = row_max == -kInfinity<T> ? V{} : row_max;  // nothing allowed yet: exp2(-inf - 0) = 0
    const V rescale = exp2<T>(before - origin);
    V sum = load<V>(s.row_sum + column) * rescale;
    T* scores = s.scores + column;
    for (int64_t key = 0; key < rows; ++key) {
      const V weight = exp2<T>(load<V>(scores + key * ld) - origin);
      store(scores + key * ld, weight);
      sum += weight;
    }
    store(s.row_max + column, row_max);
    store(s.row_sum + column, sum);
    store(s.rescale + column, rescale);
  }
}

template <class T> void rescale_output(int64_t cells, Scratch<T>& s) {
  for (int64_t i = 0; i < cells; ++i) {
    if (s.rescale[i] == T(1)) continue;
    T* row = s.output + i * s.ld_value;
    for (int64_t j = 0; j < s.ld_value; ++j) row[j] *= s.rescale[i];
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
