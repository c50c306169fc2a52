// Path for bfloat16 with `vdpbf16ps`, which multiplies pairs of adjacent features or keys and flushes subnormals to 0.
// It rounds the weights to bfloat16.
#pragma once
#if defined(__AVX512BF16__)
#include "forward/scratch.h"
#include "kernels.h"
#include "simd/bfloat16.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

struct Paired {
  using E = Bfloat16;
  using Raw = RawBfloat16;
  using T = float;
  using Element = uint32_t;
  using Vector = BitsVec<float>;
  using Exp = CoarseExp2;
  static constexpr int kTerms = 2;

  static SPATTN_INLINE Vector splat(uint32_t x) { return splat_bits<float>(x); }
  static SPATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vector a, Vector b) { return multiply_pairs(sum, a, b); }
  static SPATTN_INLINE Vector times(Vector x, T sign) { return times_sign(x, sign); }

  // Rounds the weights of two adjacent keys and packs them into one element. Adds the rounded weights to `total`, the
  // divisor of the output, so that its weights sum to 1.
  static SPATTN_INLINE Vector join(const Vec<T>* weight, Vec<T>& total) {
    const Vector joined = alternate(bit_cast<__m512i>(_mm512_cvtne2ps_pbh((__m512)weight[1], (__m512)weight[0])));
    total = add_pairs(total, joined);
    return joined;
  }
  static const T* divisor(const RowStatistics<T>& rows) { return rows.weight_sum; }

  static bool keys_in_place(const Head& head, const Tile& tile, int64_t rows, const Call& call) {
    const bool aligned = head.position % 4 == 0 && reinterpret_cast<uintptr_t>(head.data) % 4 == 0;
    return rows == tile.cells() && tile.even() && aligned && head.feature == 2 && call.head_dim % 2 == 0;
  }
  static bool values_in_place(const Head&, const Tile&, const Call&) { return false; }

  // Returns K of a tile: `rows` rows of (head_dim + 1) / 2 pairs of features.
  static Operand<Element> key_operand(const Head& head, const Tile& tile, int64_t rows, const Call& call,
                                      const CachedTile<T>& cached, ForwardScratch<T>& s) {
    if (keys_in_place(head, tile, rows, call)) {
      return {reinterpret_cast<const Element*>(head.row(tile.start)), tile.stride[2] * head.position / 4};
    }
    const int64_t ld = (call.head_dim + 1) / 2;
    if (cached.fresh) {
      gather_rows<RawBfloat16>(head, tile, rows, call.head_dim, 2 * ld, s.position.key,
                               reinterpret_cast<uint16_t*>(cached.keys));
    }
    return {reinterpret_cast<Element*>(cached.keys), ld};
  }

  // Returns V of a tile: row p holds, for each feature, the pair of keys 2 p and 2 p + 1.
  static Operand<Element> value_operand(const Head& head, const Tile& tile, const Call& call,
                                        const CachedTile<T>& cached, ForwardScratch<T>& s) {
    Element* const packed = reinterpret_cast<Element*>(cached.values);
    if (cached.fresh) pack_values(head, tile, call, packed, s);
    return {packed, s.width.value};
  }

  static void pack_values(const Head& head, const Tile& tile, const Call& call, Element* out,
                          const ForwardScratch<T>& s) {
    const int64_t cells = list_positions(tile, s.position.key), ld = s.width.value;
    uint16_t* staged = reinterpret_cast<uint16_t*>(s.staged);
    for (int64_t key = 0; key < cells; key += 2, out += ld) {
      const char* even = value_row(head, s.position.key[key], call, ld, staged);
      const char* odd = value_row(head, key + 1 < cells ? s.position.key[key + 1] : kPadding, call, ld, staged + ld);
      for (int64_t j = 0; j < ld; j += kLanes<T>) store(out + j, side_by_side(even + 2 * j, odd + 2 * j));
    }
  }

  // Returns a row of V as `ld` values, in place or copied to `staged` and padded with zeros.
  static const char* value_row(const Head& head, int64_t position, const Call& call, int64_t ld, uint16_t* staged) {
    const char* row = head.row(position);
    const int64_t width = position == kPadding ? 0 : call.head_dim_v;
    if (width == ld && head.feature == 2) return row;
    if (width) read_row<RawBfloat16>(row, head.feature, width, staged);
    clear(staged + width, ld - width);
    return reinterpret_cast<const char*>(staged);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
#endif
