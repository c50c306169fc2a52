// The two matrix products of a tile, on register-blocked micro-kernels: S' = K Q' and O += P V.
#pragma once
#include "pack.h"
#include "scratch.h"
#include "vec.h"

namespace spattn {
namespace SPATTN_ISA {

// kKeyRows rows of S' by N vectors of queries. Pairs that are not allowed become -inf; `tile_max` keeps the maximum.
template <class T, int N, bool kMasked>
SPATTN_INLINE void score_block(const T* keys, int64_t ld_key, const T* query, int64_t ld_query, int64_t depth,
                               const Word<T>* allowed, int first_bit, T* scores, T* tile_max) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[kKeyRows][N] = {};
  for (int64_t d = 0; d < depth; ++d) {
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) right[j] = load<Vec<T>>(query + d * ld_query + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      const Vec<T> left = splat(keys[i * ld_key + d]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    Vec<T> largest = load<Vec<T>>(tile_max + j * L);  // in memory: the products above need every register
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      Vec<T> score = sum[i][j];
      if (kMasked) {
        const BitsVec<T> bit = load<BitsVec<T>>(allowed + j * L) & splat_bits<T>(Word<T>(1) << (first_bit + i));
        score = bit != 0 ? score : splat(-kInfinity<T>);
      }
      largest = score > largest ? score : largest;
      store(scores + i * ld_query + j * L, score);
    }
    store(tile_max + j * L, largest);
  }
}

// All key rows for the N vectors of queries that start at `column`.
template <class T, int N, bool kMasked>
void score_panel(Operand<T> keys, int64_t rows, int64_t depth, int64_t column, Scratch<T>& s) {
  constexpr int kBits = 8 * sizeof(T);
  T* tile_max = s.tile_max + column;
  for (int j = 0; j < N; ++j) store(tile_max + j * kLanes<T>, splat(-kInfinity<T>));
  for (int64_t key = 0; key < rows; key += kKeyRows) {
    score_block<T, N, kMasked>(keys.data + key * keys.ld, keys.ld, s.query + column, s.ld_query, depth,
                               s.allowed + key / kBits * s.ld_query + column, int(key % kBits),
                               s.scores + key * s.ld_query + column, tile_max);
  }
}

// s.scores = S' and s.tile_max = the largest allowed score of each query, for the first `vectors` vectors of queries.
template <class T, bool kMasked>
void compute_scores(Operand<T> keys, int64_t rows, int64_t depth, int64_t vectors, Scratch<T>& s) {
  static_assert(kQueryVectors == 3, "one case per panel width");
  int64_t done = 0;
  for (; vectors - done >= 3; done += 3) score_panel<T, 3, kMasked>(keys, rows, depth, done * kLanes<T>, s);
  if (vectors - done == 2) score_panel<T, 2, kMasked>(keys, rows, depth, done * kLanes<T>, s);
  if (vectors - done == 1) score_panel<T, 1, kMasked>(keys, rows, depth, done * kLanes<T>, s);
}

// R rows of O by N vectors, over all keys of the tile.
template <class T, int R, int N>
SPATTN_INLINE void output_block(const T* weights, int64_t ld_weight, Operand<T> values, int64_t keys, bool accumulate,
                                T* output, int64_t ld_output) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  if (accumulate) {
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = load<Vec<T>>(output + i * ld_output + j * L);
    }
  }
  for (int64_t key = 0; key < keys; ++key) {
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) right[j] = load<Vec<T>>(values.data + key * values.ld + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(weights[key * ld_weight + i]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) store(output + i * ld_output + j * L, sum[i][j]);
  }
}

// The N vectors of O that start at `column`, for the query cells [0, cells) and up to one more.
template <class T, int N>
void output_panel(Operand<T> values, int64_t keys, int64_t cells, int64_t column, bool accumulate, Scratch<T>& s) {
  static_assert(kOutputRows == 6, "the remainders below");
  const Operand<T> panel = {values.data + column, values.ld};
  int64_t row = 0;
  for (; cells - row > 4; row += 6) {
    output_block<T, 6, N>(s.scores + row, s.ld_query, panel, keys, accumulate, s.output + row * s.ld_value + column,
                          s.ld_value);
  }
  for (; cells - row > 0; row += 2) {
    output_block<T, 2, N>(s.scores + row, s.ld_query, panel, keys, accumulate, s.output + row * s.ld_value + column,
                          s.ld_value);
  }
}

// O (+)= P V.
template <class T>
void accumulate_output(Operand<T> values, int64_t keys, int64_t cells, bool accumulate, Scratch<T>& s) {
  constexpr int L = kLanes<T>, W = kOutputVectors;
  int64_t column = 0;
  for (; s.ld_value - column >= W * L; column += W * L) {
    output_panel<T, W>(values, keys, cells, column, accumulate, s);
  }
  for (; s.ld_value - column >= 2 * L; column += 2 * L) {
    output_panel<T, 2>(values, keys, cells, column, accumulate, s);
  }
  if (column < s.ld_value) output_panel<T, 1>(values, keys, cells, column, accumulate, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
