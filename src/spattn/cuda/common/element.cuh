// Element type, selected by nvcc's -DSPATTN_DTYPE, and its accumulator type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define SPATTN_float16 0
#define SPATTN_bfloat16 1
#define SPATTN_float32 2
#define SPATTN_float64 3
#define SPATTN_CODE_(name) SPATTN_##name
#define SPATTN_CODE(name) SPATTN_CODE_(name)

namespace spattn {

#if SPATTN_CODE(SPATTN_DTYPE) == SPATTN_float16
using Element = __half;
using Element2 = __half2;
#define SPATTN_PTX_TYPE "f16"
#elif SPATTN_CODE(SPATTN_DTYPE) == SPATTN_bfloat16
using Element = __nv_bfloat16;
using Element2 = __nv_bfloat162;
#define SPATTN_PTX_TYPE "bf16"
#elif SPATTN_CODE(SPATTN_DTYPE) == SPATTN_float32
using Element = float;
using Element2 = __nv_bfloat162;
#define SPATTN_PTX_TYPE "bf16"  // Element2 and this are of the terms that sm90/terms.cuh splits it into
#else
using Element = double;
#endif

#if SPATTN_CODE(SPATTN_DTYPE) == SPATTN_float64
using Sum = double;
#else
using Sum = float;
#endif

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void narrow(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(double x, double& out) { out = x; }

__device__ __forceinline__ void narrow(float x, float y, __half2& out) { out = __floats2half2_rn(x, y); }
__device__ __forceinline__ void narrow(float x, float y, __nv_bfloat162& out) { out = __floats2bfloat162_rn(x, y); }

template <typename T>
constexpr T kLn2 = T(0.693147180559945309417);
template <typename T>
constexpr T kLog2E = T(1.442695040888963407);

// 2^x and log2(x). exp2f is one MUFU instruction and a range fix, within 2 ulp (CUDA C++ Programming Guide).
__device__ __forceinline__ float power_of_two(float x) { return exp2f(x); }
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }
__device__ __forceinline__ float logarithm_of_two(float x) { return log2f(x); }
__device__ __forceinline__ double logarithm_of_two(double x) { return log2(x); }

// 2^x with denormals flushed to zero: one instruction; exp2f() needs two more to scale denormals.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return __longlong_as_double(0x7ff0000000000000LL);
}

template <typename T>
__device__ __forceinline__ bool is_finite(T x) {
  return fabs(x) < infinity<T>();
}

constexpr int kVector = 16 / sizeof(Element);  // elements per 16-byte access

}  // namespace spattn
