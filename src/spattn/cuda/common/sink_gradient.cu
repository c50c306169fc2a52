// Formula    dsinks[h] = -sum over rows of exp(sink - lse) * delta, with delta = rowsum(dout o out) - dlse.
// Grid       one CTA per query head.
// Target     compute capability 8.0 and later.
// Types      float32, float64 for float64 calls; sums in float64.
// Order      fixed by the number of rows: results are bitwise reproducible.
// Test       tests/cuda/test_sinks.py      Bound  latency: reads two numbers per row.

#include "common/element.cuh"
#include "common/warp.cuh"

namespace spattn::common {

constexpr int kThreads = 1024;

struct SinkGradient {
  const void* sinks;  // (heads_q,); like lse and delta, float32 or float64
  const void* lse;
  const void* delta;  // (batch, heads_q, q_len), elements `delta_stride` apart
  void* dsinks;       // (heads_q,)
  long long lse_batch, lse_head, lse_token;
  long long delta_stride;
  int batch, heads_q, q_len, unused;
};

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(SinkGradient)};

extern "C" __global__ void __launch_bounds__(kThreads) sink_gradient(const __grid_constant__ SinkGradient p) {
  __shared__ double sums[kThreads / 32];
  const int head = blockIdx.x, lane = threadIdx.x % 32;
  const Sum sink = static_cast<const Sum*>(p.sinks)[head];
  const bool none = sink == -infinity<Sum>();
  double sum = 0;
  for (long long row = threadIdx.x; row < static_cast<long long>(p.batch) * p.q_len && !none; row += kThreads) {
    const long long batch = row / p.q_len, query = row % p.q_len;
    const Sum lse = static_cast<const Sum*>(p.lse)[batch * p.lse_batch + head * p.lse_head + query * p.lse_token];
    const long long place = (batch * p.heads_q + head) * p.q_len + query;
    const double weight = sink == lse ? 1 : exp(double(sink) - double(lse));  // inf - inf would be NaN
    sum -= weight * double(static_cast<const Sum*>(p.delta)[place * p.delta_stride]);
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_sum(sums[lane]);
  if (lane == 0) static_cast<Sum*>(p.dsinks)[head] = static_cast<Sum>(sum);
}

}  // namespace spattn::common
