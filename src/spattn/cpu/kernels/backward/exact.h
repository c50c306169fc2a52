// Float64 fallback of the backward: one query, one allowed key at a time (see finish/exact.h).
#pragma once
#include <math.h>

#include "finish/exact.h"
#include "finish/sink.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns the value of a row of lse or dlse, 0 if the array has no data.
template <class T> T read_row_value(const Array& array, int64_t batch, int64_t head, int64_t position) {
  T value = 0;
  if (array.data) memcpy(&value, Head(array, batch, head).row(position), sizeof value);
  return value;
}

// True if the rounding error of lse is too large for the weight exp(score - lse), which inherits it. While |lse| is at
// most 2^14 for float32 or 2^43 for float64, the error is at most 2^-11, less than that of scores of this size. Far
// above, no accuracy is left.
template <class T> bool is_far(const Call& call, T lse) {
  return fabs(double(lse)) > call.far_lse && lse != -kInfinity<T>;
}

inline Normaliser& normaliser(const Call& call, int64_t batch, int64_t head, int64_t position) {
  return call.normalisers[(batch * call.heads_q + head) * call.q_len + position];
}

// Adds the keys of an item to the softmax statistics of its rows with is_far().
template <class E>
void normalise(const Call& call, int64_t batch, int64_t head, const Work& work, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  const Positions position(call, arena);
  const Item item = {call, batch, head, work};
  const int64_t cells = list_positions(item.query_tile(), position.query);
  for (int64_t cell = 0; cell < cells; ++cell) {
    const int64_t query = position.query[cell];
    if (query == kPadding || !is_far(call, read_row_value<T>(call.lse, batch, head, query))) continue;
    const FallbackRow<E> row(item, cell, position);
    const FallbackVector<E> dout(Head(call.dout, batch, head), query);
    Normaliser& n = normaliser(call, batch, head, query);
    row.weigh_keys(n, [&](int64_t key, double rescale, double weight) {
      n.product =
          n.product * rescale + weight * row.dropout.factor(key) * dout.times({row.values, key}, call.head_dim_v);
    });
  }
}

// Softmax of a row in the float64 fallback: the weight of a score is exp((score - reference) * natural - rest).
struct RowSoftmax {
  double reference, rest;
  double delta;  // rowsum(dO o O), without dlse
  double sink;   // weight of the sink
};

// Returns the softmax of a row with is_far() from its statistics, to which it adds the sink.
inline RowSoftmax far_softmax(const Call& call, int64_t batch, int64_t head, int64_t position, double natural) {
  const Normaliser& n = normaliser(call, batch, head, position);
  RowSoftmax row = {n.largest, ::log(n.total), n.product / n.total, 0};
  const Sink sink(call, head);
  if (n.total == 0) return {0, kInfinity<double>, 0, 1};  // no key has a weight; without a sink, lse would be -inf
  if (!sink) return row;
  const SinkShares shares = Sink::add(sink.logit - n.largest * natural, row.rest);
  row.delta *= shares.keys, row.sink = shares.sink;
  return row;
}

// Writes dQ of a row to `dq` and, unless `sums` is null, adds the row's terms to dK and dV.
template <class E> void fallback_gradients(const FallbackRow<E>& row, const Sums* sums, double* dq) {
  using T = typename E::Compute;
  const Call& call = row.item.call;
  const int64_t batch = row.item.batch, head = row.item.head;
  const FallbackVector<E> dout(Head(call.dout, batch, head), row.position);
  const T lse = read_row_value<T>(call.lse, batch, head, row.position);
  const bool far = is_far(call, lse);
  const RowSoftmax softmax =
      far ? far_softmax(call, batch, head, row.position, row.logits.natural)
          : RowSoftmax{0, double(lse), dout.times({Head(call.out, batch, head), row.position}, call.head_dim_v), 0};
  const double delta = softmax.delta - double(read_row_value<T>(call.dlse, batch, head, row.position));
  clear(dq, call.head_dim);
  row.each_key([&](int64_t key) {
    const FallbackVector<E> k(row.keys, key);
    double derivative = 1;
    const double score = row.score(key, &derivative);
    if (row.removed(score)) return;
    const double weight = scalar_weight(row.logits.scalar_exponent(score, softmax.reference) - softmax.rest);
    const double kept = row.dropout.factor(key);
    const double of_score = weight * (kept * dout.times({row.values, key}, call.head_dim_v) - delta);
    // Where the weight is 0, the derivative may be NaN.
    const double gradient = of_score * (weight == 0 ? 1 : derivative) * call.scale;
    for (int64_t d = 0; d < call.head_dim; ++d) dq[d] += gradient * k[d];
    if (!sums) return;
    if (row.score_function && weight != 0) row.score_function.template add_table_gradients<T>(of_score);
    T* dk = reinterpret_cast<T*>(sums->dk) + (key - sums->begin) * sums->ld_dk;
    T* dv = reinterpret_cast<T*>(sums->dv) + (key - sums->begin) * sums->ld_dv;
    for (int64_t d = 0; d < call.head_dim; ++d) dk[d] += T(gradient * row.query[d]);
    for (int64_t j = 0; j < call.head_dim_v; ++j) dv[j] += T(weight * kept * dout[j]);
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
