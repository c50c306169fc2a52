// Terms of the operands of a product. A 16-bit element is one term. A float32 x is a sum of bfloat16 terms:
//
//   x = x0 + x1 + x2, exactly;  x y = x0 y0 + (x0 y1 + x1 y0) + (x1 y1 + x0 y2 + x2 y0) + terms below 2^-23 |x y|
//
// With two terms, x y = x0 y0 + (x0 y1 + x1 y0) + terms below 2^-15 |x y|. Each term is rounded to nearest, so that the
// omitted ones have random signs. bfloat16 has the exponents of float32 and twice the rate of TF32: six products take
// the time of three TF32 products, three that of one and a half. Unlike TF32, WGMMA also reads it transposed.
// Source: Henry, Tang & Heinecke, arXiv:1904.06376.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/element.cuh"
#include "sm90/isa/wgmma.cuh"

#if SPATTN_FLOAT8
#include <cuda_fp8.h>

namespace spattn {
__device__ __forceinline__ float widen(__nv_fp8_e4m3 x) { return float(x); }
}  // namespace spattn
#endif

namespace spattn::sm90 {

#if SPATTN_FLOAT8
constexpr bool kFloat8 = true;
using Input = __nv_fp8_e4m3;  // of q, k and v; the output has 16 bits
#else
constexpr bool kFloat8 = false;
using Input = Element;
#endif

constexpr int kTerms = SPATTN_TERMS;  // 1 for 16-bit types; 3, or 2 for precision "tf32", for float32
static_assert(kTerms == 1 ? sizeof(Element) == 2 : sizeof(Element) == 4 && kTerms <= 3);

using Term = std::conditional_t<kTerms == 1, Input, __nv_bfloat16>;

// The products of terms, smallest first: tensor cores round towards zero, which then costs the small ones nothing.
constexpr int kProducts = kTerms * (kTerms + 1) / 2;

struct TermProduct {
  int a, b;
};

__host__ __device__ constexpr TermProduct term_product(int number) {
  constexpr TermProduct kOf[6] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  return kOf[6 - kProducts + number];
}

// V is multiplied by this, exactly, so that the last terms of small values are no denormals. A value that overflows
// makes its rows non-finite, which are recomputed.
constexpr float kValueFactor = kTerms > 1 ? 0x1p40f : 1.0f;

// Splits two floats; each word is a pair of terms.
__device__ __forceinline__ void split2(float low, float high, uint32_t (&terms)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    terms[i] = narrow2(low, high);
    if constexpr (kTerms > 1) {
      low -= __uint_as_float(terms[i] << 16);
      high -= __uint_as_float(terms[i] & 0xffff0000u);
    }
  }
}

}  // namespace spattn::sm90
