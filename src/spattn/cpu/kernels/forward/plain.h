// Products by fused multiply-add in the compute type: a path for every element type.
#pragma once
#include "forward/scratch.h"
#include "kernels.h"
#include "simd/element.h"
#include "simd/exp2.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// A path defines the operands of both products and their multiplication: an `Element`, as wide as a T, holds kTerms
// adjacent features or keys.
template <class Type> struct Plain {
  using E = Type;
  using Raw = E;  // the packed element
  using T = typename E::Compute;
  using Element = T;
  using Vector = Vec<T>;
  using Exp = Exp2<T>;  // of the weights
  static constexpr int kTerms = 1;

  static SPATTN_INLINE Vector splat(T x) { return SPATTN_ISA::splat(x); }
  static SPATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vector a, Vector b) { return sum + a * b; }
  static SPATTN_INLINE Vector times(Vector x, T sign) { return x * sign; }
  static SPATTN_INLINE Vector join(const Vec<T>* weight, Vec<T>&) { return weight[0]; }
  static const T* divisor(const RowStatistics<T>& rows) { return rows.row_sum; }

  static bool keys_in_place(const Head& head, const Tile& tile, int64_t rows, const Call&) {
    return rows == tile.cells() && readable_in_place<E>(head, tile);
  }

  // V is read once per kOutputRows queries. Rows far apart would map to few cache sets, so only adjacent rows are read
  // in place; straddling cache lines costs less than a copy.
  static bool values_in_place(const Head& head, const Tile& tile, const Call& call) {
    return readable_in_place<E>(head, tile) && call.head_dim_v % kLanes<T> == 0 &&
           in_place<E>(head, tile).ld == call.head_dim_v;
  }

  // K of a tile: `rows`, a multiple of kKeyRows, rows of head_dim scalars.
  static Operand<T> key_operand(const Head& head, const Tile& tile, int64_t rows, const Call& call,
                                const CachedTile<T>& cached, ForwardScratch<T>& s) {
    if (keys_in_place(head, tile, rows, call)) return in_place<E>(head, tile);
    if (cached.fresh) gather_rows<E>(head, tile, rows, call.head_dim, s.width.key, s.position.key, cached.keys);
    return {cached.keys, s.width.key};
  }

  // V of a tile, in whole vectors.
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
