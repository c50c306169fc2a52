// Gradients of rows with NaN or infinities: one query, one allowed key at a time, in double precision (see exact.h).
#pragma once
#include <math.h>

#include "backward_scratch.h"
#include "exact.h"

namespace spattn {
namespace SPATTN_ISA {

// Leaves dQ of the row in s.exact_dq and, where `sums` is given, adds the row's part of dK and dV.
template <class E>
void exact_gradients(const ExactRow<E>& row, int64_t batch, int64_t head, int64_t position, const Sums* sums,
                     BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  const Call& call = row.call;
  const Head gradients(call.dout, batch, head), outputs(call.out, batch, head);
  const char *dout = gradients.data + position * gradients.position, *out = outputs.data + position * outputs.position;
  const auto dout_at = [&](int64_t j) { return row.element(dout + j * gradients.feature); };
  T lse;
  memcpy(&lse, call.lse.data + batch * call.lse.stride[0] + head * call.lse.stride[1] + position * call.lse.stride[2],
         sizeof lse);
  double delta = 0;
  for (int64_t j = 0; j < call.head_dim_v; ++j) delta += dout_at(j) * row.element(out + j * outputs.feature);
  for (int64_t d = 0; d < call.head_dim; ++d) s.exact_dq[d] = 0;
  row.each_key([&](int64_t key) {
    const char *k = row.keys.data + key * row.keys.position, *v = row.values.data + key * row.values.position;
    const double weight = ::exp(row.logit(key) - double(lse));
    double product = 0;
    for (int64_t j = 0; j < call.head_dim_v; ++j) product += dout_at(j) * row.element(v + j * row.values.feature);
    const double gradient = weight * (product - delta) * call.scale;
    for (int64_t d = 0; d < call.head_dim; ++d) s.exact_dq[d] += gradient * row.element(k + d * row.keys.feature);
    if (!sums) return;
    T* dk = reinterpret_cast<T*>(sums->dk) + (key - sums->begin) * sums->ld_dk;
    T* dv = reinterpret_cast<T*>(sums->dv) + (key - sums->begin) * sums->ld_dv;
    for (int64_t d = 0; d < call.head_dim; ++d) dk[d] += T(gradient * row.element(row.query + d * row.query_feature));
    for (int64_t j = 0; j < call.head_dim_v; ++j) dv[j] += T(weight * dout_at(j));
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
