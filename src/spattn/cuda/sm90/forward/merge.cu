// Formula    out = sum_s exp(lse_s - lse) out_s, lse = log(sum_s exp(lse_s)): combines split-KV partials. The sink is
//            one more term of lse.
// Grid       (batch, head) × 32 rows per CTA, flat; eight lanes per row.
// Target     sm_90a (no special instructions; shares the sizes of attention.cu).
// Types      float32 workspace; float32, bfloat16 or float16 out, float32 lse.
// Order      the plan's order of sources, in every launch: results are bitwise reproducible.
// Test       tests/cuda/sm90/test_wgmma_forward.py      Bound  memory: reads workspace rows once, 16 bytes per lane.

#include "sm90/forward/config.cuh"
#include "sm90/forward/softmax.cuh"

namespace spattn::sm90 {

constexpr uint32_t kAll = 0xffffffff;
constexpr int kLanes = 8;  // lanes per row: four rows per warp keep enough loads in flight
constexpr int kMergeThreads = 256;
constexpr int kRows = kMergeThreads / kLanes;
constexpr int kVectors = kDimV / 4 / kLanes;  // float4 per lane and row
constexpr int kAhead = kDimV <= 128 ? 4 : 2;  // sources whose loads are in flight together: split lists have up to 64

__device__ __forceinline__ float row_max(float x) {
  for (int step = kLanes / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

__device__ __forceinline__ float row_sum(float x) {
  for (int step = kLanes / 2; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// Adds the rows of up to kLanes sources to `result`; lane l of a row holds the weight and workspace row of source l.
__device__ __forceinline__ void add_rows(const Merge& m, int count, float weight, int64_t row,
                                         float4 (&result)[kVectors]) {
  const int lane = threadIdx.x % kLanes;
  const int most = __reduce_max_sync(kAll, max(count, 0));
#pragma unroll 1
  for (int s = 0; s < most; s += kAhead) {
    float4 value[kAhead][kVectors];
    float factor[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      factor[a] = __shfl_sync(kAll, weight, s + a, kLanes);
      const float* source = m.partial_out + __shfl_sync(kAll, row, s + a, kLanes) * m.head_dim_v;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int d = 4 * (lane + kLanes * i);
        const bool real = s + a < count && d < m.head_dim_v;
        value[a][i] = real ? __ldcs(reinterpret_cast<const float4*>(source + d)) : float4{};
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (s + a >= count) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        result[i].x = fmaf(factor[a], value[a][i].x, result[i].x);
        result[i].y = fmaf(factor[a], value[a][i].y, result[i].y);
        result[i].z = fmaf(factor[a], value[a][i].z, result[i].z);
        result[i].w = fmaf(factor[a], value[a][i].w, result[i].w);
      }
    }
  }
}

__device__ __forceinline__ void store_row(const Merge& m, const int4& head, int target, float inverse,
                                          const float4 (&result)[kVectors]) {
  Element* out = static_cast<Element*>(m.out) + head.z * m.out_stride.batch + head.w * m.out_stride.head +
                 target * m.out_stride.token;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int d = 4 * (threadIdx.x % kLanes + kLanes * i);
    if (d >= m.head_dim_v) continue;
    const float4 scaled = {result[i].x * inverse, result[i].y * inverse, result[i].z * inverse, result[i].w * inverse};
    if constexpr (sizeof(Element) == 4) *reinterpret_cast<float4*>(out + d) = scaled;
    else *reinterpret_cast<uint2*>(out + d) = {narrow2(scaled.x, scaled.y), narrow2(scaled.z, scaled.w)};
  }
}

extern "C" __constant__ int launch_shape[3] = {kMergeThreads, 0, sizeof(Merge)};

extern "C" __global__ void __launch_bounds__(kMergeThreads) hopper_merge(const __grid_constant__ Merge m) {
  const int lane = threadIdx.x % kLanes;
  const int4 head = m.heads[blockIdx.x / m.head_blocks];
  const int merge = head.x + blockIdx.x % m.head_blocks * kRows + threadIdx.x / kLanes;
  const bool real = merge < head.y;  // lanes without a row still take part in the shuffles
  const int64_t place = static_cast<int64_t>(head.z) * m.heads_q + head.w;
  const int64_t first = place * m.partial_rows;
  const int begin = real ? m.indptr[merge] : 0, end = real ? m.indptr[merge + 1] : 0;
  const int target = real ? m.rows[merge] : 0;
  const int rounds = __reduce_max_sync(kAll, (end - begin + kLanes - 1) / kLanes);
  float largest = -infinity<float>();
  for (int s = begin + lane; s < end; s += kLanes) largest = fmaxf(largest, m.partial_lse[first + m.sources[s]]);
  largest = row_max(largest);
  const float reference = largest == -infinity<float>() ? 0.0f : largest;
  float sum = 0.0f;
  float4 result[kVectors] = {};
  for (int round = 0; round < rounds; ++round) {
    const int s = begin + round * kLanes + lane;
    const int64_t row = s < end ? first + m.sources[s] : 0;
    const float weight = s < end ? expf(m.partial_lse[row] - reference) : 0.0f;
    sum += weight;
    add_rows(m, min(kLanes, end - begin - round * kLanes), weight, row, result);
  }
  sum = row_sum(sum);
  if (!real) return;
  float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float lse = sum == 0.0f ? -infinity<float>() : reference + logf(sum);
  if constexpr (kSinks) inverse *= add_sink(m.sinks[(head.w * m.q_len + target) / m.sink_rows], lse);
  store_row(m, head, target, inverse, result);
  if (lane == 0 && m.lse != nullptr) m.lse[place * m.q_len + target] = lse;
}

}  // namespace spattn::sm90
