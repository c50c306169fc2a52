// Pairs of bfloat16 in 32-bit lanes: two adjacent features or keys, the operand format of `vdpbf16ps` and AMX.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "simd/element.h"
#include "simd/exp2.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// bfloat16 elements that the kernels copy without conversion.
struct RawBfloat16 {
  using Storage = uint16_t;
  using Compute = uint16_t;
  static SPATTN_INLINE uint16_t decode(uint16_t x) { return x; }
};

template <> inline void read_row<RawBfloat16>(const char* from, int64_t stride, int64_t count, uint16_t* out) {
  if (stride == 2) {
    memcpy(out, from, size_t(2 * count));
  } else {
    read_strided<RawBfloat16>(from, stride, count, out);
  }
}

// exp2 with a relative error below 2.7e-6, which is enough: the weights are then rounded to bfloat16, with error 2^-9.
struct CoarseExp2 : Exp2<float> {
  static constexpr float kCoefficients[] = {9.57010191e-3f, 5.59178603e-2f, 2.40247448e-1f, 6.93121815e-1f,
                                            9.99999261e-1f};
};

typedef uint16_t Halves __attribute__((vector_size(SPATTN_VECTOR_BYTES)));

// Interleaves the halves of a register of bfloat16: a0 a1 ... b0 b1 ... becomes a0 b0 a1 b1 ...
SPATTN_INLINE BitsVec<float> alternate(__m512i both) {
  constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (BitsVec<float>)_mm512_permutexvar_epi16((__m512i)kOrder, both);
}

// Loads sixteen bfloat16, each into the low half of a lane.
SPATTN_INLINE BitsVec<float> widen(const char* halves) {
  return (BitsVec<float>)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}

// Loads and interleaves sixteen features of two rows.
SPATTN_INLINE BitsVec<float> side_by_side(const void* even, const void* odd) {
  return widen(static_cast<const char*>(even)) | widen(static_cast<const char*>(odd)) << 16;
}

// Multiplies both halves of each lane by `sign`, which is -1, 0 or 1.
SPATTN_INLINE BitsVec<float> times_sign(BitsVec<float> pairs, float sign) {
  using Vector = BitsVec<float>;
  const Vector low = (Vector)((Vec<float>)(pairs << 16) * sign);
  const Vector high = (Vector)((Vec<float>)(pairs & 0xffff0000) * sign);
  return low >> 16 | (high & 0xffff0000);
}

// Adds the products of both halves of each lane to float32 sums.
SPATTN_INLINE Vec<float> multiply_pairs(Vec<float> sum, BitsVec<float> a, BitsVec<float> b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
}

// Adds both halves of each lane to float32 sums.
SPATTN_INLINE Vec<float> add_pairs(Vec<float> sum, BitsVec<float> pairs) {
  return multiply_pairs(sum, pairs, splat_bits<float>(0x3f803f80));  // (1, 1)
}

}  // namespace SPATTN_ISA
}  // namespace spattn
#endif
