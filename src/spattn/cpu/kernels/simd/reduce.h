// Reductions across lanes, for several vectors at once.
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

// blend() takes lane i from `b` if i has bit kBit set, else from `a`. exchange() takes lane i ^ kBit instead.
template <int kBit, class V, int... I> SPATTN_INLINE V blend(V a, V b, Lane<I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, (I & kBit ? I + L : I)...);
}
template <int kBit, class V, int... I> SPATTN_INLINE V exchange(V a, V b, Lane<I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(a, b, (I & kBit ? (I ^ kBit) + L : I ^ kBit)...);
}
#if defined(__AVX512F__)  // a masked move leaves the shuffle port to exchange()
template <int kBit, int... I> SPATTN_INLINE Vec<float> blend(Vec<float> a, Vec<float> b, Lane<I...>) {
  return (Vec<float>)_mm512_mask_mov_ps((__m512)a, ((I & kBit ? 1 << I : 0) | ...), (__m512)b);
}
template <int kBit, int... I> SPATTN_INLINE Vec<double> blend(Vec<double> a, Vec<double> b, Lane<I...>) {
  return (Vec<double>)_mm512_mask_mov_pd((__m512d)a, ((I & kBit ? 1 << I : 0) | ...), (__m512d)b);
}
#endif

// Reduces N vectors to one, in which kLanes / N equal lanes, from lane i * kLanes / N on, hold the reduction of v[i].
// Each step combines lanes kBit apart and packs two vectors into one while N > 1.
template <class Operation, class T, int kBit, int N> SPATTN_INLINE Vec<T> fold(const Vec<T> (&v)[N]) {
  using All = typename MakeLanes<kLanes<T>>::type;
  if constexpr (kBit == 0) {
    return v[0];
  } else {
    constexpr int kLeft = N > 1 ? N / 2 : 1;
    Vec<T> left[kLeft];
    SPATTN_UNROLL
    for (int i = 0; i < kLeft; ++i) {
      const Vec<T> one = v[i], other = v[N > 1 ? i + kLeft : i];
      left[i] = Operation::combine(blend<kBit>(one, other, All{}), exchange<kBit>(one, other, All{}));
    }
    return fold<Operation, T, kBit / 2>(left);
  }
}

template <int kStep, class V, int... I> SPATTN_INLINE V every(V v, Lane<I...>) {
  constexpr int L = sizeof...(I);
  return __builtin_shufflevector(v, v, (I * kStep % L)...);
}

// Reduces N vectors across lanes: lane i < N of the result combines all lanes of v[i].
template <class Operation, class T, int N> SPATTN_INLINE Vec<T> across(const Vec<T> (&v)[N]) {
  constexpr int L = kLanes<T>;
  return every<L / N>(fold<Operation, T, L / 2>(v), typename MakeLanes<L>::type{});
}

}  // namespace SPATTN_ISA
}  // namespace spattn
