// The online softmax of one tile, in base 2, one query per vector lane.
#pragma once
#include "exp2.h"
#include "scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The reference point of a row moves only when the maximum outgrows it by this many bits: weights then stay below 2^8,
// which costs no accuracy, and O is almost never rescaled after the first tiles.
constexpr int kSlack = 8;

// Scores and row_max are sign(scale) * q.k; |scale| * log2(e) multiplies their difference, which is small and nearly
// exact, so that large logits lose nothing. A scale that is or rounds to 0 makes all scores 0 instead: the factor can
// always meet -inf.
template <class T> struct Scale {
  T sign, factor;
  double natural;  // natural logarithms per unit of a score

  explicit Scale(double scale) : sign(scale < 0 ? T(-1) : T(1)), natural(scale < 0 ? -scale : scale) {
    factor = T(natural * 1.4426950408889634074);  // log2(e)
    if (factor == T(0)) sign = T(0), factor = T(1);
  }
};

template <class T> void reset_softmax(int64_t vectors, Scratch<T>& s) {
  for (int64_t i = 0; i < vectors * kLanes<T>; ++i) {
    s.row_max[i] = -kInfinity<T>;
    s.row_sum[i] = s.weight_sum[i] = T(0);
  }
}

template <class T, int N> SPATTN_INLINE Vec<T> add_up(Vec<T> (&terms)[N]) {
  SPATTN_UNROLL
  for (int width = N / 2; width; width /= 2) {
    SPATTN_UNROLL
    for (int i = 0; i < width; ++i) terms[i] += terms[i + width];
  }
  return terms[0];
}

// s.scores: S' becomes P' = exp2(factor * (S' - row_max)), as elements of the path. Updates row_max and row_sum, and
// leaves in s.rescale the factors by which O has to be multiplied.
template <class Path>
void exponentiate(int64_t rows, int64_t vectors, typename Path::T factor, Scratch<typename Path::T>& s) {
  using T = typename Path::T;
  using V = Vec<T>;
  constexpr int L = kLanes<T>, kTerms = Path::kTerms;
  const int64_t ld = s.ld_query;
  for (int64_t column = 0; column < vectors * L; column += L) {
    const V before = load<V>(s.row_max + column), tile_max = load<V>(s.tile_max + column);
    const V row_max = (tile_max - before) * factor > T(kSlack) ? tile_max : before;  // -inf - -inf: NaN, not greater
    const V origin = row_max == -kInfinity<T> ? V{} : row_max;  // nothing allowed yet: exp2(-inf - 0) = 0
    const V rescale = Path::exp2((before - origin) * factor);
    const T* scores = s.scores + column;
    auto* weights = reinterpret_cast<typename Path::Element*>(s.scores) + column;  // never ahead of the scores
    V sum[kKeyRows] = {}, rounded[kKeyRows / kTerms] = {};  // several short sums round less than a long one
    for (int64_t key = 0; key < rows; key += kKeyRows) {
      SPATTN_UNROLL
      for (int i = 0; i < kKeyRows; i += kTerms) {
        V weight[kTerms];
        SPATTN_UNROLL
        for (int t = 0; t < kTerms; ++t) {
          weight[t] = Path::exp2((load<V>(scores + (key + i + t) * ld) - origin) * factor);
          sum[i + t] += weight[t];
        }
        store(weights + (key + i) / kTerms * ld, Path::join(weight, rounded[i / kTerms]));
      }
    }
    store(s.row_max + column, row_max);
    store(s.row_sum + column, load<V>(s.row_sum + column) * rescale + add_up<T>(sum));
    if (kTerms > 1) store(s.weight_sum + column, load<V>(s.weight_sum + column) * rescale + add_up<T>(rounded));
    store(s.rescale + column, rescale);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
