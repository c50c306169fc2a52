// Splits q, k and v into bfloat16 terms (terms.cuh), the operands of attention.cu for float32.
//
// Formula    to[row] = (x0[row], x1[row], ...), each padded with zeros to kDim features; v is multiplied by kValueFactor.
// Grid       flat; a thread splits eight features of a row.
// Target     sm_90a (no special instructions).
// Types      float32 of any strides in, contiguous bfloat16 out.
// Test       tests/cuda/sm90/test_wgmma_forward.py      Bound  memory

#include "common/chain.cuh"
#include "sm90/terms.cuh"

namespace spattn::sm90 {

constexpr int kDim = SPATTN_HEAD_DIM, kEach = 8, kThreads = 256;

struct Source {
  const float* from;
  Term* to;
  int64_t stride[4];  // batch, head, token, feature
  int64_t rows;       // batch entries * heads * tokens
  int32_t heads, tokens, head_dim;
  int32_t aligned;  // eight features are two aligned vectors
  float factor;
  int32_t unused;
};

struct Split {
  Source of[3];
};

__device__ __forceinline__ void split_row(const Source& own, int64_t row, int first) {
  const int64_t head = row / own.tokens;
  const float* from = own.from + head / own.heads * own.stride[0] + head % own.heads * own.stride[1] +
                      (row - head * own.tokens) * own.stride[2];
  float x[kEach];
  if (own.aligned && first < own.head_dim) {  // head_dim is a multiple of eight
    const float4* vectors = reinterpret_cast<const float4*>(from + first);
    const float4 low = __ldcs(vectors), high = __ldcs(vectors + 1);
    const float loaded[kEach] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = loaded[i];
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = first + i < own.head_dim ? from[(first + i) * own.stride[3]] : 0.0f;
  }
  uint32_t words[kTerms][kEach / 2];
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    uint32_t terms[kTerms];
    split2(x[i] * own.factor, x[i + 1] * own.factor, terms);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) words[t][i / 2] = terms[t];
  }
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    Term* to = own.to + (row * kTerms + t) * kDim + first;
    *reinterpret_cast<uint4*>(to) = {words[t][0], words[t][1], words[t][2], words[t][3]};
  }
}

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(Split)};

extern "C" __global__ void __launch_bounds__(kThreads) hopper_split(const __grid_constant__ Split params) {
  let_next_start();  // the next launch waits for this one
  wait_for_previous();
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int first = thread % (kDim / kEach) * kEach;
  int64_t row = thread / (kDim / kEach);
  for (int i = 0; i < 3; ++i) {
    if (row < params.of[i].rows) return split_row(params.of[i], row, first);
    row -= params.of[i].rows;
  }
}

}  // namespace spattn::sm90
