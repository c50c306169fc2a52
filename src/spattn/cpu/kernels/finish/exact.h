// The slow path for rows that the tiles cannot do: one query, one allowed key at a time, in double precision.
//
// A tile kernel multiplies the zero weight of a pair that is not allowed by V, and 0 * NaN is NaN. This path never
// touches such a pair, so what remains non-finite here is so by the formula. It reads the caller's K and V.
#pragma once
#include <math.h>

#include "simd/element.h"
#include "kernels.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/scratch.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Tells the call that a row came out non-finite: a key that the row may not attend to can be the reason.
inline void report_nonfinite(const Call& call) { __atomic_store_n(call.nonfinite, 1, __ATOMIC_RELAXED); }

// Adds to s.exact the query cells of an item that may attend to a key, in the item's part of their keys, for which
// unfit(position) holds.
template <class T, class Unfit>
void leave_to_exact(const Call& call, const Work& item, int64_t cells, Scratch<T>& s, const Unfit& unfit) {
  const Plan& plan = call.plan;
  const int32_t first_view = plan.components[item.component].key_view;
  for (int64_t e = item.begin; e < item.end; ++e) {
    const Tile tile = locate(plan.views[first_view + plan.key_view[e]], plan.indices[e]);
    const int64_t keys = list_positions(tile, s.key_position);
    const Mask mask(plan, e);
    for (int64_t key = 0; key < keys; ++key) {
      if (s.key_position[key] == kPadding || !unfit(s.key_position[key])) continue;
      for (int64_t cell = 0; cell < cells; ++cell) s.exact[cell] |= !mask || mask.allows(cell, key);
    }
  }
}

// s.exact = which query cells of an item may attend to a marked key.
template <class T>
void leave_marked(const Call& call, int64_t batch, int64_t head, const Work& item, int64_t cells, Scratch<T>& s) {
  clear(s.exact, s.ld_query);
  if (!call.marked) return;
  const uint8_t* marked = call.marked + (batch * (call.heads_q / call.group) + head / call.group) * call.kv_len;
  leave_to_exact(call, item, cells, s, [&](int64_t position) { return marked[position] != 0; });
}

// One query of a work item, whose positions are in s.query_position, and the keys that it may attend to.
//
// A score is sign(scale) * q.k, and weights come from differences of scores, times `natural`, |scale|: a logit is rounded,
// and far out its rounding error is many powers of e. Whatever compilers fuse then, the winner's difference is 0.
template <class E> struct ExactRow {
  using T = typename E::Compute;
  const Call& call;
  const Work& item;
  Head keys, values;
  const char* query;      // first feature
  int64_t query_feature;  // bytes
  int64_t cell;
  Scratch<T>& s;
  double sign, natural;

  ExactRow(const Call& call, int64_t batch, int64_t head, const Work& item, int64_t cell, Scratch<T>& s)
      : call(call), item(item), keys(call.exact_k, batch, head / call.group),
        values(call.exact_v, batch, head / call.group), cell(cell), s(s) {
    const Head queries(call.q, batch, head);
    query = queries.data + s.query_position[cell] * queries.position;
    query_feature = queries.feature;
    sign = call.scale < 0 ? -1 : call.scale > 0 ? 1 : 0;
    natural = call.scale == 0 ? 1 : fabs(call.scale);  // scores are 0 or NaN then
  }

  static double element(const char* at) {
    typename E::Storage x;
    memcpy(&x, at, sizeof x);
    return double(E::decode(x));
  }

  // Never inlined: the same pair has the same score wherever it is needed.
  __attribute__((noinline)) double score(int64_t position) const {
    double sum = 0;
    const char* key = keys.data + position * keys.position;
    for (int64_t d = 0; d < call.head_dim; ++d) {
      sum += element(query + d * query_feature) * element(key + d * keys.feature);
    }
    return sum * sign;
  }

  // visit(position) for every allowed key, in order.
  template <class Visit> void each_key(Visit visit) const {
    const Plan& plan = call.plan;
    const int32_t first_view = plan.components[item.component].key_view;
    for (int64_t e = item.begin; e < item.end; ++e) {
      const Tile tile = locate(plan.views[first_view + plan.key_view[e]], plan.indices[e]);
      const int64_t cells = list_positions(tile, s.key_position);
      const Mask mask(plan, e);
      for (int64_t c = 0; c < cells; ++c) {
        if (!mask || mask.allows(cell, c)) visit(s.key_position[c]);
      }
    }
  }

  // Takes all allowed keys into a normaliser, and has visit(position, rescale, weight) do the same for any other sum
  // with these weights: multiply it by `rescale` and add `weight` times what belongs to the key.
  template <class Visit> void weigh_keys(Normaliser& n, Visit visit) const {
    each_key([&](int64_t position) {
      const double x = score(position), logit = x * natural;
      double rescale = 1, weight = 0;  // as a logit of -inf leaves them
      if (x > n.largest && logit > -kInfinity<double>) {
        rescale = ::exp((n.largest - x) * natural), weight = 1;
        n.largest = x;
      } else if (logit != -kInfinity<double>) {
        weight = ::exp((x - n.largest) * natural);
      }
      if (logit == kInfinity<double>) weight = __builtin_nan("");  // inf / inf
      n.total = n.total * rescale + weight;
      visit(position, rescale, weight);
    });
  }

  // The normalised output goes to `out`; returns the log-sum-exp.
  double compute(T* out) const {
    double* sum = s.exact_output;
    Normaliser n = {-kInfinity<double>, 0, 0};
    clear(sum, call.head_dim_v);
    weigh_keys(n, [&](int64_t position, double rescale, double weight) {
      const char* value = values.data + position * values.position;
      for (int64_t j = 0; j < call.head_dim_v; ++j) {
        sum[j] = sum[j] * rescale + weight * element(value + j * values.feature);
      }
    });
    for (int64_t j = 0; j < call.head_dim_v; ++j) out[j] = n.total == 0 ? T(0) : T(sum[j] / n.total);
    return n.largest * natural + ::log(n.total);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
