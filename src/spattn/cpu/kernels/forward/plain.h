// Path for every element type: fused multiply-adds in the compute type.
#pragma once
#include "kernels.h"
#include "simd/element.h"
#include "simd/exp2.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Only the forward pass needs their definitions: the backward pass uses this path without them.
template <class T> struct ForwardScratch;
template <class T> struct RowStatistics;
template <class T> struct CachedTile;

// A path defines the operand format of both products and how to multiply elements. An `Element` has the size of a T and
// holds kTerms adjacent features or keys.
template <class Type> struct Plain {
  using E = Type;
  using Raw = E;  // element type of packed operands
  using T = typename E::Compute;
  using Element = T;
  using Vector = Vec<T>;
  using Exp = Exp2<T>;  // accuracy of the weights
  static constexpr int kTerms = 1;

  static SPATTN_INLINE Vector splat(T x) { return SPATTN_ISA::splat(x); }
  static SPATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vector a, Vector b) { return sum + a * b; }
  static SPATTN_INLINE Vector times(Vector x, T sign) { return x * sign; }
  static SPATTN_INLINE Vector join(const Vec<T>* weight, Vec<T>&) { return weight[0]; }
  static const T* divisor(const RowStatistics<T>& rows) { return rows.row_sum; }

  static bool keys_in_place(const Head& head, const Tile& tile, int64_t rows, const Call&) {
    return rows == tile.cells() && readable_in_place<E>(head, tile);
  }

  // The product reads V once per kOutputRows queries. Rows far apart would map to few cache sets, so it reads only
  // adjacent rows in place. Unaligned loads cost less than a copy.
  static bool values_in_place(const Head& head, const Tile& tile, const Call& call) {
    return readable_in_place<E>(head, tile) && call.head_dim_v % kLanes<T> == 0 &&
           in_place<E>(head, tile).ld == call.head_dim_v;
  }

  // Returns K of a tile: `rows` rows of head_dim elements; `rows` is a multiple of kKeyRows.
  static Operand<T> key_operand(const Head& head, const Tile& tile, int64_t rows, const Call& call,
                                const CachedTile<T>& cached, ForwardScratch<T>& s) {
    if (keys_in_place(head, tile, rows, call)) return in_place<E>(head, tile);
    if (cached.fresh) gather_rows<E>(head, tile, rows, call.head_dim, s.width.key, s.position.key, cached.keys);
    return {cached.keys, s.width.key};
  }

  // Returns V of a tile; its rows are padded to the vector length.
  static Operand<T> value_operand(const Head& head, const Tile& tile, const Call& call, const CachedTile<T>& cached,
                                  ForwardScratch<T>& s) {
    if (values_in_place(head, tile, call)) return in_place<E>(head, tile);
    const int64_t ld = s.width.value;
    if (cached.fresh) gather_rows<E>(head, tile, tile.cells(), call.head_dim_v, ld, s.position.key, cached.values);
    return {cached.values, ld};
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
