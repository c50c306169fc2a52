// The five matrix products of a tile's backward:
// P' = exp2(factor * K Q' - lse2), dS' = P' o (V dO' - delta), dV += P' dO, dK += dS' Q, dQ += dS K.
#pragma once
#include "backward/queries.h"
#include "backward/scratch.h"
#include "forward/plain.h"
#include "simd/vec.h"
#include "softmax/logits.h"
#include "softmax/weights.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/product.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct KeyTile {
  Operand<T> keys, values;
  int64_t rows;   // key cells, rounded up to kKeyRows
  int64_t cells;  // query cells
  Mask mask;
};

// Computes S' for kKeyRows keys by N vectors of queries.
template <class T, int N>
SPATTN_INLINE void multiply_queries(const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column,
                                    const BackwardScratch<T>& s, Vec<T> (&product)[kKeyRows][N]) {
  multiply<Plain<Native<T>>>(tile.keys.data + key * tile.keys.ld, tile.keys.ld, 1, {s.query + column, s.width.query},
                             Keys{0, call.head_dim}, product);
}

// Computes S' of a block for the score function, in s.weights.
template <class T, int N>
void product_block(const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column, BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  T* const to = s.weights + key * s.width.query + column;
  Vec<T> product[kKeyRows][N] = {};
  multiply_queries(call, tile, key, column, s, product);
  SPATTN_UNROLL
  for (int i = 0; i < kKeyRows * N; ++i) store(to + i / N * s.width.query + i % N * L, product[i / N][i % N]);
}

// Computes P' and dS' for kKeyRows keys by N vectors of queries; reads scores from s.weights if there is a score
// function.
template <class T, int N, bool kMasked, bool kDrops>
void weight_block(const Call& call, const KeyTile<T>& tile, int64_t key, int64_t column, SplitLogits<T> logits,
                  BackwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  using Path = Plain<Native<T>>;
  const int64_t ld = s.width.query, at = key * ld + column;
  Vec<T> product[kKeyRows][N] = {};
  if (s.score) {
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows * N; ++i)
      product[i / N][i % N] = load<Vec<T>>(s.weights + at + i / N * ld + i % N * L);
  } else {
    multiply_queries(call, tile, key, column, s, product);
  }
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> lse2 = load<Vec<T>>(s.rows.lse2 + column + j * L);
    const Vec<T> lse2_low = load<Vec<T>>(s.rows.lse2_low + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      Vec<T> weight = normalised_weight<T>(logits.exponent(product[i][j], lse2, lse2_low), lse2);
      if (kMasked) weight = masked_weight<T>(weight, s.mask.bit(key + i, column + j * L));
      store(s.weights + at + i * ld + j * L, weight);
    }
  }
  Vec<T> gradient[kKeyRows][N] = {};
  multiply<Path>(tile.values.data + key * tile.values.ld, tile.values.ld, 1, {s.dout + column, ld},
                 Keys{0, call.head_dim_v}, gradient);
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    const Vec<T> delta = load<Vec<T>>(s.rows.delta + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      const Vec<T> weight = load<Vec<T>>(s.weights + at + i * ld + j * L);
      if constexpr (kDrops) {
        const IntVec<T> kept = s.dropout.queries(column + j * L)(s.dropout.one_key(key + i));
        gradient[i][j] = kept ? gradient[i][j] * s.dropout.factor() : Vec<T>{};
      }
      store(s.gradients + at + i * ld + j * L, score_gradient<T>(weight, gradient[i][j] - delta));
    }
  }
}

// Computes s.weights = Pᵀ, after dropout, and s.gradients, the transposed gradients of the dot products q·k. Adds the
// tile's terms to the gradients of captured arrays.
template <class T>
void compute_weights(const Call& call, const KeyTile<T>& tile, SplitLogits<T> logits, BackwardScratch<T>& s) {
  const int64_t ld = s.width.query, vectors = (tile.cells + kLanes<T> - 1) / kLanes<T>;
  const bool masked = bool(tile.mask);
  if (s.score) {
    s.mask.each_block(
        {0, tile.rows}, vectors, masked, [](int64_t, int64_t) {},
        [&](auto some, int64_t key, int64_t column) {
          product_block<T, decltype(some)::value>(call, tile, key, column, s);
        });
    s.score.template apply<false>(s.rows.position.key, tile.rows, s.rows.position.query, vectors * kLanes<T>, s.weights,
                                  ld);
  }
  const auto mark = [&](int64_t key, int64_t column) {
    store(s.weights + key * ld + column, Vec<T>{});
    store(s.gradients + key * ld + column, Vec<T>{});
  };
  s.mask.each_block({0, tile.rows}, vectors, masked, mark, [&](auto some, int64_t key, int64_t column) {
    constexpr int N = decltype(some)::value;
    const auto run = s.dropout ? masked ? weight_block<T, N, true, true> : weight_block<T, N, false, true>
                     : masked  ? weight_block<T, N, true, false>
                               : weight_block<T, N, false, false>;
    run(call, tile, key, column, logits, s);
  });
  if (s.score) {
    s.score.add_table_gradients(s.gradients, ld);
    s.score.multiply_derivatives(s.weights, T(call.scale), s.gradients, ld);
  }
  if (s.dropout) s.dropout.drop_queries(0, tile.rows, vectors * kLanes<T>, s.dropout.factor(), s.weights, ld);
}

template <class T, class V, int N> SPATTN_INLINE void add_vectors(const V (&terms)[N], T* to) {
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) store(to + j * kLanes<T>, load<V>(to + j * kLanes<T>) + terms[j]);
}

// Adds the terms of a tile to rows [key, key + R) of dK and dV.
template <class T, int R>
void add_key_block(const KeyTile<T>& tile, int64_t key, const Sums& sums, const BackwardScratch<T>& s) {
  constexpr int64_t L = kLanes<T>;
  Keys queries = {0, tile.cells};
  if (tile.mask) tile.mask.reach_queries(key, R, queries.begin, queries.end);
  if (queries.begin == queries.end) return;
  const auto add = [&](const T* left, const T* right, int64_t width, char* to, int64_t ld) {
    in_blocks<kOutputVectors>(width / L, [&](auto vectors, int64_t column) __attribute__((always_inline)) {
      constexpr int N = decltype(vectors)::value;
      Vec<T> sum[R][N] = {};
      multiply<Plain<Native<T>>>(left + key * s.width.query, s.width.query, 1, {right + column * L, width}, queries,
                                 sum);
      SPATTN_UNROLL
      for (int i = 0; i < R; ++i) {
        const int64_t position = s.rows.position.key[key + i];
        if (position != kPadding)
          add_vectors(sum[i], reinterpret_cast<T*>(to) + (position - sums.begin) * ld + column * L);
      }
    });
  };
  add(s.weights, s.raw.dout, s.width.value, sums.dv, sums.ld_dv);
  add(s.gradients, s.raw.query, s.width.key, sums.dk, sums.ld_dk);
}

// Computes dV += P' dO and dK += dS' Q.
template <class T> void add_key_gradients(const KeyTile<T>& tile, const Sums& sums, const BackwardScratch<T>& s) {
  static_assert(kOutputRows == 6 && kKeyRows % 4 == 0, "the remainders below");
  int64_t key = 0;
  for (; tile.rows - key >= 6; key += 6) add_key_block<T, 6>(tile, key, sums, s);
  if (tile.rows - key == 4) add_key_block<T, 4>(tile, key, sums, s);
  if (tile.rows - key == 2) add_key_block<T, 2>(tile, key, sums, s);
}

// Adds the terms of a tile to rows [row, row + R) of dQ.
template <class T, int R> void add_query_block(const KeyTile<T>& tile, int64_t row, BackwardScratch<T>& s) {
  constexpr int64_t L = kLanes<T>;
  Keys keys = {0, tile.rows};
  if (tile.mask) tile.mask.reach(row, R, keys.begin, keys.end);
  in_blocks<kOutputVectors>(s.width.key / L, [&](auto vectors, int64_t column) __attribute__((always_inline)) {
    constexpr int N = decltype(vectors)::value;
    Vec<T> sum[R][N] = {};
    multiply<Plain<Native<T>>>(s.gradients + row, 1, s.width.query, {tile.keys.data + column * L, tile.keys.ld}, keys,
                               sum);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) add_vectors(sum[i], s.rows.dq + (row + i) * s.width.key + column * L);
  });
}

// Computes dQ += dS K for rows [0, cells), and for one more row if `cells` is odd.
template <class T> void add_query_gradients(const KeyTile<T>& tile, BackwardScratch<T>& s) {
  static_assert(kOutputRows == 6, "the remainders below");
  int64_t row = 0;
  for (; tile.cells - row > 4; row += 6) add_query_block<T, 6>(tile, row, s);
  for (; tile.cells - row > 0; row += 2) add_query_block<T, 2>(tile, row, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
