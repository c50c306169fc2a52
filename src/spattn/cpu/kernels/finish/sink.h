// The sink of a query head: one more logit in the softmax of each row, without a value.
//
// The kernels add the sink to a row once its log-sum-exp over all keys is known: in the epilogue of its item, or when
// they combine its partials. For dQ, dK and dV, the backward only needs the log-sum-exp that includes the sink.
#pragma once
#include <math.h>

#include "kernels.h"
#include "tile/arena.h"

namespace spattn {
namespace SPATTN_ISA {

// Weights of the keys together and of the sink in the softmax of a row; their sum is 1.
struct SinkShares {
  double keys, sink;
};

struct Sink {
  double logit;  // -inf: no sink

  Sink(const Call& call, int64_t head) : logit(call.sinks ? call.sinks[head] : -kInfinity<double>) {}

  explicit operator bool() const { return logit != -kInfinity<double>; }

  // Adds the sink to the log-sum-exp of a row, which may be -inf. `logit` and `lse` may share an offset.
  static SinkShares add(double logit, double& lse) {
    const double above = logit - lse, less = ::exp(-::fabs(above)), smaller = less / (1 + less),
                 larger = 1 / (1 + less);
    lse = (above > 0 ? logit : lse) + ::log1p(less);
    return above > 0 ? SinkShares{smaller, larger} : SinkShares{larger, smaller};
  }

  // Adds the sink to a normalized row and its log-sum-exp. Not inlined, to keep epilogues without a sink small.
  template <class T> __attribute__((noinline)) void add_to(T* row, int64_t width, double& lse) const {
    const double factor = add(logit, lse).keys;
    for (int64_t j = 0; j < width; ++j) row[j] = T(double(row[j]) * factor);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
