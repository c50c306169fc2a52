// Float64 fallback of the backward: one query, one allowed key at a time (see finish/exact.h).
#pragma once
#include <math.h>

#include "finish/exact.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> T read_lse(const Call& call, int64_t batch, int64_t head, int64_t position) {
  const int64_t* stride = call.lse.stride;
  T lse;
  memcpy(&lse, call.lse.data + batch * stride[0] + head * stride[1] + position * stride[2], sizeof lse);
  return lse;
}

// The weight exp(score - lse) has the rounding error of lse. Up to 2^14 for float32 and 2^43 for float64, that is at
// most 2^-11, less than the error of scores of that size; far above, no accuracy is left.
template <class T> bool is_far(const Call& call, T lse) {
  return fabs(double(lse)) > call.far_lse && lse != -kInfinity<T>;
}

// The gradient of a row's lse.
template <class T> T read_dlse(const Call& call, int64_t batch, int64_t head, int64_t position) {
  const int64_t* stride = call.dlse.stride;
  T dlse = 0;
  if (call.dlse.data) {
    memcpy(&dlse, call.dlse.data + batch * stride[0] + head * stride[1] + position * stride[2], sizeof dlse);
  }
  return dlse;
}

inline Normaliser& normaliser(const Call& call, int64_t batch, int64_t head, int64_t position) {
  return call.normalisers[(batch * call.heads_q + head) * call.q_len + position];
}

// A row of dO.
template <class E> struct FallbackGradient {
  const FallbackRow<E>& row;
  const char* data;
  int64_t feature;  // bytes

  explicit FallbackGradient(const FallbackRow<E>& row) : row(row) {
    const Head gradients(row.item.call.dout, row.item.batch, row.item.head);
    data = gradients.data + row.position * gradients.position;
    feature = gradients.feature;
  }

  double operator[](int64_t j) const { return row.element(data + j * feature); }

  // Its dot product with a row of V or O.
  double times(const Head& head, int64_t position) const {
    const char* other = head.data + position * head.position;
    double sum = 0;
    for (int64_t j = 0; j < row.item.call.head_dim_v; ++j) sum += (*this)[j] * row.element(other + j * head.feature);
    return sum;
  }
};

// Adds an item's keys to the softmax statistics of its far rows.
template <class E>
void normalise(const Call& call, int64_t batch, int64_t head, const Work& work, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  const Positions position(call, arena);
  const Item item = {call, batch, head, work};
  const int64_t cells = list_positions(item.query_tile(), position.query);
  for (int64_t cell = 0; cell < cells; ++cell) {
    const int64_t query = position.query[cell];
    if (query == kPadding || !is_far(call, read_lse<T>(call, batch, head, query))) continue;
    const FallbackRow<E> row(item, cell, position);
    const FallbackGradient<E> dout(row);
    Normaliser& n = normaliser(call, batch, head, query);
    row.weigh_keys(n, [&](int64_t key, double rescale, double weight) {
      n.product = n.product * rescale + weight * dout.times(row.values, key);
    });
  }
}

// Writes dQ of the row to `dq` and, if `sums` is set, adds the row's terms to dK and dV.
template <class E> void fallback_gradients(const FallbackRow<E>& row, const Sums* sums, double* dq) {
  using T = typename E::Compute;
  const Call& call = row.item.call;
  const int64_t batch = row.item.batch, head = row.item.head;
  const FallbackGradient<E> dout(row);
  const T lse = read_lse<T>(call, batch, head, row.position);
  double reference = 0, rest = double(lse), delta;  // lse = reference + rest, in natural units of a score
  if (is_far(call, lse)) {
    const Normaliser& n = normaliser(call, batch, head, row.position);
    reference = n.largest, rest = ::log(n.total), delta = n.product / n.total;
  } else {
    delta = dout.times(Head(call.out, batch, head), row.position);
  }
  delta -= double(read_dlse<T>(call, batch, head, row.position));
  clear(dq, call.head_dim);
  row.each_key([&](int64_t key) {
    const char* k = row.keys.data + key * row.keys.position;
    double derivative = 1;
    const double score = row.score(key, &derivative);
    if (row.removed(score)) return;
    const double weight = scalar_weight(row.logits.scalar_exponent(score, reference) - rest);
    const double gradient = weight * (dout.times(row.values, key) - delta) * derivative * call.scale;
    for (int64_t d = 0; d < call.head_dim; ++d) dq[d] += gradient * row.element(k + d * row.keys.feature);
    if (!sums) return;
    T* dk = reinterpret_cast<T*>(sums->dk) + (key - sums->begin) * sums->ld_dk;
    T* dv = reinterpret_cast<T*>(sums->dv) + (key - sums->begin) * sums->ld_dv;
    for (int64_t d = 0; d < call.head_dim; ++d) dk[d] += T(gradient * row.element(row.query + d * row.query_feature));
    for (int64_t j = 0; j < call.head_dim_v; ++j) dv[j] += T(weight * dout[j]);
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
