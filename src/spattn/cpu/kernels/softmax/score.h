// Score functions of scores/*.h on tiles of S: a pass between the score product and the softmax.
//
// A score function is a property of the call and has a parameter per query head. The identity has no pass: the softmax
// takes unscaled scores (logits.h). Otherwise the pass replaces the products q.k by f(scale * q.k), which the softmax
// takes with scale 1. Masks and maxima come after the pass, so f may give anything at a masked pair. A NaN becomes
// +inf, which sends its row to the float64 fallback in every path; masks make it -inf.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/tanh.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// What scores/*.h need, for numbers and for vectors.
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
  int64_t offset;  // position of the first query

  Score(const Call& call, int64_t head)
      : function(call.score), scale(T(call.scale)), parameter(call.score ? T(call.score_values[head]) : T(0)),
        offset(call.kv_len - call.q_len) {}

  explicit operator bool() const { return function != kIdentity; }

  // Calls visit(f) with an instance of the function's type.
  template <class Visit> void select(const Visit& visit) const {
    if (function == kSoftcap) visit(Softcap{});
    if (function == kAlibi) visit(Alibi{});
  }

  // The score of one pair and, unless null, its derivative.
  double of_pair(double product, int64_t query, int64_t key, double* derivative) const {
    double value = 0;
    select([&](auto f) {
      value = f.value(scale * product, query + offset, key, parameter);
      if (derivative) *derivative = f.derivative(scale * product, query + offset, key, parameter);
    });
    return value;
  }
};

// Positions of the lanes of a vector.
template <class T> SPATTN_INLINE IntVec<T> lane_positions(const int64_t* from, int64_t offset) {
  IntVec<T> found;
  for (int i = 0; i < kLanes<T>; ++i) found[i] = decltype(found[0] + 0)(from[i] + offset);
  return found;
}

// Replaces products by scores, and writes the derivatives, unless null, in the same layout. `rows` and `lanes` are the
// positions of the rows and of the columns, in whole vectors, of `scores`; rows are keys or, if kKeysInLanes, queries.
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

// Applies the score function to a block of products in registers: kKeyRows keys by N vectors of queries. `scores` holds
// them for the time of the call.
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

// dS of the products, given that of the scores; 0 for weight 0, where the derivative may be NaN.
template <class T>
void multiply_derivatives(const T* weights, const T* derivatives, int64_t count, T* gradients) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const Vec<T> product = load<Vec<T>>(gradients + i) * load<Vec<T>>(derivatives + i);
    store(gradients + i, load<Vec<T>>(weights + i) != T(0) ? product : Vec<T>{});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
