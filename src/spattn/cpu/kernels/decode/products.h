// Both products of a few rows with keys that vectors hold the features of: S = Q K' by dot products, O += P V by adding
// up multiples of V's rows. K and V are read where a source of rows says that they are.
#pragma once
#include "kernels.h"
#include "simd/element.h"
#include "simd/reduce.h"
#include "softmax/logits.h"

namespace spattn {
namespace SPATTN_ISA {

// How many rows are computed at once: their accumulators, for several keys or features, fill the registers.
template <int N> struct Count {
  static constexpr int value = N;
};
template <class T> constexpr int kRowsAtOnce = kLanes<T> < 4 ? kLanes<T> : 4;

// run(Count<R>, first) for blocks of R rows, then for what is left in halves of R.
template <int R, class Run> SPATTN_INLINE void in_blocks(int64_t rows, Run run, int64_t first = 0) {
  for (; rows - first >= R; first += R) run(Count<R>{}, first);
  if constexpr (R > 1) in_blocks<R / 2>(rows, run, first);
}

// R rows of S, or of other products if they are no scores, for `count` keys, a multiple of kLanes. A vector's worth of
// dot products is finished together.
template <class Stored, int R, bool kScores = true, class Source, class T>
void multiply_keys(const Source& keys, int64_t count, const T* query, int64_t depth, T* scores, int64_t ld_scores) {
  constexpr int L = kLanes<T>, kKeys = L / R, kAtOnce = kKeys < 4 ? kKeys : 4;
  constexpr int64_t kSize = sizeof(typename Stored::Storage);
  for (int64_t key = 0; key < count; key += kKeys) {
    Vec<T> sum[L] = {};
    SPATTN_UNROLL
    for (int first = 0; first < kKeys; first += kAtOnce) {
      keys.prefetch(key + first, kAtOnce);
      for (int64_t d = 0; d < depth; d += L) {
        Vec<T> left[R];
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) left[i] = load<Vec<T>>(query + i * depth + d);
        SPATTN_UNROLL
        for (int j = first; j < first + kAtOnce; ++j) {
          const Vec<T> right = load_elements<Stored>(keys.row(key + j) + d * kSize);
          SPATTN_UNROLL
          for (int i = 0; i < R; ++i) sum[i * kKeys + j] += left[i] * right;
        }
      }
    }
    Vec<T> total = across<Add, T>(sum);
    if (kScores) total = Logits<T>::score(total);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      memcpy(scores + i * ld_scores + key, reinterpret_cast<const char*>(&total) + i * kKeys * sizeof(T),
             kKeys * sizeof(T));
    }
  }
}

// N vectors of R rows of O, from `column` of V on: O = rescale * O + P V, or P V for the first tile of an item.
template <class Stored, int R, int N, class Source, class T>
void multiply_values(const Source& values, int64_t column, int64_t keys, const T* weights, int64_t ld_weight,
                     const T* rescale, T* output, int64_t ld) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const char* row = values.row(key) + column * int64_t(sizeof(typename Stored::Storage));
    values.prefetch(key, 1);
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      const char* at = row + j * L * int(sizeof(typename Stored::Storage));
      right[j] = load_elements<Stored>(at);
    }
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(weights[i * ld_weight + key]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      T* out = output + i * ld + j * L;
      if (rescale) sum[i][j] += load<Vec<T>>(out) * rescale[i];
      store(out, sum[i][j]);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
