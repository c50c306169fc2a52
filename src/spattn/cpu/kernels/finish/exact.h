// Float64 fallback for rows that the tile kernels cannot compute: one query, one allowed key at a time.
//
// A tile kernel multiplies the zero weight of a masked pair by V, and 0 * NaN is NaN. The fallback skips masked pairs
// and reads the caller's K and V, so its results are non-finite only where exact attention is.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/element.h"
#include "softmax/dropout.h"
#include "softmax/logits.h"
#include "softmax/score.h"
#include "softmax/weights.h"
#include "tile/item.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Tells the caller that a row is non-finite, possibly because of a masked key.
inline void report_nonfinite(const Call& call) { __atomic_store_n(call.nonfinite, 1, __ATOMIC_RELAXED); }

// Sends the query cells that may attend to any key with unfit(position) to the fallback.
template <class Unfit>
void leave_to_fallback(const Item& item, int64_t cells, int64_t* position, const FallbackRowBuffer& exact,
                       const Unfit& unfit) {
  item.each_tile(position, [&](int64_t keys, const Mask& mask) {
    for (int64_t key = 0; key < keys; ++key) {
      if (position[key] == kPadding || !unfit(position[key])) continue;
      for (int64_t cell = 0; cell < cells; ++cell) exact.chosen[cell] |= !mask || mask.allows(cell, key);
    }
  });
}

// Sends exactly the query cells that may attend to a non-finite key to the fallback.
inline void leave_marked(const Item& item, int64_t cells, int64_t* position, const FallbackRowBuffer& exact) {
  clear(exact.chosen, exact.rows);
  if (!item.call.marked) return;
  const uint8_t* marked = item.call.marked + item.kv_number() * item.call.kv_len;
  leave_to_fallback(item, cells, position, exact, [&](int64_t key) { return marked[key] != 0; });
}

// A row of an array, read as float64.
template <class E> struct FallbackVector {
  const char* data;
  int64_t feature;  // stride in bytes

  FallbackVector(const Head& head, int64_t position) : data(head.row(position)), feature(head.feature) {}

  double operator[](int64_t i) const {
    typename E::Storage x;
    memcpy(&x, data + i * feature, sizeof x);
    return double(E::decode(x));
  }
  double times(const FallbackVector& other, int64_t width) const {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += (*this)[i] * other[i];
    return sum;
  }
};

// One query of a work item and its allowed keys.
//
// Large scaled scores have rounding errors of several units, so weights are exp((score - largest) * natural), which
// scales the difference instead. At the maximum, it is exactly 0, whether or not the compiler fuses operations.
template <class E> struct FallbackRow {
  using T = typename E::Compute;
  using Vector = FallbackVector<E>;
  const Item& item;
  int64_t cell, position;
  Head keys, values;
  Vector query;
  int64_t* key_position;
  Logits<double> logits;
  PairScore score_function;
  RowDropout dropout;

  FallbackRow(const Item& item, int64_t cell, const Positions& places)
      : item(item), cell(cell), position(places.query[cell]), keys(item.call.exact_k, item.batch, item.head_kv()),
        values(item.call.exact_v, item.batch, item.head_kv()), query(item.queries(), position),
        key_position(places.key), logits(item.call), score_function(item.call, item.batch, item.head, places.score),
        dropout(item.call, item.batch, item.head, position) {}

  // Returns the score, scaled only if the call has a score function, and writes its derivative. Not inlined, so that
  // all callers get the same score for a pair.
  __attribute__((noinline)) double score(int64_t key, double* derivative = nullptr) const {
    const double product = query.times({keys, key}, item.call.head_dim);
    if (!score_function) return product * logits.sign;
    return score_function.of_pair(product, position, key, derivative);
  }

  // True if the score function masks a pair; its V may then be non-finite.
  bool removed(double score) const { return score_function && score == -kInfinity<double>; }

  // Calls visit(key) for each allowed key, in order.
  template <class Visit> void each_key(const Visit& visit) const {
    item.each_tile(key_position, [&](int64_t cells, const Mask& mask) {
      for (int64_t c = 0; c < cells; ++c) {
        if (!mask || mask.allows(cell, c)) visit(key_position[c]);
      }
    });
  }

  // Adds all allowed keys to the statistics. Calls visit(key, rescale, weight), which lets the caller keep a weighted
  // sum: multiply it by `rescale`, then add `weight` times the term of the key.
  template <class Visit> void weigh_keys(Normaliser& n, const Visit& visit) const {
    each_key([&](int64_t key) {
      const double x = score(key), logit = x * logits.natural;
      if (removed(x)) return;
      double rescale = 1, weight = 0;  // if the score is -inf
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

  // Writes the normalized output to `out`, using `sum` as accumulator; returns the log-sum-exp.
  double compute(double* sum, T* out) const {
    const int64_t width = item.call.head_dim_v;
    Normaliser n = {-kInfinity<double>, 0, 0};
    clear(sum, width);
    weigh_keys(n, [&](int64_t key, double rescale, double weight) {
      const Vector value(values, key);
      const double kept = weight * dropout.factor(key);
      for (int64_t j = 0; j < width; ++j) sum[j] = sum[j] * rescale + kept * value[j];
    });
    for (int64_t j = 0; j < width; ++j) out[j] = n.total == 0 ? T(0) : T(sum[j] / n.total);
    return n.largest * logits.natural + ::log(n.total);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
