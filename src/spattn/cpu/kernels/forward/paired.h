// bfloat16 products by `vdpbf16ps`: two neighbouring features, or keys, in one 32-bit element, multiplied exactly and
// added up in float32. The instruction takes subnormal numbers for 0. Weights are rounded to bfloat16.
#pragma once
#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "simd/element.h"
#include "simd/exp2.h"
#include "kernels.h"
#include "tile/operand.h"
#include "tile/scratch.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// A bfloat16 as it is stored.
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

// Relative error below 2.7e-6: rounding the weights to bfloat16 costs 2^-9.
struct CoarseExp2 : Exp2<float> {
  static constexpr float kCoefficients[] = {9.57010191e-3f, 5.59178603e-2f, 2.40247448e-1f, 6.93121815e-1f,
                                            9.99999261e-1f};
};

struct Paired {
  using E = Bfloat16;
  using T = float;
  using Element = uint32_t;
  using Vector = BitsVec<float>;
  static constexpr int kTerms = 2;

  static SPATTN_INLINE Vector splat(uint32_t x) { return splat_bits<float>(x); }
  static SPATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vector a, Vector b) {
    return (Vec<T>)_mm512_dpbf16_ps((__m512)sum, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
  static SPATTN_INLINE Vec<T> exp2(Vec<T> x) { return SPATTN_ISA::exp2<T, CoarseExp2>(x); }

  // Weights of neighbouring keys become one element; `total` takes in what they were rounded to, so that the output is
  // an average of V with weights that add up to 1.
  static SPATTN_INLINE Vector join(const Vec<T>* weight, Vec<T>& total) {
    typedef uint16_t Halves __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
    constexpr Halves kOrder = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)weight[1], (__m512)weight[0]);
    const Vector joined = (Vector)_mm512_permutexvar_epi16((__m512i)kOrder, bit_cast<__m512i>(both));
    total = multiply_add(total, joined, splat(0x3f803f80));  // times (1, 1)
    return joined;
  }
  static T* normaliser(Scratch<T>& s) { return s.weight_sum; }

  static bool keys_in_place(const Head& head, const Tile& tile, int64_t rows, const Call& call) {
    const bool aligned = head.position % 4 == 0 && reinterpret_cast<uintptr_t>(head.data) % 4 == 0;
    return rows == tile.cells() && tile.even() && aligned && head.feature == 2 && call.head_dim % 2 == 0;
  }
  static bool values_in_place(const Head&, const Tile&, const Call&, const Scratch<T>&) { return false; }

  // Rows of (head_dim + 1) / 2 pairs of features.
  static Operand<Element> key_operand(const Head& head, const Tile& tile, int64_t rows, const Call& call,
                                      TileScratch<T>& s) {
    if (keys_in_place(head, tile, rows, call)) {
      return {reinterpret_cast<const Element*>(head.data + tile.start * head.position),
              tile.stride[2] * head.position / 4};
    }
    const int64_t ld = (call.head_dim + 1) / 2;
    if (s.fresh) {
      gather_rows<RawBfloat16>(head, tile, rows, call.head_dim, 2 * ld, s.key_position,
                               reinterpret_cast<uint16_t*>(s.tile_keys));
    }
    return {reinterpret_cast<Element*>(s.tile_keys), ld};
  }

  // A row of V as ld_value values: in place, or copied to `staged`, or zeros for a key that is none.
  static const char* value_row(const Head& head, int64_t position, const Call& call, const Scratch<T>& s,
                               uint16_t* staged) {
    const char* row = head.data + position * head.position;
    const int64_t width = position == kPadding ? 0 : call.head_dim_v;
    if (width == s.ld_value && head.feature == 2) return row;
    if (width) read_row<RawBfloat16>(row, head.feature, width, staged);
    clear(staged + width, s.ld_value - width);
    return reinterpret_cast<const char*>(staged);
  }

  static SPATTN_INLINE Vector widen(const char* halves) {
    return (Vector)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }

  // Row p holds, for every feature, the keys 2 p and 2 p + 1.
  static Operand<Element> value_operand(const Head& head, const Tile& tile, const Call& call, TileScratch<T>& s) {
    Element* const packed = reinterpret_cast<Element*>(s.tile_values);
    if (s.fresh) pack_values(head, tile, call, packed, s);
    return {packed, s.ld_value};
  }

  static void pack_values(const Head& head, const Tile& tile, const Call& call, Element* out, const Scratch<T>& s) {
    const int64_t cells = list_positions(tile, s.key_position), ld = s.ld_value;
    uint16_t* staged = reinterpret_cast<uint16_t*>(s.keys);
    for (int64_t key = 0; key < cells; key += 2, out += ld) {
      const char* even = value_row(head, s.key_position[key], call, s, staged);
      const char* odd = value_row(head, key + 1 < cells ? s.key_position[key + 1] : kPadding, call, s,
                                  staged + ld);
      for (int64_t j = 0; j < ld; j += kLanes<T>) {
        store(out + j, widen(even + 2 * j) | widen(odd + 2 * j) << 16);
      }
    }
  }

  // Both halves times -1, 0 or 1.
  static SPATTN_INLINE Vector times(Vector pairs, T sign) {
    const Vector low = (Vector)((Vec<T>)(pairs << 16) * sign), high = (Vector)((Vec<T>)(pairs & 0xffff0000) * sign);
    return low >> 16 | (high & 0xffff0000);
  }

  // s.query = (sign * Q)', pairs of features by queries; see Plain.
  static void pack_query(const Head& head, int64_t cells, T sign, const Call& call, Scratch<T>& s) {
    constexpr int L = kLanes<T>;
    const int64_t pairs = (call.head_dim + 1) / 2, ld = round_up(pairs, L);
    uint16_t* staged = reinterpret_cast<uint16_t*>(s.keys);
    for (int64_t first = 0; first < cells; first += L) {
      gather_queries<RawBfloat16>(head, first, L, cells, call.head_dim, 2 * ld, s.query_position, staged);
      for (int64_t d = 0; d < pairs; d += L) {
        Vec<T> block[L];
        SPATTN_UNROLL
        for (int i = 0; i < L; ++i) block[i] = (Vec<T>)times(load<Vector>(staged + 2 * (i * ld + d)), sign);
        transpose<T>(block);
        for (int i = 0; i < L && d + i < pairs; ++i) store(s.query + (d + i) * s.ld_query + first, block[i]);
      }
    }
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
#endif
