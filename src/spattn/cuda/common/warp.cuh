// Reductions over the lanes of a warp.
#pragma once

namespace spattn {

// Reduces over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ double warp_max(double x) {
  for (int other = 16; other; other /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
  for (int other = 16; other; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

}  // namespace spattn
