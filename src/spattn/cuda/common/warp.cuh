// Reductions over the lanes of a warp.
#pragma once

namespace spattn {

// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Of several rows at once, whose shuffles do not wait for each other.
template <int kCount, typename Operation>
__device__ __forceinline__ void over_quad(float (&x)[kCount], Operation join) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    float other[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) other[i] = __shfl_xor_sync(~0u, x[i], apart);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = join(x[i], other[i]);
  }
}

template <int kCount>
__device__ __forceinline__ void quad_max(float (&x)[kCount]) {
  over_quad(x, [](float a, float b) { return fmaxf(a, b); });
}

template <int kCount>
__device__ __forceinline__ void quad_sum(float (&x)[kCount]) {
  over_quad(x, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ double warp_max(double x) {
  for (int other = 16; other; other /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

__device__ __forceinline__ double warp_sum(double x) {
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

}  // namespace spattn
