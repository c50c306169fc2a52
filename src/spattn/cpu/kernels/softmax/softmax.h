// Online softmax with one query per vector lane: updates row statistics and converts the scores of a tile to weights.
#pragma once
#include "kernels.h"
#include "simd/native.h"
#include "softmax/logits.h"
#include "softmax/weights.h"
#include "tile/arena.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The running maximum changes only if a score exceeds it by more than this many bits. Weights stay below 2^8, without
// loss of accuracy, and O is rarely rescaled after the first tiles.
constexpr int kSlack = 8;

template <class T> struct RowStatistics {
  T *row_max, *reference;   // running maximum, too small by at most kSlack bits; its Logits::reference()
  T *row_sum, *weight_sum;  // sum of the weights; sum of the rounded weights, in kernels that round them
  T *tile_max, *rescale;    // maximum score of the current tile; factor by which it rescales O and the sums
  double* lse;

  RowStatistics(int64_t rows, Arena& arena)
      : row_max(arena.array<T>(rows)), reference(arena.array<T>(rows)), row_sum(arena.array<T>(rows)),
        weight_sum(arena.array<T>(rows)), tile_max(arena.array<T>(rows)), rescale(arena.array<T>(rows)),
        lse(arena.array<double>(rows)) {}

  void reset(int64_t vectors) const {
    for (int64_t i = 0; i < vectors * kLanes<T>; ++i) {
      row_max[i] = -kInfinity<T>;
      reference[i] = T(0);
      row_sum[i] = weight_sum[i] = T(0);
    }
  }

  // Computes the log-sum-exp of `count` rows from `first` on; `count` is rounded up to the vector length.
  void find_lse(int64_t first, int64_t count, Logits<T> logits) const {
    constexpr int64_t kRows = kLanes<double>;
    for (const int64_t end = first + count; first < end; first += kRows) {
      SPATTN_UNROLL
      for (int64_t i = first; i < first + kRows; ++i) lse[i] = logits.lse(row_max[i], reference[i], row_sum[i]);
    }
  }

  // Updates row_max and `reference` from tile_max, and computes `rescale`. This separate loop lets the dependency
  // chains of several vectors overlap. `rescale` is exp2(old - new reference), hence exactly 1 if the reference does
  // not change. If it were computed from row_max, each tile would add a rounding error of the reference.
  void move_reference(int64_t vectors, Logits<T> logits) const {
    using V = Vec<T>;
    for (int64_t column = 0; column < vectors * kLanes<T>; column += kLanes<T>) {
      const V before = load<V>(row_max + column), largest = load<V>(tile_max + column);
      const V after = (largest - before) * logits.factor > T(kSlack) ? largest : before;  // NaN if both are -inf
      const V start = logits.reference(after);
      const V moved = load<V>(reference + column) - start;
      store(rescale + column, exp2<T>(before == -kInfinity<T> ? before : kFused ? moved : moved * logits.factor));
      store(row_max + column, after);
      store(reference + column, start);
    }
  }
};

// Returns the pairwise sum of N terms; N is a power of 2.
template <int N, class V> SPATTN_INLINE V add_up(const V* terms) {
  if constexpr (N == 1) {
    return terms[0];
  } else {
    return add_up<N / 2>(terms) + add_up<N / 2>(terms + N / 2);
  }
}

// Replaces S' of the keys [begin, end) in `matrix`, (keys, ld), by P' in the path's element format, and updates the
// statistics. Not inlined, because the loop needs all registers.
template <class Path, class T = typename Path::T>
__attribute__((noinline)) void exponentiate(int64_t begin, int64_t end, int64_t vectors, Logits<T> logits, T* matrix,
                                            int64_t ld, const RowStatistics<T>& rows) {
  using V = Vec<T>;
  constexpr int kTerms = Path::kTerms, kSums = kKeyRows / kTerms;
  rows.move_reference(vectors, logits);
  for (int64_t column = 0; column < vectors * kLanes<T>; column += kLanes<T>) {
    const V reference = load<V>(rows.reference + column), rescale = load<V>(rows.rescale + column);
    const T* scores = matrix + begin * ld + column;
    // In place: the loop never writes a weight over an unread score.
    auto* weights = reinterpret_cast<typename Path::Element*>(matrix) + begin / kTerms * ld + column;
    V sum[kSums] = {}, rounded[kSums] = {};  // several short sums have less rounding error than a long one
    for (int64_t key = begin; key < end; key += kKeyRows, scores += kKeyRows * ld, weights += kKeyRows / kTerms * ld) {
      SPATTN_UNROLL
      for (int i = 0; i < kSums; ++i) {
        V weight[kTerms];
        SPATTN_UNROLL
        for (int t = 0; t < kTerms; ++t) {
          const V score = load<V>(scores + (i * kTerms + t) * ld);
          weight[t] = weigh<T, typename Path::Exp>(logits.exponent(score, reference), sum[i]);
        }
        store(weights + i * ld, Path::join(weight, rounded[i]));
      }
    }
    store(rows.row_sum + column, load<V>(rows.row_sum + column) * rescale + add_up<kSums>(sum));
    if (kTerms > 1) {
      store(rows.weight_sum + column, load<V>(rows.weight_sum + column) * rescale + add_up<kSums>(rounded));
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
