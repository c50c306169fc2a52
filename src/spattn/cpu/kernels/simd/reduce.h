// Reductions across the lanes of several vectors at once.
#pragma once
#include "simd/native.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

struct Add {
  template <class V> static SPATTN_INLINE V combine(V a, V b) { return a + b; }
};
struct Larger {
  template <class V> static SPATTN_INLINE V combine(V a, V b) { return larger(a, b); }
};

// Lane i of the result combines the lanes of v[i], by halves: of the vectors kFirst, kFirst + kStep, ...
template <class Operation, class T, int kFirst = 0, int kStep = 1>
SPATTN_INLINE Vec<T> across(const Vec<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  if constexpr (kStep == L) {
    return v[kFirst];
  } else {
    using All = typename MakeLanes<L>::type;
    const Vec<T> even = across<Operation, T, kFirst, 2 * kStep>(v);
    const Vec<T> odd = across<Operation, T, kFirst + kStep, 2 * kStep>(v);
    return Operation::combine(zip_low<L>(even, odd, All{}), zip_high<L>(even, odd, All{}));
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
