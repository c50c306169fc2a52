// The slow path for rows that came out non-finite: one query, one allowed key at a time, in double precision.
//
// A tile kernel multiplies the zero weight of a pair that is not allowed by V, and 0 * NaN is NaN. This path never
// touches such a pair, so what remains non-finite here is so by the formula.
#pragma once
#include <math.h>

#include "element.h"
#include "kernels.h"
#include "mask.h"
#include "pack.h"
#include "scratch.h"
#include "tile.h"

namespace spattn {
namespace SPATTN_ISA {

// One query of a work item, and how to visit the keys that it may attend to.
template <class E> struct ExactRow {
  using T = typename E::Compute;
  const Call& call;
  const Component& component;
  const Work& item;
  const Head &keys, &values;
  const char* query;      // first feature
  int64_t query_feature;  // bytes
  int64_t cell;
  Scratch<T>& s;

  static double element(const char* at) {
    typename E::Storage x;
    memcpy(&x, at, sizeof x);
    return double(E::decode(x));
  }

  double logit(int64_t position) const {
    double sum = 0;
    const char* key = keys.data + position * keys.position;
    for (int64_t d = 0; d < call.head_dim; ++d) {
      sum += element(query + d * query_feature) * element(key + d * keys.feature);
    }
    return sum * call.scale;
  }

  // visit(position) for every allowed key, in order.
  template <class Visit> void each_key(Visit visit) const {
    const Plan& plan = call.plan;
    for (int64_t e = item.begin; e < item.end; ++e) {
      const Tile tile = locate(plan.views[component.key_view + plan.key_view[e]], plan.indices[e]);
      const int64_t cells = list_positions(tile, s.key_position);
      const Mask mask(plan, e);
      for (int64_t c = 0; c < cells; ++c) {
        if (!mask || mask.allows(cell, c)) visit(s.key_position[c]);
      }
    }
  }

  // The normalised output goes to `out`; returns the log-sum-exp.
  T compute(T* out) const {
    const int64_t width = call.head_dim_v;
    double largest = -kInfinity<double>, total = 0, *sum = s.exact;
    bool valid = true;
    each_key([&](int64_t position) {
      const double x = valid ? logit(position) : 0;
      valid = valid && x == x && x != kInfinity<double>;
      largest = x > largest ? x : largest;
    });
    if (!valid) {  // exp(NaN) or inf / inf in every term
      for (int64_t j = 0; j < width; ++j) out[j] = T(__builtin_nan(""));
      return T(__builtin_nan(""));
    }
    for (int64_t j = 0; j < width; ++j) sum[j] = 0;
    if (largest != -kInfinity<double>) {
      each_key([&](int64_t position) {
        const double weight = ::exp(logit(position) - largest);
        const char* value = values.data + position * values.position;
        for (int64_t j = 0; j < width; ++j) sum[j] += weight * element(value + j * values.feature);
        total += weight;
      });
    }
    for (int64_t j = 0; j < width; ++j) out[j] = total == 0 ? T(0) : T(sum[j] / total);
    return T(largest + ::log(total));
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
