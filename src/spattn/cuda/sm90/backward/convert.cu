// Formula    dQ = scale * sums, converted from accumulator order to rows of elements.
// Grid       one CTA per head and sub-tile of 64 queries.
// Target     sm_90a (no special instructions; shares the structs of backward.cu).
// Types      float32 sums; bfloat16 or float16 dq.
// Test       tests/cuda/sm90/test_wgmma_backward.py      Bound  memory: reads the sums once, 16 bytes per lane.

#include "common/chain.cuh"
#include "common/element.cuh"
#include "sm90/backward/params.cuh"

namespace spattn::sm90_backward {

constexpr int kDim = SPATTN_HEAD_DIM, kSubtile = 64, kConvertThreads = 256, kHalf = kDim / 2;
constexpr int kPadded = kDim + 8;  // 16 bytes of padding, so that rows start in different banks

extern "C" __constant__ int launch_shape[3] = {kConvertThreads, 0, sizeof(Converted)};

extern "C" __global__ void __launch_bounds__(kConvertThreads) hopper_convert(const __grid_constant__ Converted p) {
  wait_for_previous();
  let_next_start();
  __shared__ __align__(16) Element tile[kSubtile][kPadded];
  const int subtile = blockIdx.x % p.query_subtiles, place = blockIdx.x / p.query_subtiles;
  const bool any = p.added[2 * blockIdx.x] > 0;  // the counter of the first half of the features
  const float4* sums = reinterpret_cast<const float4*>(p.query_sums + int64_t(blockIdx.x) * kSubtile * kDim);
  // Each warpgroup wrote half of the features; float4 i of its thread t is at 128 i + t.
  float probe = 0.0f;  // NaN if a sum is not finite
  const int half = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kHalf / 8; ++i) {
    const float4 x = any ? __ldcs(sums + half * (kHalf / 8) * 128 + 128 * i + thread) : float4{};
    const int row = thread / 32 * 16 + lane / 4, column = half * kHalf + 8 * i + lane % 4 * 2;
    narrow(x.x * p.scale, x.y * p.scale, *reinterpret_cast<Element2*>(&tile[row][column]));
    narrow(x.z * p.scale, x.w * p.scale, *reinterpret_cast<Element2*>(&tile[row + 8][column]));
    probe = fmaf(x.x, 0.0f, fmaf(x.y, 0.0f, fmaf(x.z, 0.0f, fmaf(x.w, 0.0f, probe))));
  }
  // A masked key may have made the sum non-finite: let the dQ kernel run, whose fallback reads allowed keys only.
  if (__syncthreads_or(!(probe == 0.0f)) && threadIdx.x == 0) *p.nonfinite = 1;
  const int* first = p.subtiles + 3 * subtile;
  constexpr int kVectors = kDim / kVector;
  for (int cell = threadIdx.x; cell < kSubtile * kVectors; cell += kConvertThreads) {
    const int row = cell / kVectors, d = cell % kVectors * kVector;
    int64_t position;
    if (!sm90::cell_position(*p.view, first[0], first[1], first[2], row, position) || d >= p.head_dim) continue;
    Element* target = static_cast<Element*>(p.dq) + place / p.heads_q * p.dq_stride.batch +
                      place % p.heads_q * p.dq_stride.head + position * p.dq_stride.token;
    *reinterpret_cast<uint4*>(target + d) = *reinterpret_cast<const uint4*>(&tile[row][d]);
  }
}

}  // namespace spattn::sm90_backward
