// The five matrix products of a tile's backward, all on one register-blocked micro-kernel:
// P' = exp2(factor * K Q' - lse2), dS' = P' o (V dO' - delta), dV += P' dO, dK += dS' Q, dQ += dS K.
#pragma once
#include "backward/queries.h"
#include "backward/scratch.h"
#include "simd/exp2.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "simd/vec.h"

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

// The operands of one key tile.
template <class T> struct KeyTile {
  Operand<T> keys, values;
  int64_t rows;   // key cells, rounded up to kKeyRows
  int64_t cells;  // query cells
  Mask mask;
};

// kKeyRows rows of P' and dS' by N vectors of queries.
template <class T, int N, bool kMasked>
void weight_block(const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column,
                  Split<T> factor, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>, kBits = 8 * sizeof(T);
  const int64_t ld = s.ld_query, at = key * ld + column;
  Vec<T> score[kKeyRows][N] = {};
  multiply(tile.keys.data + key * tile.keys.ld, tile.keys.ld, 1, s.query + column, ld, call.head_dim, score);
  const Word<T>* allowed = s.allowed + key / kBits * ld + column;
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> lse2 = load<Vec<T>>(s.lse2 + column + j * L);
    const Vec<T> lse2_low = load<Vec<T>>(s.lse2_low + column + j * L);
    const auto present = lse2 != kInfinity<T>;  // where a row is left out K may be infinite, and 0 * inf is NaN
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      Vec<T> weight = exp2<T>((score[i][j] * factor.high - lse2) + (score[i][j] * factor.low - lse2_low));
      weight = present ? weight : Vec<T>{};
      if (kMasked) {
        const BitsVec<T> bit = load<BitsVec<T>>(allowed + j * L) & splat_bits<T>(Word<T>(1) << (key % kBits + i));
        weight = bit != 0 ? weight : Vec<T>{};
      }
      store(s.scores + at + i * ld + j * L, weight);
    }
  }
  Vec<T> gradient[kKeyRows][N] = {};
  multiply(tile.values.data + key * tile.values.ld, tile.values.ld, 1, s.dout + column, ld, call.head_dim_v, gradient);
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> delta = load<Vec<T>>(s.delta + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      const Vec<T> weight = load<Vec<T>>(s.scores + at + i * ld + j * L);
      // Where a pair is not allowed V may be NaN, and 0 * NaN is NaN.
      store(s.score_gradients + at + i * ld + j * L,
            weight != T(0) ? weight * (gradient[i][j] - delta) : Vec<T>{});
    }
  }
}

template <class T, bool kMasked>
SPATTN_INLINE void weight_block(int64_t vectors, const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column,
                                Split<T> factor, BackwardScratch<T>& s) {
  static_assert(kQueryVectors == 3, "one case per panel width");
  if (vectors == 3) weight_block<T, 3, kMasked>(call, tile, key, column, factor, s);
  if (vectors == 2) weight_block<T, 2, kMasked>(call, tile, key, column, factor, s);
  if (vectors == 1) weight_block<T, 1, kMasked>(call, tile, key, column, factor, s);
}

// Of the vectors of queries [column, column + vectors * L): shrinks the range to those with an allowed key among
// kKeyRows keys from `key`, and clears P' and dS' of the others.
template <class T> void clear_idle(int64_t key, int64_t& column, int64_t& vectors, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  const auto idle = [&](int64_t at) { return !s.reaches(at, key); };
  const auto mark = [&](int64_t at) {
    for (int64_t i = key; i < key + kKeyRows; ++i) {
      store(s.scores + i * s.ld_query + at, Vec<T>{});
      store(s.score_gradients + i * s.ld_query + at, Vec<T>{});
    }
  };
  for (; vectors && idle(column); column += L, --vectors) mark(column);
  for (; vectors && idle(column + (vectors - 1) * L); --vectors) mark(column + (vectors - 1) * L);
}

// s.scores = P' and s.score_gradients = dS'.
template <class T>
void compute_weights(const Call& call, const KeyTile<T>& tile, Split<T> factor, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  const int64_t vectors = (tile.cells + L - 1) / L;
  for (int64_t first = 0; first < vectors; first += kQueryVectors) {
    const int64_t width = vectors - first < kQueryVectors ? vectors - first : kQueryVectors;
    for (int64_t key = 0; key < tile.rows; key += kKeyRows) {
      if (!tile.mask) {
        weight_block<T, false>(width, call, tile, key, first * L, factor, s);
      } else {
        int64_t column = first * L, active = width;
        clear_idle(key, column, active, s);
        weight_block<T, true>(active, call, tile, key, column, factor, s);
      }
    }
  }
}

// Rows [key, key + R) of N vectors of dK or dV: += the queries [begin, end) of `left` times `right`.
template <class T, int R, int N>
SPATTN_INLINE void add_keys(const T* left, Operand<T> right, int64_t begin, int64_t end, int64_t key, int64_t column,
                            T* sums, int64_t ld, int64_t origin, const BackwardScratch<T>& s) {
  Vec<T> sum[R][N] = {};
  multiply(left + key * s.ld_query + begin, s.ld_query, 1, right.data + begin * right.ld + column, right.ld,
           end - begin, sum);
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    const int64_t position = s.key_position[key + i];
    if (position == kPadding) continue;
    T* row = sums + (position - origin) * ld + column;
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) store(row + j * kLanes<T>, load<Vec<T>>(row + j * kLanes<T>) + sum[i][j]);
  }
}

// R rows of dK and dV, the widths of both as whole vectors of up to kOutputVectors.
template <class T, int R, int N>
SPATTN_INLINE void add_key_panels(const T* left, Operand<T> right, int64_t begin, int64_t end, int64_t key, T* sums,
                                  int64_t ld, int64_t origin, int64_t& column, const BackwardScratch<T>& s) {
  for (; right.ld - column >= N * kLanes<T>; column += N * kLanes<T>) {
    add_keys<T, R, N>(left, right, begin, end, key, column, sums, ld, origin, s);
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
    add_key_panels<T, R, kOutputVectors>(left, right, begin, end, key, out, ld, sums.begin, column, s);
    if (kOutputVectors > 2) add_key_panels<T, R, 2>(left, right, begin, end, key, out, ld, sums.begin, column, s);
    add_key_panels<T, R, 1>(left, right, begin, end, key, out, ld, sums.begin, column, s);
  };
  add(s.scores, {s.dout_rows, s.ld_value}, sums.dv, sums.ld_dv);
  add(s.score_gradients, {s.query_rows, s.ld_key}, sums.dk, sums.ld_dk);
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
SPATTN_INLINE void add_query_panels(const KeyTile<T>& tile, int64_t row, int64_t begin, int64_t end, int64_t& column,
                                    BackwardScratch<T>& s) {
  for (; s.ld_key - column >= N * kLanes<T>; column += N * kLanes<T>) {
    Vec<T> sum[R][N] = {};
    multiply(s.score_gradients + begin * s.ld_query + row, 1, s.ld_query,
             tile.keys.data + begin * tile.keys.ld + column, tile.keys.ld, end - begin, sum);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      T* out = s.dq + (row + i) * s.ld_key + column;
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) store(out + j * kLanes<T>, load<Vec<T>>(out + j * kLanes<T>) + sum[i][j]);
    }
  }
}

template <class T, int R> void add_query_block(const KeyTile<T>& tile, int64_t row, BackwardScratch<T>& s) {
  int64_t begin = 0, end = tile.rows, column = 0;
  if (tile.mask) tile.mask.reach(row, R, begin, end);
  add_query_panels<T, R, kOutputVectors>(tile, row, begin, end, column, s);
  if (kOutputVectors > 2) add_query_panels<T, R, 2>(tile, row, begin, end, column, s);
  add_query_panels<T, R, 1>(tile, row, begin, end, column, s);
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
