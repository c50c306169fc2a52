// Formula    lse2 = lse log2(e), or +inf for empty rows; delta = rowsum(dout o out) - dlse.
// Grid       eight lanes per query row from `first` on, flat.
// Target     sm_90a (no special instructions; shares the structs of backward.cu).
// Types      bfloat16 or float16 dout and out, float32 lse, dlse and statistics.
// Test       tests/cuda/sm90/test_wgmma_backward.py      Bound  memory: reads dout and out once, 16 bytes per lane.

#include "common/chain.cuh"
#include "common/element.cuh"
#include "sm90/backward/params.cuh"

namespace spattn::sm90_backward {

constexpr int kLanes = 8, kStatisticThreads = 256;

extern "C" __constant__ int launch_shape[3] = {kStatisticThreads, 0, sizeof(Rows)};

__device__ __forceinline__ float dot(const uint4& a, const uint4& b, float sum) {
  const Element* x = reinterpret_cast<const Element*>(&a);
  const Element* y = reinterpret_cast<const Element*>(&b);
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum = fmaf(widen(x[i]), widen(y[i]), sum);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kStatisticThreads) hopper_statistics(const __grid_constant__ Rows p) {
  let_next_start();
  const int64_t thread = int64_t(blockIdx.x) * kStatisticThreads + threadIdx.x;
  if (thread < p.added_count) p.added[thread] = 0;
  const int64_t row = thread / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool real = row < p.rows;  // lanes without a row still take part in the shuffles
  float sum = 0.0f;
  const int64_t query = p.first + row % p.count, head = row / p.count % p.heads_q, batch = row / p.count / p.heads_q;
  const auto place = [&](const Strides& stride) {
    return batch * stride.batch + head * stride.head + query * stride.token;
  };
  if (real) {
    const Element* dout = static_cast<const Element*>(p.dout) + place(p.dout_stride);
    const Element* out = static_cast<const Element*>(p.out) + place(p.out_stride);
    for (int d = lane * kVector; d < p.head_dim_v; d += kLanes * kVector) {
      sum = dot(__ldg(reinterpret_cast<const uint4*>(dout + d)), __ldg(reinterpret_cast<const uint4*>(out + d)), sum);
    }
  }
  for (int step = kLanes / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (!real || lane) return;
  const float lse = p.lse[place(p.lse_stride)];
  const bool nothing = lse == -infinity<float>();
  const float delta = sum - (p.dlse == nullptr || nothing ? 0.0f : p.dlse[place(p.dlse_stride)]);
  p.statistics[(batch * p.heads_q + head) * p.q_len + query] = {
      nothing ? infinity<float>() : lse * kLog2E<float>, nothing ? 0.0f : delta, {0.0f, 0.0f}};
}

}  // namespace spattn::sm90_backward
