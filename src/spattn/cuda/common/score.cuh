// Score function of a kernel, selected by nvcc's -DSPATTN_SCORE_KIND: an index into KINDS of request/score.py.
//
// Score::value and Score::derivative take the scaled score (natural units), the positions of query and key, and the
// query head's parameter. Kernels apply them before the mask, so the result for a masked pair is arbitrary.
#pragma once

#include "common/element.cuh"

#define SPATTN_SCORE __device__ __forceinline__

#ifndef SPATTN_SCORE_KIND
#define SPATTN_SCORE_KIND 0
#endif

namespace spattn {

constexpr bool kScored = SPATTN_SCORE_KIND != 0;

// 1 / x; infinity for denormals.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 - 2 / (1 + e^2x), with an absolute error of a few 2^-24, the rounding error of a score of the same size. If the
// power overflows, its reciprocal is 0; NaN stays NaN.
__device__ __forceinline__ float score_tanh(float x) {
  return 1.0f - 2.0f * reciprocal(1.0f + exp2_flushed(x * 2.885390081777927f));
}
__device__ __forceinline__ double score_tanh(double x) { return tanh(x); }

template <typename T, typename P>
__device__ __forceinline__ T score_number(P position) {
  return static_cast<T>(position);
}

#if SPATTN_SCORE_KIND == 1
#include "../scores/softcap.h"
using Score = Softcap;
#elif SPATTN_SCORE_KIND == 2
#include "../scores/alibi.h"
using Score = Alibi;
#else
struct Score {  // the identity
  template <class T, class P>
  static SPATTN_SCORE T value(T score, P, P, T) {
    return score;
  }
  template <class T, class P>
  static SPATTN_SCORE T derivative(T, P, P, T) {
    return T{} + 1;
  }
};
#endif

}  // namespace spattn
