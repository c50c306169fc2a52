// The sink of a query head: one more logit in the softmax of each row, without a value.
//
// Kernels add it once per row, when the log-sum-exp over all keys is known: in the epilogue of a work item, or when
// they combine split-KV partials. The backward reads a log-sum-exp that includes the sink; only the sink's own gradient
// needs the sink (sink_gradient.cu).
#pragma once
#include "common/element.cuh"

#ifndef SPATTN_SINKS
#define SPATTN_SINKS 0
#endif

namespace spattn {

constexpr bool kSinks = SPATTN_SINKS;  // whether each query head has a sink

// Adds a sink, -inf for none, to the log-sum-exp of a row; returns the factor that rescales the row's output.
template <typename T>
__device__ __forceinline__ T add_sink(T sink, T& lse) {
  if (sink == -infinity<T>()) return 1;
  const T above = sink - lse, less = exp(-fabs(above));  // `above` is +inf for a row without keys
  lse = (above > 0 ? sink : lse) + log1p(less);
  return (above > 0 ? less : T(1)) / (1 + less);
}

}  // namespace spattn
