// Pairwise backward of a work item with one-query tiles, by the formulas of backward/backward.h.
//
// A row of dQ sums over the keys of the row, as O does in the forward. The kernel adds the dK and dV terms of a pair
// directly to the accumulators of the item's unit, which no other thread writes.
//
//   lower bound: bytes of K, V and twice dK, dV per pair / L2 bandwidth; measured by benchmarks/kernels/pairwise_cpu.py
#pragma once
#include "backward/backward.h"
#include "backward/queries.h"
#include "decode/products.h"
#include "decode/rows.h"
#include "kernels.h"
#include "pairwise/keys.h"
#include "softmax/logits.h"
#include "softmax/dropout.h"
#include "softmax/score.h"
#include "softmax/weights.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct PairwiseBackwardScratch {
  Widths<T> width;
  GradientRows<T> rows;
  QueryRows<T> raw;
  KeyStaging<T> staging;
  Chunk chunk;
  T *query, *dout;         // (width.key), (width.value): sign(scale) * Q, gradient_scale() * dO
  T *weights, *gradients;  // (block_kv): P, dS
  Score<T> score;
  Dropout<T> dropout;

  PairwiseBackwardScratch(const Call& call, Arena& arena)
      : width(one_row(call)), rows(call, width, arena), raw(width.query, width.key, width.value, arena),
        staging(call, width, arena), chunk(call, rows.position.key, arena), query(arena.array<T>(width.key)),
        dout(arena.array<T>(width.value)), weights(arena.array<T>(call.plan.block_kv)),
        gradients(arena.array<T>(call.plan.block_kv)), score(call, 1, call.plan.block_kv, 1, arena),
        dropout(call, 1, call.plan.block_kv, arena) {}

 private:
  static Widths<T> one_row(const Call& call) {
    Widths<T> width(call);
    width.query = 1;
    return width;
  }
};

// Gathers the item's row and computes delta in the same summation order as dP: compute_delta().
template <class E, class T = typename E::Compute>
void prepare_pairs(const Item& item, PairwiseBackwardScratch<T>& s) {
  constexpr int64_t L = kLanes<T>;
  const T sign = Logits<T>(item.call).sign, scale = gradient_scale<T>(item.call);
  s.score.begin(item.batch, item.head);
  gather_item<E>(item, item.query_tile(), s.raw, s.rows);
  for (int64_t d = 0; d < s.width.key; ++d) s.query[d] = sign * s.raw.query[d];
  for (int64_t j = 0; j < s.width.value; ++j) s.dout[j] = scale * s.raw.dout[j];
  const Rows out = {reinterpret_cast<const char*>(s.raw.out), 0, 0, 0};  // stride 0 repeats the row
  multiply_keys<Native<T>, 1>(out, Keys{0, L}, &s.dout, s.width.value, s.gradients, L);
  s.rows.delta[0] = s.gradients[0];
  subtract_dlse(item, 1, scale, s.rows);
  if (s.dropout) s.dropout.list_queries(item.batch, item.head, s.rows.position.query, 1);
}

// Converts S to P and dP to dS, in place; `padded` is a multiple of kLanes.
template <bool kDrops, class T>
void weigh_pairs(int64_t padded, SplitLogits<T> logits, PairwiseBackwardScratch<T>& s) {
  const Vec<T> lse2 = splat(s.rows.lse2[0]), lse2_low = splat(s.rows.lse2_low[0]), delta = splat(s.rows.delta[0]);
  for (int64_t key = 0; key < padded; key += kLanes<T>) {
    const Vec<T> score = load<Vec<T>>(s.weights + key);
    Vec<T> product = load<Vec<T>>(s.gradients + key);
    if constexpr (kDrops)
      product = s.dropout.one_query(0)(s.dropout.keys(key)) ? product * s.dropout.factor() : Vec<T>{};
    const Vec<T> weight = normalised_weight<T>(logits.exponent(score, lse2, lse2_low), lse2);
    store(s.weights + key, weight);
    store(s.gradients + key, score_gradient<T>(weight, product - delta));
  }
}

// Adds factors[i] * row to the row of dK or dV of key i of the chunk; `width` is a multiple of kLanes.
template <class T>
void add_row(const Chunk& chunk, int64_t count, const T* factors, const T* row, int64_t width, int64_t first_key,
             T* sums, int64_t ld) {
  for (int64_t i = 0; i < count; ++i) {
    const Vec<T> factor = splat(factors[i]);
    T* to = sums + (chunk.position[i] - first_key) * ld;
    for (int64_t d = 0; d < width; d += kLanes<T>) {
      store(to + d, load<Vec<T>>(to + d) + factor * load<Vec<T>>(row + d));
    }
  }
}

// Adds the terms of the `count` pairs of a chunk to dQ, dK and dV.
template <class E, class T = typename E::Compute>
void add_gradients(const Item& item, int64_t count, bool first, const Sums& sums, PairwiseBackwardScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors, kSize = sizeof(T);
  const Call& call = item.call;
  const Head k = item.keys(), v = item.values();
  const int64_t padded = round_up(count, L), ld_key = s.width.key, ld_value = s.width.value;
  const int64_t* const position = s.chunk.position;
  T *dk = reinterpret_cast<T*>(sums.dk), *dv = reinterpret_cast<T*>(sums.dv);
  const Soon dk_soon = {sums.dk - sums.begin * sums.ld_dk * kSize, position, sums.ld_dk * kSize, ld_key * kSize};
  const Soon dv_soon = {sums.dv - sums.begin * sums.ld_dv * kSize, position, sums.ld_dv * kSize, ld_value * kSize};
  visit_positions<E>(k, position, padded, call.head_dim, ld_key, s.staging.keys,
                     read_soon<E>(v, position, call.head_dim_v), [&](auto stored, auto keys) {
                       multiply_keys<decltype(stored), 1>(keys, Keys{0, padded}, &s.query, ld_key, s.weights, padded);
                     });
  visit_positions<E>(
      v, position, padded, call.head_dim_v, ld_value, s.staging.values, dv_soon, [&](auto stored, auto values) {
        multiply_keys<decltype(stored), 1>(values, Keys{0, padded}, &s.dout, ld_value, s.gradients, padded);
      });
  if (s.score) s.score.template apply<true>(s.rows.position.query, 1, position, padded, s.weights, padded);
  if (s.dropout) {
    s.dropout.list_keys(item.batch, item.head, position, padded);
    weigh_pairs<true>(padded, SplitLogits<T>(call), s);
  } else {
    weigh_pairs<false>(padded, SplitLogits<T>(call), s);
  }
  if (s.score) {
    clear(s.gradients + count, padded - count);
    s.score.add_table_gradients(s.gradients, padded);
    s.score.multiply_derivatives(s.weights, T(call.scale), s.gradients, padded);
  }
  if (s.dropout) s.dropout.drop_keys(0, padded, s.dropout.factor(), s.weights);
  const T same = 1;
  visit_positions<E>(k, position, count, call.head_dim, ld_key, s.staging.keys, dk_soon, [&](auto stored, auto keys) {
    in_blocks<W>(ld_key / L, [&](auto vectors, int64_t column) {
      const T* const factor = first ? nullptr : &same;
      multiply_values<decltype(stored), 1, decltype(vectors)::value>(keys, column * L, Keys{0, count}, s.gradients,
                                                                     padded, factor, &s.rows.dq);
    });
  });
  add_row(s.chunk, count, s.weights, s.raw.dout, ld_value, sums.begin, dv, sums.ld_dv);
  add_row(s.chunk, count, s.gradients, s.raw.query, ld_key, sums.begin, dk, sums.ld_dk);
}

template <class E> void pairwise_backward(const Item& item, const Sums& sums, char* scratch) {
  using T = typename E::Compute;
  Arena arena(scratch);
  PairwiseBackwardScratch<T> s(item.call, arena);
  prepare_pairs<E>(item, s);
  clear(s.rows.dq, s.width.key);
  if (!s.rows.idle[0] && !s.rows.exact.chosen[0]) {
    bool first = true;
    each_chunk(item, s.chunk, kLanes<T>, [&](int64_t count) {
      add_gradients<E>(item, count, first, sums, s);
      first = false;
    });
  }
  write_query_gradients<E>(item, 1, sums, s.rows);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
