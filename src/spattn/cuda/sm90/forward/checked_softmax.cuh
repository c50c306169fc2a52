// Online softmax for float8, which looks at weights instead of scores.
#pragma once

#include <cstdint>

#include "sm90/forward/softmax.cuh"

namespace spattn::sm90 {

// Weights are multiplied by 2^kLift, so that those above 2^-12.5 are normal numbers, and sums of four remain below kMost,
// the largest number of e4m3, while no weight exceeds that of the running maximum.
constexpr float kLift = 6.5f, kMost = 448.0f;

__device__ __forceinline__ int maximum(int a, int b, int c) { return __vimax3_s32(a, b, c); }

// Does not look at the scores, once a row has seen a key: weights tell, as sums of four above kMost, when the running
// maximum must move. A weight that overflows float32 makes its row non-finite. `reference` is the running maximum minus
// kLift; `limit` is -inf until the row has seen a key, then 0.
struct CheckedSoftmax : Softmax {
  bool begins;  // whether any row of this warp may not have seen a key

  __device__ __forceinline__ void reset() {
    Softmax::reset();
    begins = true;
  }

  // The largest number of row h.
  template <int kCount>
  __device__ __forceinline__ static float largest(const float (&s)[kCount], int h) {
    float found[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
    for (int i = 4; i < kCount; i += 4) {
#pragma unroll
      for (int b = 0; b < 2; ++b) found[b] = fmaxf(found[b], s[i + 2 * h + b]);
    }
    return quad_max(fmaxf(found[0], found[1]));
  }

  // As Softmax::update().
  template <int kCount>
  __device__ __forceinline__ bool update(float (&s)[kCount], float scale_log2, float (&rescale)[2]) {
    if (begins) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = largest(s, h);
        const bool first = limit[h] < 0.0f && top > -infinity<float>();
        reference[h] = first ? top * scale_log2 - kLift : reference[h];
        limit[h] = first ? 0.0f : limit[h];
      }
      begins = __any_sync(0xffffffff, fminf(limit[0], limit[1]) < 0.0f);
    }
    float sums[2];
    const bool moved = __any_sync(0xffffffff, weigh(s, scale_log2, sums) > __float_as_int(kMost));
    if (moved) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float above = fmaxf(logarithm(largest(s, h)) - kLift, 0.0f), before = reference[h];
        reference[h] += above;
        rescale[h] = exp2_flushed(before - reference[h]);
        row_sum[h] *= rescale[h];
        sums[h] *= rescale[h];
      }
      scale_rows(s, rescale);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) row_sum[h] += sums[h];
    return moved;
  }

  // Replaces dot products by weights; returns the largest sum of four, as an integer: sums are not negative.
  template <int kCount>
  __device__ __forceinline__ int weigh(float (&s)[kCount], float scale_log2, float (&sums)[2]) const {
    int found = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 2 * h; i < kCount; i += 16) {
        const float first = sum_of_four(s + i, scale_log2, h), second = sum_of_four(s + i + 8, scale_log2, h);
        found = maximum(found, __float_as_int(first), __float_as_int(second));
        even += first;
        odd += second;
      }
      sums[h] = even + odd;
    }
    return found;
  }

  __device__ __forceinline__ float sum_of_four(float* s, float scale_log2, int h) const {
#pragma unroll
    for (const int i : {0, 1, 4, 5}) s[i] = exp2_flushed(s[i] * scale_log2 - reference[h]);
    return (s[0] + s[1]) + (s[4] + s[5]);
  }
};

}  // namespace spattn::sm90
