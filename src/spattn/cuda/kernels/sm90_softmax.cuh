// Online softmax on WGMMA accumulators: base 2, float32 statistics, the scale folded into the exponent's FMA.
//
// A thread holds two rows (h = 0, 1) of the fragment layout of sm90_wgmma.cuh; four neighbouring lanes share a row.
#pragma once

#include <cstdint>

namespace spattn {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// 2^x with flushed denormals: one instruction, where exp2f() spends two more to scale them.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats as packed elements, `low` in the low half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn." SPATTN_ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

struct Softmax {
    float row_max[2];
    float row_sum[2];  // this thread's columns only, until total()

    __device__ __forceinline__ void reset() {
        row_max[0] = row_max[1] = minus_infinity();
        row_sum[0] = row_sum[1] = 0.0f;
    }

    // Replaces the logits by probabilities relative to the new maxima; `rescale` is what earlier sums are worth now. A
    // row that has seen no key keeps probabilities 0: its maximum counts as 0.
    template <int kCount>
    __device__ __forceinline__ void update(float (&s)[kCount], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = s[2 * h];
#pragma unroll
            for (int i = 0; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
            largest = fmaxf(row_max[h], quad_max(largest));
            const float centre = largest == minus_infinity() ? 0.0f : largest;
            const float shift = centre * scale_log2;
            rescale[h] = power_of_two(row_max[h] * scale_log2 - shift);
            row_max[h] = largest;
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                s[i + 2 * h] = power_of_two(s[i + 2 * h] * scale_log2 - shift);
                s[i + 2 * h + 1] = power_of_two(s[i + 2 * h + 1] * scale_log2 - shift);
                even += s[i + 2 * h];
                odd += s[i + 2 * h + 1];
            }
            row_sum[h] = row_sum[h] * rescale[h] + (even + odd);
        }
    }

    // Sums of exponentials are never negative, but the compiler does not know: the branch keeps it from sinking the
    // exponentials below what follows, the wait for the product that they are to hide behind.
    __device__ __forceinline__ void settle() const {
        if (fminf(row_sum[0], row_sum[1]) < 0.0f) __trap();
    }

    __device__ __forceinline__ void total() {
        row_sum[0] = quad_sum(row_sum[0]);
        row_sum[1] = quad_sum(row_sum[1]);
    }

    // Natural logarithm of the sum of exponentials of a row; -inf when it attends to nothing.
    __device__ __forceinline__ float lse(int h, float scale_log2) const {
        constexpr float kLn2 = 0.693147180559945309f;
        const float shift = row_max[h] == minus_infinity() ? 0.0f : row_max[h] * scale_log2;
        return row_sum[h] == 0.0f ? minus_infinity() : (shift + __log2f(row_sum[h])) * kLn2;
    }
};

// accumulator[row h] *= factor[h].
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

// Per row h: NaN when any of its values is not finite, else 0.
template <int kCount>
__device__ __forceinline__ void probe_rows(const float (&accumulator)[kCount], float (&probe)[2]) {
    probe[0] = probe[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        probe[0] = fmaf(accumulator[i], 0.0f, fmaf(accumulator[i + 1], 0.0f, probe[0]));
        probe[1] = fmaf(accumulator[i + 2], 0.0f, fmaf(accumulator[i + 3], 0.0f, probe[1]));
    }
}

}  // namespace spattn
