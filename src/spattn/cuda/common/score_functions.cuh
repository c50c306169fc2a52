// Functions of generated score functions (score/source.py), for nvcc and, in tests, for g++.
//
// In float on the GPU, tanh and sigmoid have an absolute error of a few 2^-24, the rounding error of results near 1.
// The other functions are CUDA's, within a few ulp (CUDA C++ Programming Guide). If a divisor is the same for all pairs
// of a head, a quotient is a product with its reciprocal, within 1.5 ulp. score_tanh(x, y) is y tanh(x / (2 log2 e)):
// the generated code folds the factor 2 log2 e of x into other constants.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#include "common/element.cuh"
#define SPATTN_SCORE __device__ __forceinline__
#else
#define SPATTN_SCORE __attribute__((always_inline)) inline
#endif
#include "common/dropout.cuh"

namespace spattn {

// What the index of an array element depends on, besides the batch entry and the query head.
enum class ScoreScope { head, query, key, diagonal, pair };

// The reads (uses) of captured arrays that need a gradient.
template <class... Use>
struct ScoreUses {
  static constexpr int kCount = sizeof...(Use);

  // Calls visit(Use()) for each use.
  template <class Visit>
  static SPATTN_SCORE void for_each(Visit visit) {
    (visit(Use()), ...);
  }
};

// Elements of captured arrays of 16-bit types, which C++17 lacks, as bits.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

#ifdef __CUDACC__

// 1 / x; infinity for denormals.
SPATTN_SCORE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// If the power overflows, its reciprocal is 0; NaN stays NaN.
SPATTN_SCORE float score_sigmoid(float x) { return reciprocal(1.0f + exp2_flushed(x * -1.442695040888963407f)); }
SPATTN_SCORE float score_tanh(float x, float factor) {
  return factor - 2.0f * factor * reciprocal(1.0f + exp2_flushed(x));
}
SPATTN_SCORE float score_divide(float x, float, float inverse) { return x * inverse; }
SPATTN_SCORE float score_minimum(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
SPATTN_SCORE float score_maximum(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Loads from memory that no kernel writes: the compiler may share and reorder such loads.
template <class T>
SPATTN_SCORE T score_read(const T& x) {
  return __ldg(&x);
}
SPATTN_SCORE bool score_read(const bool& x) { return __ldg(reinterpret_cast<const unsigned char*>(&x)) != 0; }
SPATTN_SCORE int64_t score_read(const int64_t& x) { return __ldg(reinterpret_cast<const long long*>(&x)); }
SPATTN_SCORE uint64_t score_read(const uint64_t& x) { return __ldg(reinterpret_cast<const unsigned long long*>(&x)); }
SPATTN_SCORE int8_t score_read(const int8_t& x) { return __ldg(reinterpret_cast<const signed char*>(&x)); }

#else

SPATTN_SCORE float score_sigmoid(float x) { return 1 / (1 + expf(-x)); }
SPATTN_SCORE float score_tanh(float x, float factor) { return factor * tanhf(x / 2.885390081777927f); }
SPATTN_SCORE float score_divide(float x, float y, float) { return x / y; }
SPATTN_SCORE float score_minimum(float a, float b) { return a < b || a != a ? a : b; }
SPATTN_SCORE float score_maximum(float a, float b) { return a > b || a != a ? a : b; }

template <class T>
SPATTN_SCORE T score_read(const T& x) {
  return x;
}

#endif

SPATTN_SCORE double score_sigmoid(double x) { return 1 / (1 + exp(-x)); }
SPATTN_SCORE double score_tanh(double x, double factor) { return factor * tanh(x / 2.885390081777926815); }
template <class T>
SPATTN_SCORE T score_tanh(T x) {
  return score_tanh(x, T(1));
}
SPATTN_SCORE double score_divide(double x, double y, double) { return x / y; }
SPATTN_SCORE double score_minimum(double a, double b) { return a < b || a != a ? a : b; }
SPATTN_SCORE double score_maximum(double a, double b) { return a > b || a != a ? a : b; }
SPATTN_SCORE int score_minimum(int a, int b) { return a < b ? a : b; }
SPATTN_SCORE int score_maximum(int a, int b) { return a > b ? a : b; }

SPATTN_SCORE float score_exp(float x) { return expf(x); }
SPATTN_SCORE double score_exp(double x) { return exp(x); }
SPATTN_SCORE float score_log(float x) { return logf(x); }
SPATTN_SCORE double score_log(double x) { return log(x); }
SPATTN_SCORE float score_sqrt(float x) { return sqrtf(x); }
SPATTN_SCORE double score_sqrt(double x) { return sqrt(x); }
SPATTN_SCORE float score_pow(float x, float y) { return powf(x, y); }
SPATTN_SCORE double score_pow(double x, double y) { return pow(x, y); }
SPATTN_SCORE float score_abs(float x) { return fabsf(x); }
SPATTN_SCORE double score_abs(double x) { return fabs(x); }
SPATTN_SCORE int score_abs(int x) { return x < 0 ? int(0u - unsigned(x)) : x; }

// -1, 0 or 1; NaN for NaN.
SPATTN_SCORE float score_sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
SPATTN_SCORE double score_sign(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : x; }
SPATTN_SCORE int score_sign(int x) { return (x > 0) - (x < 0); }

// Python's // and % of integers, rounded down; 0 for a divisor of 0.
SPATTN_SCORE int score_floordiv(int a, int b) {
  if (b == 0) return 0;
  if (b == -1) return int(0u - unsigned(a));
  const int quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}
SPATTN_SCORE int score_mod(int a, int b) {
  if (b == 0 || b == -1) return 0;
  const int rest = a % b;
  return rest + (rest != 0 && (rest < 0) != (b < 0) ? b : 0);
}

// NumPy's // and % of floating-point numbers: infinity or NaN for a divisor of 0.
SPATTN_SCORE float score_remainder(float a, float b) { return fmodf(a, b); }
SPATTN_SCORE double score_remainder(double a, double b) { return fmod(a, b); }
SPATTN_SCORE float score_floor(float x) { return floorf(x); }
SPATTN_SCORE double score_floor(double x) { return floor(x); }
template <class T>
SPATTN_SCORE T score_mod(T a, T b) {
  const T rest = score_remainder(a, b);
  return rest != T(0) && (rest < T(0)) != (b < T(0)) ? rest + b : rest;
}
template <class T>
SPATTN_SCORE T score_floordiv(T a, T b) {
  if (b == T(0)) return a / b;
  const T quotient = (a - score_mod(a, b)) / b, down = score_floor(quotient);
  return quotient - down > T(0.5) ? down + T(1) : down;
}

// Chain rule: adjoint `a` times derivative `b`; 0 if the adjoint is 0, even if the derivative is infinite or NaN.
template <class T>
SPATTN_SCORE T score_adjoint(T a, T b) {
  return a == T(0) ? T(0) : a * b;
}

template <class T>
SPATTN_SCORE T score_nan() {
  return T(__builtin_nanf(""));
}

// Negative indices count from the end.
SPATTN_SCORE int score_index(int index, int size) { return index + (index < 0 ? size : 0); }

// Bounds of integer intervals, for Score::inside().
SPATTN_SCORE long long score_sum(long long a, long long b) { return a + b; }
SPATTN_SCORE long long score_smaller(long long a, long long b) { return a < b ? a : b; }
SPATTN_SCORE long long score_larger(long long a, long long b) { return a > b ? a : b; }
SPATTN_SCORE long long score_down(long long a, long long b) { return (a - (a < 0 ? b - 1 : 0)) / b; }
SPATTN_SCORE long long score_least(long long low, long long high) { return low > 0 ? low : high < 0 ? -high : 0; }
SPATTN_SCORE bool score_fits(long long low, long long high) { return low >= INT32_MIN && high <= INT32_MAX; }

template <class T>
SPATTN_SCORE T score_select(bool condition, T a, T b) {
  return condition ? a : b;
}

SPATTN_SCORE float score_number(Float16 x) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(x.bits));
#else
  _Float16 half;
  memcpy(&half, &x.bits, sizeof half);
  return float(half);
#endif
}
SPATTN_SCORE float score_number(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
template <class E>
SPATTN_SCORE E score_number(E x) {
  return x;
}

// Returns a captured array's first element. For an empty array, whose address is 0, returns `any`, readable memory.
template <class E>
SPATTN_SCORE const E* score_start(const uint64_t& address, const void* any) {
  const uint64_t at = score_read(address);
  return static_cast<const E*>(at ? reinterpret_cast<const void*>(at) : any);
}

// Loads an element of a captured array as T: float or double, int or bool.
template <class T, class E>
SPATTN_SCORE T score_load(const E* at) {
  return T(score_read(*at));
}

// Integers of score functions have 32 bits. A wider value becomes INT32_MIN, which no index range contains.
template <class T>
SPATTN_SCORE T score_load(const int64_t* at) {
  const int64_t x = score_read(*at);
  return T(x == int64_t(int(x)) ? int(x) : INT32_MIN);
}
template <class T>
SPATTN_SCORE T score_load(const uint64_t* at) {
  const uint64_t x = score_read(*at);
  return T(x <= uint64_t(INT32_MAX) ? int(x) : INT32_MIN);
}
template <class T>
SPATTN_SCORE T score_load(const uint32_t* at) {
  const uint32_t x = score_read(*at);
  return T(x <= uint32_t(INT32_MAX) ? int(x) : INT32_MIN);
}
template <class T>
SPATTN_SCORE T score_load(const Float16* at) {
  return T(score_number(Float16{score_read(at->bits)}));
}
template <class T>
SPATTN_SCORE T score_load(const BFloat16* at) {
  return T(score_number(BFloat16{score_read(at->bits)}));
}

}  // namespace spattn
