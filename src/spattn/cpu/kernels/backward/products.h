// The five matrix products of a tile's backward, all on one register-blocked micro-kernel:
// P' = exp2(factor * K Q' - lse2), dS' = P' o (V dO' - delta), dV += P' dO, dK += dS' Q, dQ += dS K.
#pragma once
#include "backward/queries.h"
#include "backward/scratch.h"
#include "simd/vec.h"
#include "softmax/logits.h"
#include "softmax/score.h"
#include "softmax/weights.h"
#include "tile/mask.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// sum[i][j] = sum over n < depth of left[i * row + n * step] * (vector j of row n of `right`).
template <class T, int R, int N>
SPATTN_INLINE void multiply(const T* left, int64_t row, int64_t step, const T* right, int64_t ld, int64_t depth,
                            Vec<T> (&sum)[R][N]) {
  for (int64_t n = 0; n < depth; ++n) {
    Vec<T> factor[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) factor[j] = load<Vec<T>>(right + n * ld + j * kLanes<T>);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> scalar = splat(left[i * row + n * step]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += scalar * factor[j];
    }
  }
}

// Operands of a key tile.
template <class T> struct KeyTile {
  Operand<T> keys, values;
  int64_t rows;   // key cells, rounded up to kKeyRows
  int64_t cells;  // query cells
  Mask mask;
};

// kKeyRows rows of P' and dS' by N vectors of queries.
template <class T, int N, bool kMasked>
void weight_block(const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column, const Score<T>& score,
                  SplitLogits<T> logits, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kBits = LaneMask<T>::kBits;
  const int64_t ld = s.width.query, at = key * ld + column;
  Vec<T> product[kKeyRows][N] = {};
  multiply(tile.keys.data + key * tile.keys.ld, tile.keys.ld, 1, s.query + column, ld, call.head_dim, product);
  if (score) {
    T* const scores = s.weights + at;
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows * N; ++i) store(scores + i / N * ld + i % N * L, product[i / N][i % N]);
    apply_score<false>(score, s.rows.position.key + key, kKeyRows, s.rows.position.query + column, N * L, scores, ld,
                       s.derivatives + at);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows * N; ++i) product[i / N][i % N] = load<Vec<T>>(scores + i / N * ld + i % N * L);
  }
  const Word<T>* allowed = s.mask.words(key, column);
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> lse2 = load<Vec<T>>(s.rows.lse2 + column + j * L);
    const Vec<T> lse2_low = load<Vec<T>>(s.rows.lse2_low + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      Vec<T> weight = normalised_weight<T>(logits.exponent(product[i][j], lse2, lse2_low), lse2);
      if (kMasked) {
        const BitsVec<T> bit = load<BitsVec<T>>(allowed + j * L) & splat_bits<T>(Word<T>(1) << (key % kBits + i));
        weight = masked_weight<T>(weight, bit);
      }
      store(s.weights + at + i * ld + j * L, weight);
    }
  }
  Vec<T> gradient[kKeyRows][N] = {};
  multiply(tile.values.data + key * tile.values.ld, tile.values.ld, 1, s.dout + column, ld, call.head_dim_v, gradient);
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> delta = load<Vec<T>>(s.rows.delta + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      const Vec<T> weight = load<Vec<T>>(s.weights + at + i * ld + j * L);
      store(s.gradients + at + i * ld + j * L, score_gradient<T>(weight, gradient[i][j] - delta));
    }
  }
}

// Computes s.weights = P' and s.gradients = dS', the gradient of the scores that a score function gives.
template <class T>
void compute_weights(const Call& call, const KeyTile<T>& tile, const Score<T>& score, SplitLogits<T> logits,
                     BackwardScratch<T>& s) {
  const auto mark = [&](int64_t key, int64_t column) {
    store(s.weights + key * s.width.query + column, Vec<T>{});
    store(s.gradients + key * s.width.query + column, Vec<T>{});
  };
  const int64_t vectors = (tile.cells + kLanes<T> - 1) / kLanes<T>;
  s.mask.each_block({0, tile.rows}, vectors, bool(tile.mask), mark, [&](auto some, int64_t key, int64_t column) {
    constexpr int N = decltype(some)::value;
    if (tile.mask) {
      weight_block<T, N, true>(call, tile, key, column, score, logits, s);
    } else {
      weight_block<T, N, false>(call, tile, key, column, score, logits, s);
    }
  });
}

// Adds to rows [key, key + R) of N vectors of dK or dV: the queries [begin, end) of `left` times `right`.
template <class T, int R, int N>
SPATTN_INLINE void add_keys(const T* left, Operand<T> right, int64_t begin, int64_t end, int64_t key, int64_t column,
                            T* sums, int64_t ld, int64_t first_key, const BackwardScratch<T>& s) {
  Vec<T> sum[R][N] = {};
  multiply(left + key * s.width.query + begin, s.width.query, 1, right.data + begin * right.ld + column, right.ld,
           end - begin, sum);
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    const int64_t position = s.rows.position.key[key + i];
    if (position == kPadding) continue;
    T* row = sums + (position - first_key) * ld + column;
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) store(row + j * kLanes<T>, load<Vec<T>>(row + j * kLanes<T>) + sum[i][j]);
  }
}

// Adds to R rows of dK or dV the remaining columns in blocks of N vectors.
template <class T, int R, int N>
SPATTN_INLINE void add_key_columns(const T* left, Operand<T> right, int64_t begin, int64_t end, int64_t key, T* sums,
                                   int64_t ld, int64_t first_key, int64_t& column, const BackwardScratch<T>& s) {
  for (; right.ld - column >= N * kLanes<T>; column += N * kLanes<T>) {
    add_keys<T, R, N>(left, right, begin, end, key, column, sums, ld, first_key, s);
  }
}

template <class T, int R>
void add_key_block(const KeyTile<T>& tile, int64_t key, const Sums& sums, const BackwardScratch<T>& s) {
  int64_t begin = 0, end = tile.cells;
  if (tile.mask) tile.mask.reach_queries(key, R, begin, end);
  if (begin == end) return;
  const auto add = [&](const T* left, Operand<T> right, char* to, int64_t ld) {
    int64_t column = 0;
    T* out = reinterpret_cast<T*>(to);
    add_key_columns<T, R, kOutputVectors>(left, right, begin, end, key, out, ld, sums.begin, column, s);
    if (kOutputVectors > 2) add_key_columns<T, R, 2>(left, right, begin, end, key, out, ld, sums.begin, column, s);
    add_key_columns<T, R, 1>(left, right, begin, end, key, out, ld, sums.begin, column, s);
  };
  add(s.weights, {s.raw.dout, s.width.value}, sums.dv, sums.ld_dv);
  add(s.gradients, {s.raw.query, s.width.key}, sums.dk, sums.ld_dk);
}

// dV += P' dO and dK += dS' Q.
template <class T> void add_key_gradients(const KeyTile<T>& tile, const Sums& sums, const BackwardScratch<T>& s) {
  static_assert(kOutputRows == 6 && kKeyRows % 4 == 0, "the remainders below");
  int64_t key = 0;
  for (; tile.rows - key >= 6; key += 6) add_key_block<T, 6>(tile, key, sums, s);
  if (tile.rows - key == 4) add_key_block<T, 4>(tile, key, sums, s);
  if (tile.rows - key == 2) add_key_block<T, 2>(tile, key, sums, s);
}

// Rows [row, row + R) of N vectors of dQ: += dS K.
template <class T, int R, int N>
SPATTN_INLINE void add_query_columns(const KeyTile<T>& tile, int64_t row, int64_t begin, int64_t end, int64_t& column,
                                     BackwardScratch<T>& s) {
  for (; s.width.key - column >= N * kLanes<T>; column += N * kLanes<T>) {
    Vec<T> sum[R][N] = {};
    multiply(s.gradients + begin * s.width.query + row, 1, s.width.query,
             tile.keys.data + begin * tile.keys.ld + column, tile.keys.ld, end - begin, sum);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      T* out = s.rows.dq + (row + i) * s.width.key + column;
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) store(out + j * kLanes<T>, load<Vec<T>>(out + j * kLanes<T>) + sum[i][j]);
    }
  }
}

template <class T, int R> void add_query_block(const KeyTile<T>& tile, int64_t row, BackwardScratch<T>& s) {
  int64_t begin = 0, end = tile.rows, column = 0;
  if (tile.mask) tile.mask.reach(row, R, begin, end);
  add_query_columns<T, R, kOutputVectors>(tile, row, begin, end, column, s);
  if (kOutputVectors > 2) add_query_columns<T, R, 2>(tile, row, begin, end, column, s);
  add_query_columns<T, R, 1>(tile, row, begin, end, column, s);
}

// dQ += dS K, for the query cells and up to one more.
template <class T> void add_query_gradients(const KeyTile<T>& tile, BackwardScratch<T>& s) {
  static_assert(kOutputRows == 6, "the remainders below");
  int64_t row = 0;
  for (; tile.cells - row > 4; row += 6) add_query_block<T, 6>(tile, row, s);
  for (; tile.cells - row > 0; row += 2) add_query_block<T, 2>(tile, row, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
