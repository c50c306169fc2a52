// The two products of the decode kernel, with features in the lanes: S = Q K' by dot products, O += P V as a sum of
// scaled rows of V. A Source supplies the rows of K and V: rows.h.
#pragma once
#include "kernels.h"
#include "simd/blocking.h"
#include "simd/element.h"
#include "simd/reduce.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// Computes R rows of Q K' for the keys `some`, which are rounded to multiples of kLanes. Reduces kLanes dot products
// across lanes at once.
template <class Stored, int R, class Source, class T>
void multiply_keys(const Source& keys, Keys some, const T* const* query, int64_t depth, T* scores, int64_t ld_scores) {
  constexpr int L = kLanes<T>, kKeys = L / R, kAtOnce = kKeys < 4 ? kKeys : 4;
  constexpr int64_t kSize = sizeof(typename Stored::Storage);
  for (int64_t key = some.begin; key < some.end; key += kKeys) {
    Vec<T> sum[L] = {};
    SPATTN_UNROLL
    for (int first = 0; first < kKeys; first += kAtOnce) {
      keys.prefetch(key + first, kAtOnce);
      for (int64_t d = 0; d < depth; d += L) {
        Vec<T> left[R];
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) left[i] = load<Vec<T>>(query[i] + d);
        SPATTN_UNROLL
        for (int j = first; j < first + kAtOnce; ++j) {
          const Vec<T> right = load_elements<Stored>(keys.row(key + j) + d * kSize);
          SPATTN_UNROLL
          for (int i = 0; i < R; ++i) sum[i * kKeys + j] += left[i] * right;
        }
      }
    }
    const Vec<T> total = across<Add, T>(sum);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      memcpy(scores + i * ld_scores + key, reinterpret_cast<const char*>(&total) + i * kKeys * sizeof(T),
             kKeys * sizeof(T));
    }
  }
}

// Computes O = factor * O + P V for R rows by the N vectors of features from `column` on, with one factor per row, or
// O = P V if `factor` is null.
template <class Stored, int R, int N, class Source, class T>
__attribute__((noinline)) void multiply_values(const Source& values, int64_t column, Keys keys, const T* weights,
                                               int64_t ld_weight, const T* factor, T* const* output) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kSize = sizeof(typename Stored::Storage), kBytes = N * L * kSize;
  Vec<T> sum[R][N] = {};
  const T* left_row[R];
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) left_row[i] = weights + i * ld_weight;
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    values.prefetch(key, 1);
    const char* const row = values.row(key) + column * kSize;
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) right[j] = load_elements<Stored>(row + j * L * kSize);
    if constexpr (kBytes <= 64) __builtin_prefetch(row + kBytes);  // the next features of the row
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(left_row[i][key]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  T* out[R];
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) out[i] = output[i] + column;
  SPATTN_UNROLL
  for (int i = 0; factor && i < R * N; ++i) {
    sum[i / N][i % N] += load<Vec<T>>(out[i / N] + i % N * L) * factor[i / N];
  }
  SPATTN_UNROLL
  for (int i = 0; i < R * N; ++i) store(out[i / N] + i % N * L, sum[i / N][i % N]);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
