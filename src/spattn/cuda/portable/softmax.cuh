// Online softmax of the rows that a thread holds as mma.m16n8k16 accumulators: rows g and g + 8 of a 16-row atom,
// g = lane / 4, columns 8 n + 2 (lane % 4) + {0, 1}; the four lanes of a quad share a row.
#pragma once
#include "common/element.cuh"
#include "common/warp.cuh"

namespace spattn::portable {

// One row's statistics.
struct RowState {
  float row_max = -infinity<float>();  // in base 2: the largest dot product times scale_log2, rounded once
  float row_sum = 0.f;                 // of this lane's columns; the quad's sum is taken once, in finish_row()
};

// The weights policy: replaces the logits of row half `half` of an atom by exp2(s · scale_log2 − reference), one FFMA
// and one MUFU each, and returns the sum that the row's total counts. What multiplies the values is what it leaves in
// s.
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

// Replaces the logits of a row half by weights relative to the row's new maximum, and returns the factor that what was
// summed before must be multiplied with. All terms refer to the same rounded row_max, so its rounding cancels. A row
// that has seen no key keeps a maximum of −inf, for which exp2 is taken relative to 0: all its terms are exp2(−inf) =
// 0, not NaN.
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

// Sets the products of row half `half` whose bit is clear to `masked`. `bits` is the row's word of the tile's bitmask.
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

}  // namespace spattn::portable
