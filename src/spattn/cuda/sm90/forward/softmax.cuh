// Online softmax on WGMMA accumulators: base 2, float32 statistics, the scale folded into the exponent's FMA.
//
// A thread holds two rows (h = 0, 1) of the fragment layout of wgmma.cuh; four neighbouring lanes share a row.
#pragma once

#include <cstdint>

#include "common/element.cuh"
#include "common/fallback_softmax.cuh"
#include "common/warp.cuh"

namespace spattn::sm90 {

// Lazy rescaling: the running maximum changes only if a score exceeds it by more than this in base 2. Weights stay
// below 2^8, harmless in float32 sums and in both 16-bit types, and most iterations need neither shuffles nor a
// rescaled output.
constexpr float kSlack = 8.0f;
#if SPATTN_FLOAT8
constexpr float kFar = 1 << 20;
#else
constexpr float kFar = kFarLogit<float>;
#endif
constexpr float kExcess = 64.0f;  // base 2: with a sink that far above, weights vanish in the sum, which is below 2^40

// log2(x) and 1 / x of a row sum; approximations, within 2 ulp, suffice for 16-bit results.
constexpr bool kPrecise = sizeof(Element) == 4;
__device__ __forceinline__ float logarithm(float x) { return kPrecise ? log2f(x) : __log2f(x); }
__device__ __forceinline__ float reciprocal_of_sum(float x) { return kPrecise ? __frcp_rn(x) : __fdividef(1.0f, x); }

struct Softmax {
  float reference[2];  // running maximum of the dot products, times scale * log2(e)
  float limit[2];      // a larger dot product changes the running maximum; -inf until the row has seen a key
  float row_sum[2];    // over this thread's columns only

  __device__ __forceinline__ void reset() {
    reference[0] = reference[1] = row_sum[0] = row_sum[1] = 0.0f;
    limit[0] = limit[1] = -infinity<float>();
  }

  // Replaces dot products by weights 2^(product * scale_log2 - running maximum). Returns true if a running maximum of
  // this warp changed: the caller must then multiply earlier accumulators by `rescale`. Masked products (-inf) get
  // weight 0.
  template <int kCount>
  __device__ __forceinline__ bool update(float (&s)[kCount], float scale_log2, float (&rescale)[2]) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float first = s[2 * h], second = s[2 * h + 1];
#pragma unroll
      for (int i = 4; i < kCount; i += 4) {
        first = fmaxf(first, s[i + 2 * h]);
        second = fmaxf(second, s[i + 2 * h + 1]);
      }
      largest[h] = fmaxf(first, second);
    }
    const bool moved = __any_sync(0xffffffff, largest[0] > limit[0] || largest[1] > limit[1]);
    if (moved) move(largest, scale_log2, rescale);
    weights_policy(s, scale_log2);
    return moved;
  }

  // Softmax numerator: replaces dot products by weights and adds them to the row sums.
  template <int kCount>
  __device__ __forceinline__ void weights_policy(float (&s)[kCount], float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = 0.0f, odd = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        s[i + 2 * h] = exp2_flushed(s[i + 2 * h] * scale_log2 - reference[h]);
        s[i + 2 * h + 1] = exp2_flushed(s[i + 2 * h + 1] * scale_log2 - reference[h]);
        even += s[i + 2 * h];
        odd += s[i + 2 * h + 1];
      }
      row_sum[h] += even + odd;
    }
  }

  // Updates the running maxima, branch-free, so that both rows run in parallel. Scales from 2^126 on get no slack.
  __device__ __forceinline__ void move(const float (&largest)[2], float scale_log2, float (&rescale)[2]) {
    const float slack = __fdividef(kSlack, scale_log2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = quad_max(largest[h]), moved = top * scale_log2;
      const bool moves = top > limit[h], first = limit[h] == -infinity<float>();
      rescale[h] = exp2_flushed(!moves ? 0.0f : first ? -infinity<float>() : reference[h] - moved);
      reference[h] = moves ? moved : reference[h];
      limit[h] = moves ? top + slack : limit[h];
      row_sum[h] *= rescale[h];
    }
  }

  // Joins row h with a softmax over other keys; sets the factors of both accumulators.
  __device__ __forceinline__ void join(int h, float other_reference, float other_sum, float other_limit, float& own,
                                       float& other) {
    const bool seen = limit[h] != -infinity<float>(), other_seen = other_limit != -infinity<float>();
    const float largest = seen && !(other_seen && other_reference > reference[h]) ? reference[h] : other_reference;
    own = seen ? exp2_flushed(reference[h] - largest) : 0.0f;
    other = other_seen ? exp2_flushed(other_reference - largest) : 0.0f;
    row_sum[h] = row_sum[h] * own + other_sum * other;
    reference[h] = largest;
  }

  // Keeps the compiler from sinking the exponentials below the wait for the product that they overlap. The branch is
  // never taken: row sums are not negative.
  __device__ __forceinline__ void settle() const {
    if (fminf(row_sum[0], row_sum[1]) < 0.0f) __trap();
  }

  // True if the running maximum is too large for meaningful exponents.
  __device__ __forceinline__ bool far(int h) const { return !(fabsf(reference[h]) < kFar); }

  // Returns the log-sum-exp (natural) of a row whose weights sum to `sum`; -inf for an empty row.
  __device__ __forceinline__ float lse(int h, float sum) const {
    return sum == 0.0f ? -infinity<float>() : (reference[h] + logarithm(sum)) * kLn2<float>;
  }

  // As lse() with a sink, -inf for none; `inverse` becomes the factor that normalises the row.
  __device__ __forceinline__ float lse_with(int h, float sum, float sink, float& inverse) const {
    if (sum == 0.0f) {
      inverse = 0.0f;
      return sink;
    }
    const float above = sink * kLog2E<float> - reference[h];
    if (above > kExcess) {
      inverse = exp2_flushed(-above);
      return sink;
    }
    const float total = sum + exp2_flushed(above);
    inverse = reciprocal_of_sum(total);
    return (reference[h] + logarithm(total)) * kLn2<float>;
  }
};

// Weights and joint lse that combine two softmax results over disjoint keys.
struct Blend {
  float own, other, lse;
};

__device__ __forceinline__ Blend blend(float own, float other) {
  const float top = own > other || own != own ? own : other;
  const float reference = top == -infinity<float>() ? 0.0f : top;
  const float weight = expf(own - reference), weight_other = expf(other - reference), sum = weight + weight_other;
  if (sum == 0.0f) return {0.0f, 0.0f, -infinity<float>()};
  return {weight / sum, weight_other / sum, reference + logf(sum)};
}

// Multiplies accumulators of row h by factor[h].
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&accumulator)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    accumulator[i] *= factor[0];
    accumulator[i + 1] *= factor[0];
    accumulator[i + 2] *= factor[1];
    accumulator[i + 3] *= factor[1];
  }
}

// Sets probe[h] to NaN if any accumulator of row h is not finite, else to 0.
template <int kCount>
__device__ __forceinline__ void probe_rows(const float (&accumulator)[kCount], float (&probe)[2]) {
  float found[8] = {};  // independent dependency chains
#pragma unroll
  for (int i = 0; i < kCount; ++i) found[i % 8] = fmaf(accumulator[i], 0.0f, found[i % 8]);
  probe[0] = (found[0] + found[1]) + (found[4] + found[5]);
  probe[1] = (found[2] + found[3]) + (found[6] + found[7]);
}

}  // namespace spattn::sm90
