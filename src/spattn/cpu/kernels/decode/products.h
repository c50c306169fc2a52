// Both products of a few rows with keys that vectors hold the features of: S = Q K' by dot products, O += P V by adding
// up multiples of V's rows. K and V are read where a source of rows says that they are.
#pragma once
#include "decode/count.h"
#include "kernels.h"
#include "simd/blocking.h"
#include "simd/element.h"
#include "simd/reduce.h"
#include "softmax/logits.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// R rows of S, or of other products if they are no scores, for some keys, whole vectors. A vector's worth of dot
// products is finished together.
template <class Stored, int R, bool kScores = true, class Source, class T>
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
    Vec<T> total = across<Add, T>(sum);
    if (kScores) total = Logits<T>::score(total);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      memcpy(scores + i * ld_scores + key, reinterpret_cast<const char*>(&total) + i * kKeys * sizeof(T),
             kKeys * sizeof(T));
    }
  }
}

// N vectors of R rows of O, from `column` of V on, for some keys: O = rescale * O + P V, or P V for the first tile of an item.
template <class Stored, int R, int N, class Source, class T>
__attribute__((noinline)) void multiply_values(const Source& values, int64_t column, Keys keys, const T* weights,
                                               int64_t ld_weight, const T* rescale, T* const* output) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kSize = sizeof(typename Stored::Storage), kBytes = N * L * kSize;
  // So few sums would wait for each other's additions: even and odd keys have their own, if there are registers for both
  // and for what is multiplied.
  constexpr int kSums = R * N <= 8 && 2 * R * N + N < kRegisters ? 2 : 1;
  Vec<T> sums[kSums][R][N] = {};
  values.each(keys, [&](auto which, int64_t key, const char* row) __attribute__((always_inline)) {
    Vec<T>(&sum)[R][N] = sums[decltype(which)::value % kSums];
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      right[j] = load_elements<Stored>(row + (column + j * L) * kSize);
    }
    if constexpr (kBytes <= 64) __builtin_prefetch(row + column * kSize + kBytes);  // a cache line for the next columns
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(weights[i * ld_weight + key]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  });
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      T* out = output[i] + column + j * L;
      Vec<T> sum = sums[0][i][j];
      if constexpr (kSums > 1) sum += sums[1][i][j];
      if (rescale) sum += load<Vec<T>>(out) * rescale[i];
      store(out, sum);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
