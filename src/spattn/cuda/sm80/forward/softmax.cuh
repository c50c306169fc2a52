// Online softmax on mma.m16n8k16 accumulators. A thread holds rows g and g + 8 of a 16-row atom, g = lane / 4, columns
// 8 n + 2 (lane % 4) + {0, 1}; the four lanes of a quad share a row.
#pragma once
#include "common/element.cuh"
#include "common/warp.cuh"

namespace spattn::sm80 {

// Statistics of a row.
struct RowState {
  float row_max = -infinity<float>();  // in base 2: largest dot product times scale_log2, rounded once
  float row_sum = 0.f;                 // over this lane's columns; reduced over the quad in finish_row()
};

// Softmax numerator: replaces the dot products of row half `half` of an atom by weights exp2(s · scale_log2 −
// reference), one FFMA and one MUFU each. Returns their sum.
template <int kAtoms8>
__device__ __forceinline__ float weights_policy(float (&s)[kAtoms8][4], int half, float scale_log2, float reference) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kAtoms8; ++n) {
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      s[n][i] = power_of_two(fmaf(s[n][i], scale_log2, -reference));
      sum += s[n][i];
    }
  }
  return sum;
}

// Replaces the dot products of a row half by weights relative to the new running maximum; returns the rescaling factor
// of earlier sums. All terms use the same rounded row_max, so its rounding cancels. A row without keys keeps a maximum
// of −inf but subtracts 0, so that its terms are exp2(−inf) = 0, not NaN.
template <int kAtoms8>
__device__ __forceinline__ float update(RowState& state, float (&s)[kAtoms8][4], int half, float scale_log2) {
  float next = -infinity<float>();
#pragma unroll
  for (int n = 0; n < kAtoms8; ++n) next = fmaxf(next, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
  next = fmaxf(state.row_max, quad_max(next) * scale_log2);
  const float reference = next == -infinity<float>() ? 0.f : next;
  const float rescale = power_of_two(state.row_max - reference);
  const float sum = weights_policy(s, half, scale_log2, reference);
  state.row_sum = state.row_sum * rescale + sum;
  state.row_max = next;
  return rescale;
}

// Sets the products of row half `half` with a clear bit to `masked`. `bits` is the row's word of the tile's bitmask.
template <int kAtoms8>
__device__ __forceinline__ void apply_mask(float (&s)[kAtoms8][4], int half, unsigned long long bits, float masked) {
  const int shift = 2 * (threadIdx.x % 4);
  const unsigned words[2] = {static_cast<unsigned>(bits) >> shift, static_cast<unsigned>(bits >> 32) >> shift};
#pragma unroll
  for (int n = 0; n < kAtoms8; ++n) {
    const unsigned word = words[n / 4];
    if (!(word & (1u << (8 * (n % 4))))) s[n][2 * half] = masked;
    if (!(word & (2u << (8 * (n % 4))))) s[n][2 * half + 1] = masked;
  }
}

}  // namespace spattn::sm80
