// The exact path, for rows that the tiles cannot do: one query, one allowed key at a time, in double precision.
//
// A tile kernel multiplies the zero weight of a pair that is not allowed by V, and 0 * NaN is NaN. This path never
// touches such a pair, so what remains non-finite here is so by the formula. It reads the caller's K and V.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/element.h"
#include "softmax/logits.h"
#include "softmax/weights.h"
#include "tile/item.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Tells the call that a row came out non-finite: a key that the row may not attend to can be the reason.
inline void report_nonfinite(const Call& call) { __atomic_store_n(call.nonfinite, 1, __ATOMIC_RELAXED); }

// Leaves to the exact path the query cells of an item that may attend to a key, in the item's part of their keys, for
// which unfit(position) holds.
template <class Unfit>
void leave_to_exact(const Item& item, int64_t cells, int64_t* position, const ExactRowBuffer& exact,
                    const Unfit& unfit) {
  item.each_tile(position, [&](int64_t keys, const Mask& mask) {
    for (int64_t key = 0; key < keys; ++key) {
      if (position[key] == kPadding || !unfit(position[key])) continue;
      for (int64_t cell = 0; cell < cells; ++cell) exact.chosen[cell] |= !mask || mask.allows(cell, key);
    }
  });
}

// Chooses the rows of the exact path anew: the query cells that may attend to a marked key.
inline void leave_marked(const Item& item, int64_t cells, int64_t* position, const ExactRowBuffer& exact) {
  clear(exact.chosen, exact.rows);
  if (!item.call.marked) return;
  const uint8_t* marked = item.call.marked + item.kv_number() * item.call.kv_len;
  leave_to_exact(item, cells, position, exact, [&](int64_t key) { return marked[key] != 0; });
}

// One query of a work item and the keys that it may attend to.
//
// Weights come from differences of scores, times `natural`: a logit is rounded, and far out its rounding error is many
// powers of e. Whatever compilers fuse then, the winner's difference is 0.
template <class E> struct ExactRow {
  using T = typename E::Compute;
  const Item& item;
  int64_t cell, position;
  Head keys, values;
  const char* query;      // first feature
  int64_t query_feature;  // bytes
  int64_t* key_position;
  Logits<double> logits;

  ExactRow(const Item& item, int64_t cell, const Positions& places)
      : item(item), cell(cell), position(places.query[cell]), keys(item.call.exact_k, item.batch, item.head_kv()),
        values(item.call.exact_v, item.batch, item.head_kv()), key_position(places.key), logits(item.call.scale) {
    const Head queries = item.queries();
    query = queries.data + position * queries.position;
    query_feature = queries.feature;
  }

  static double element(const char* at) {
    typename E::Storage x;
    memcpy(&x, at, sizeof x);
    return double(E::decode(x));
  }

  // Never inlined: the same pair has the same score wherever it is needed.
  __attribute__((noinline)) double score(int64_t key) const {
    double product = 0;
    const char* row = keys.data + key * keys.position;
    for (int64_t d = 0; d < item.call.head_dim; ++d) {
      product += element(query + d * query_feature) * element(row + d * keys.feature);
    }
    return logits.scalar_score(product);
  }

  // visit(key) for every allowed key, in order.
  template <class Visit> void each_key(const Visit& visit) const {
    item.each_tile(key_position, [&](int64_t cells, const Mask& mask) {
      for (int64_t c = 0; c < cells; ++c) {
        if (!mask || mask.allows(cell, c)) visit(key_position[c]);
      }
    });
  }

  // Adds all allowed keys to a normaliser, and has visit(key, rescale, weight) do the same for any other sum with these
  // weights: multiply it by `rescale` and add `weight` times what belongs to the key.
  template <class Visit> void weigh_keys(Normaliser& n, const Visit& visit) const {
    each_key([&](int64_t key) {
      const double x = score(key), logit = x * logits.natural;
      double rescale = 1, weight = 0;  // as a logit of -inf leaves them
      if (x > n.largest && logit > -kInfinity<double>) {
        rescale = scalar_weight(logits.scalar_exponent(n.largest, x)), weight = 1;
        n.largest = x;
      } else if (logit != -kInfinity<double>) {
        weight = scalar_weight(logits.scalar_exponent(x, n.largest));
      }
      if (logit == kInfinity<double>) weight = __builtin_nan("");  // inf / inf
      n.total = n.total * rescale + weight;
      visit(key, rescale, weight);
    });
  }

  // The normalised output goes to `out`, by way of `sum`; returns the log-sum-exp.
  double compute(double* sum, T* out) const {
    const int64_t width = item.call.head_dim_v;
    Normaliser n = {-kInfinity<double>, 0, 0};
    clear(sum, width);
    weigh_keys(n, [&](int64_t key, double rescale, double weight) {
      const char* value = values.data + key * values.position;
      for (int64_t j = 0; j < width; ++j) sum[j] = sum[j] * rescale + weight * element(value + j * values.feature);
    });
    for (int64_t j = 0; j < width; ++j) out[j] = n.total == 0 ? T(0) : T(sum[j] / n.total);
    return n.largest * logits.natural + ::log(n.total);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
