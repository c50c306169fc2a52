// The softmax of one row, key by key, in float64: what every kernel falls back to for rows that its tiles could not do.
//
// The difference of two dot products comes before the scale. A logit rounded to float32, or a product that the compiler
// fuses with the subtraction behind it and compares with one that was rounded, is off by up to |logit| / 2^24: beyond
// 2^30 or so such an exponent is worth nothing. Differences of dot products are exact to 2^-53 of them, fused or not.
#pragma once
#include "common/warp.cuh"

namespace spattn {

// From this logit on (base 2), a row goes the exact way. A tile kernel takes all exponents of a row relative to one
// rounded maximum. The rounding cancels as long as it leaves the weights in the range of their type, float16 at the
// least: here it is half a unit of the last place, 1 at the most.
template <typename T>
constexpr T kFarLogit = sizeof(T) == 4 ? T(1ll << 24) : T(1ll << 53);

// Whether a tile kernel can do a row with this maximum; it can do one that has seen no key, whose maximum is -inf.
template <typename T>
__device__ __forceinline__ bool within_reach(T row_max) {
  return fabs(row_max) < kFarLogit<T> || (row_max < 0 && isinf(row_max));
}

// What a warp finds for a row: lane l has the output columns l, l + 32, ...
template <int kColumns>
struct ExactRow {
  double out[kColumns];
  double lse;  // natural; -inf, and out 0, for a row that attends to nothing
};

// One warp attends to a row's keys, 32 candidates at a time, a lane each for the dot products, then all lanes key by
// key for the values.
//
//   key(n)              position of candidate n of `count`, -1 if the row may not attend to it
//   dot(position)       q · k, with the sign of the scale
//   value(position, c)  number c of V's row
template <int kColumns, typename Key, typename Dot, typename Value>
__device__ __forceinline__ ExactRow<kColumns> exact_attention(int count, double scale_log2, Key key, Dot dot,
                                                              Value value) {
  constexpr double kLn2 = 0.693147180559945309417, kInfinite = HUGE_VAL;
  const int lane = threadIdx.x % 32;
  double largest = -kInfinite, sum = 0;  // the largest dot product, and what the weights relative to it add up to
  ExactRow<kColumns> row = {};
  for (int first = 0; first < count; first += 32) {
    const long long own = first + lane < count ? key(first + lane) : -1;
    const unsigned allowed = __ballot_sync(~0u, own >= 0);
    if (!allowed) continue;
    // The logits policy of exact rows: what is done to a product of query and key before the softmax sees it.
    const double product = own >= 0 ? dot(own) : -kInfinite, logit = product * scale_log2;
    if (__any_sync(~0u, !(logit < kInfinite))) {  // NaN or infinite: so is every weight of the row
      sum = __longlong_as_double(0x7ff8000000000000LL);
      break;
    }
    const double top = warp_max(logit == -kInfinite ? -kInfinite : product);
    const double before = top > largest ? exp2((largest - top) * scale_log2) : 1;
    largest = fmax(largest, top);
    // The weights policy of exact rows: what the row's sum counts, and what multiplies the values.
    const double weight = logit == -kInfinite ? 0 : exp2((product - largest) * scale_log2);
    sum = sum * before + warp_sum(weight);
    for (int i = 0; i < kColumns; ++i) row.out[i] *= before;
    for (unsigned rest = allowed; rest; rest &= rest - 1) {
      const double factor = __shfl_sync(~0u, weight, __ffs(rest) - 1);
      const long long position = __shfl_sync(~0u, own, __ffs(rest) - 1);
      for (int i = 0; i < kColumns; ++i) row.out[i] += factor * value(position, lane + 32 * i);
    }
  }
  for (int i = 0; i < kColumns; ++i) row.out[i] = sum == 0 ? 0 : sum != sum ? sum : row.out[i] / sum;
  row.lse = (sum == 0 ? -kInfinite : largest * scale_log2 + log2(sum)) * kLn2;
  return row;
}

}  // namespace spattn
