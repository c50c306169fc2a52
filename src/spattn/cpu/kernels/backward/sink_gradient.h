// Gradient of a sink: -sum over the rows of weight * (delta - dlse), where delta = rowsum(dO o O).
#pragma once
#include <math.h>

#include "backward/exact.h"
#include "finish/sink.h"
#include "kernels.h"
#include "simd/element.h"
#include "simd/native.h"
#include "softmax/table_gradients.h"
#include "tile/arena.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns the dot product of two rows in float64, in eight sums, which vectorize.
template <class T> double dot_rows(const T* a, const T* b, int64_t width) {
  constexpr int kSums = 8;
  double sums[kSums] = {}, rest = 0;
  int64_t i = 0;
  for (; i + kSums <= width; i += kSums) {
    SPATTN_UNROLL
    for (int j = 0; j < kSums; ++j) sums[j] += double(a[i + j]) * double(b[i + j]);
  }
  for (; i < width; ++i) rest += double(a[i]) * double(b[i]);
  for (double sum : sums) rest += sum;
  return rest;
}

// Writes the exact accumulator of the gradient of the sink of a head, over the rows of a batch entry.
template <class E>
void sink_gradient(const Call& call, int64_t batch, int64_t head, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  const int64_t width = call.head_dim_v;
  T *dout = arena.array<T>(width), *out = arena.array<T>(width);
  const Head douts(call.dout, batch, head), outs(call.out, batch, head);
  const Sink sink(call, head);
  const double natural = Logits<double>(call).natural;
  int64_t* const words = call.dsinks + (batch * call.heads_q + head) * kSumWords;
  memset(words, 0, kSumWords * sizeof(int64_t));
  for (int64_t query = 0; sink && query < call.q_len; ++query) {
    if (call.sink_rows && !call.sink_rows[query]) continue;
    const T lse = read_row_value<T>(call.lse, batch, head, query);
    RowSoftmax row;
    if (is_far(call, lse)) {
      row = far_softmax(call, batch, head, query, natural);
    } else {
      read_row<E>(douts.row(query), douts.feature, width, dout);
      read_row<E>(outs.row(query), outs.feature, width, out);
      row = {0, double(lse), dot_rows(dout, out, width), ::exp(sink.logit - double(lse))};
    }
    const double term = row.sink * (double(read_row_value<T>(call.dlse, batch, head, query)) - row.delta);
    if (term != 0) add_exact(term, words, false);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
