// Formula    target = sum_s partial_s: gradient rows with partials from several work items, or from none.
// Grid       (batch, head) x 32 rows per CTA, flat; eight lanes per row.
// Target     sm_90a (no special instructions; shares the structs of backward.cu).
// Types      float32 workspace; bfloat16 or float16 target.
// Order      that of the sources, in every launch: results are bitwise reproducible.
// Test       tests/cuda/sm90/test_wgmma_backward.py      Bound  memory: reads workspace rows once, 16 bytes per lane.

#include "common/chain.cuh"
#include "common/element.cuh"
#include "sm90/backward/params.cuh"

namespace spattn::sm90_backward {

constexpr int kLanes = 8, kSumThreads = 256;
constexpr int kRows = kSumThreads / kLanes;
constexpr int kAhead = 4;  // sources whose loads are in flight together

extern "C" __constant__ int launch_shape[3] = {kSumThreads, 0, sizeof(Sum)};

__device__ __forceinline__ void add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

extern "C" __global__ void __launch_bounds__(kSumThreads) hopper_sum(const __grid_constant__ Sum p) {
  wait_for_previous();
  let_next_start();
  if (p.gate != nullptr && *p.gate == 0) return;
  const int lane = threadIdx.x % kLanes;
  const int4 head = p.heads[blockIdx.x / p.head_blocks];
  const int merge = head.x + blockIdx.x % p.head_blocks * kRows + threadIdx.x / kLanes;
  if (merge >= head.y) return;
  const float* partial = p.partial + (int64_t(head.z) * p.heads_count + head.w) * p.partial_rows * p.features;
  Element* target = static_cast<Element*>(p.target) + head.z * p.target_stride.batch + head.w * p.target_stride.head +
                    p.rows[merge] * p.target_stride.token;
  const int begin = p.indptr[merge], end = p.indptr[merge + 1];
  for (int d = 4 * lane; d < p.features; d += 4 * kLanes) {
    float4 sum = {};
#pragma unroll 1
    for (int s = begin; s < end; s += kAhead) {
      float4 value[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int64_t row = s + a < end ? p.sources[s + a] : 0;
        value[a] = s + a < end ? __ldcs(reinterpret_cast<const float4*>(partial + row * p.features + d)) : float4{};
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) add(sum, value[a]);
    }
    Element2 narrowed[2];
    narrow(sum.x, sum.y, narrowed[0]);
    narrow(sum.z, sum.w, narrowed[1]);
    *reinterpret_cast<uint2*>(target + d) = *reinterpret_cast<const uint2*>(narrowed);
  }
}

}  // namespace spattn::sm90_backward
