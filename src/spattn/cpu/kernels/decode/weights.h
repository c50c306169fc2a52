// The softmax of a few rows whose keys lie in vectors: scores become weights along the keys.
#pragma once
#include "kernels.h"
#include "simd/native.h"
#include "simd/reduce.h"
#include "softmax/softmax.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// Marks the pairs of a row that are not allowed; the lanes' largest scores.
template <class T> Vec<T> mask_scores(const uint64_t* bits, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  Vec<T> largest = splat(-kInfinity<T>);
  BitsVec<T> lane;
  for (int i = 0; i < L; ++i) lane[i] = Word<T>(1) << i;
  for (int64_t key = 0; key < count; key += L) {
    Vec<T> score = load<Vec<T>>(scores + key);
    if (bits) {
      score = Logits<T>::masked(score, splat_bits<T>(Word<T>(bits[key / 64] >> (key % 64))) & lane);
      store(scores + key, score);
    }
    largest = larger(score, largest);
  }
  return largest;
}

// S becomes P, as in exponentiate(): a row's keys lie in lanes, but its statistics where move_reference() has them.
template <class T>
void weigh_rows(const Mask& mask, bool first, int64_t cells, int64_t count, int64_t rows, Logits<T> logits, T* matrix,
                int64_t ld, const RowStatistics<T>& s) {
  constexpr int L = kLanes<T>;
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    Vec<T> largest[R];
    for (int i = 0; i < R; ++i) {
      const uint64_t* bits = mask ? mask.bits + (row + i) % cells * mask.words : nullptr;
      largest[i] = mask_scores(bits, count, matrix + (row + i) * ld);
    }
    store(s.tile_max + row, across<Larger, T>(largest));
  });
  const int64_t vectors = (rows + L - 1) / L;
  first ? s.set_reference(vectors, logits) : s.move_reference(vectors, logits);
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    Vec<T> sum[R];
    for (int i = 0; i < R; ++i) {
      T* scores = matrix + (row + i) * ld;
      const Vec<T> reference = splat(s.reference[row + i]);
      Vec<T> total = {};
      for (int64_t key = 0; key < count; key += L) {
        store(scores + key, weigh<T>(logits.exponent(load<Vec<T>>(scores + key), reference), total));
      }
      sum[i] = total;
    }
    Vec<T> after = across<Add, T>(sum);
    if (!first) after += load<Vec<T>>(s.row_sum + row) * load<Vec<T>>(s.rescale + row);
    memcpy(s.row_sum + row, &after, R * sizeof(T));
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
