// Applies the score functions of scores/*.h to tiles of S, between the score product and the softmax.
//
// A call has one score function, with a parameter per query head. The identity is skipped: the softmax reads unscaled
// scores (logits.h). Other functions replace q.k by f(scale * q.k), which the softmax reads with scale 1. The kernels
// mask the results, so f may return anything for a masked pair. A NaN becomes +inf, which sends its row to the float64
// fallback in every kernel unless the pair is masked.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/tanh.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// Names that scores/*.h use, defined for scalars and for vectors.
#define SPATTN_SCORE SPATTN_INLINE
inline double score_tanh(double x) { return ::tanh(x); }
SPATTN_INLINE Vec<float> score_tanh(Vec<float> x) { return tanh<float>(x); }
SPATTN_INLINE Vec<double> score_tanh(Vec<double> x) { return tanh<double>(x); }
template <class T, class P> SPATTN_INLINE T score_number(P position) {
  if constexpr (sizeof(T) > sizeof(double)) {
    return __builtin_convertvector(position, T);
  } else {
    return T(position);
  }
}

#include "scores/alibi.h"
#include "scores/softcap.h"

// The score function of a query head.
template <class T> struct Score {
  int function;
  T scale, parameter;
  int64_t offset;  // key position that aligns with the first query

  Score(const Call& call, int64_t head)
      : function(call.score), scale(T(call.scale)), parameter(call.score ? T(call.score_values[head]) : T(0)),
        offset(call.kv_len - call.q_len) {}

  explicit operator bool() const { return function != kIdentity; }

  // Calls visit(f) with the score function; does not call it for the identity.
  template <class Visit> void select(const Visit& visit) const {
    if (function == kSoftcap) visit(Softcap{});
    if (function == kAlibi) visit(Alibi{});
  }

  // Returns the score of one pair and writes its derivative to `derivative` unless null.
  double of_pair(double product, int64_t query, int64_t key, double* derivative) const {
    double value = 0;
    select([&](auto f) {
      value = f.value(scale * product, query + offset, key, parameter);
      if (derivative) *derivative = f.derivative(scale * product, query + offset, key, parameter);
    });
    return value;
  }
};

// Loads a vector of positions and adds `offset`.
template <class T> SPATTN_INLINE IntVec<T> lane_positions(const int64_t* from, int64_t offset) {
  IntVec<T> found;
  for (int i = 0; i < kLanes<T>; ++i) found[i] = decltype(found[0] + 0)(from[i] + offset);
  return found;
}

// Replaces the products in `scores` by scores and writes derivatives in the same layout unless null. `rows` and `lanes`
// are the positions along the rows and columns of `scores`. Rows are keys or, if kKeysInLanes, queries; `columns` is a
// multiple of kLanes.
template <bool kKeysInLanes, class T>
__attribute__((noinline)) void apply_score(const Score<T>& score, const int64_t* rows, int64_t count,
                                           const int64_t* lanes, int64_t columns, T* scores, int64_t ld,
                                           T* derivatives = nullptr) {
  const int64_t row_offset = kKeysInLanes ? score.offset : 0, lane_offset = score.offset - row_offset;
  score.select([&](auto function) {
    const Vec<T> scale = splat(score.scale), parameter = splat(score.parameter);
    for (int64_t column = 0; column < columns; column += kLanes<T>) {
      const IntVec<T> along = lane_positions<T>(lanes + column, lane_offset);
      for (int64_t row = 0; row < count; ++row) {
        const int64_t at = row * ld + column;
        const IntVec<T> across = IntVec<T>{} + decltype(along[0] + 0)(rows[row] + row_offset);
        const IntVec<T> query = kKeysInLanes ? across : along, key = kKeysInLanes ? along : across;
        const Vec<T> scaled = load<Vec<T>>(scores + at) * scale;
        const Vec<T> value = function.value(scaled, query, key, parameter);
        store(scores + at, value == value ? value : splat(kInfinity<T>));
        if (derivatives) store(derivatives + at, function.derivative(scaled, query, key, parameter));
      }
    }
  });
}

// Applies the score function to a register block of R keys by N vectors of queries; uses `scores` as a buffer.
template <int R, int N, class T>
SPATTN_INLINE void apply_to_block(const Score<T>& score, const int64_t* keys, const int64_t* queries, T* scores,
                                  int64_t ld, Vec<T> (&block)[R][N], T* derivatives = nullptr) {
  constexpr int L = kLanes<T>;
  SPATTN_UNROLL
  for (int i = 0; i < R * N; ++i) store(scores + i / N * ld + i % N * L, block[i / N][i % N]);
  apply_score<false>(score, keys, R, queries, N * L, scores, ld, derivatives);
  SPATTN_UNROLL
  for (int i = 0; i < R * N; ++i) block[i / N][i % N] = load<Vec<T>>(scores + i / N * ld + i % N * L);
}

// Multiplies dS by the derivatives of the score function, in place; writes 0 where the weight is 0, as the derivative
// may be NaN there.
template <class T>
void multiply_derivatives(const T* weights, const T* derivatives, int64_t count, T* gradients) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> product = load<Vec<T>>(gradients + i) * load<Vec<T>>(derivatives + i);
    store(gradients + i, load<Vec<T>>(weights + i) != T(0) ? product : Vec<T>{});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
