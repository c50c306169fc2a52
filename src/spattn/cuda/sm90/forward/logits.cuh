// Score modification: from dot products of q and k to the softmax's input.
#pragma once

#include "sm90/forward/config.cuh"
#include "sm90/forward/mask.cuh"

namespace spattn::sm90 {

// Applies the sign of the scale, whose magnitude is folded into the exponent, and the masks of partial tiles.
__device__ __forceinline__ void logits_policy(float (&s)[kColumns / 2], float sign, const StepMask<kTiles>& mask) {
  if (sign != 1.0f) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) s[i] *= sign;
  }
  if (mask.partial) {
    apply_mask<0>(s, mask.word[0]);
    if constexpr (kTiles == 2) apply_mask<32>(s, mask.word[1]);
  }
}

}  // namespace spattn::sm90
