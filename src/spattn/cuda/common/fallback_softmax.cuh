// Float64 fallback: softmax attention of rows that tile kernels cannot compute, key by key.
//
// Subtracts the largest dot product of the row before scaling. Differences of float64 dot products are exact to 2^-53
// of the dot products' magnitude. Scores in float32 are off by up to |score| / 2^24, whether rounded before the
// subtraction or fused into it: from about 2^30 on, the weights would be meaningless.
#pragma once
#include "common/element.cuh"
#include "common/warp.cuh"

namespace spattn {

// Scores (base 2) of at least this magnitude take the float64 fallback. A tile kernel subtracts the same rounded
// maximum from all scores of a row. Its rounding error scales all weights of the row alike and cancels, as long as no
// weight leaves the range of its type (the narrowest is float16). Below this limit the error is half an ulp, at most 1.
template <typename T>
constexpr T kFarLogit = sizeof(T) == 4 ? T(1ll << 24) : T(1ll << 53);

// True if a tile kernel can compute a row with this maximum; -inf (no key yet) is fine.
template <typename T>
__device__ __forceinline__ bool within_reach(T row_max) {
  return fabs(row_max) < kFarLogit<T> || (row_max < 0 && isinf(row_max));
}

// Result of a row, spread over a warp: lane l holds output columns l, l + 32, ...
template <int kColumns>
struct FallbackRow {
  double out[kColumns];
  double lse;  // natural logarithm; -inf, with out = 0, for an empty row
};

// Attends to a row's keys with one warp, 32 candidates at a time: each lane computes one dot product, then all lanes
// accumulate V key by key.
//
//   key(n)              position of candidate n of `count`, -1 if the row may not attend to it
//   dot(position)       q · k, with the sign of the scale
//   value(position, c)  element c of V's row
template <int kColumns, typename Key, typename Dot, typename Value>
__device__ __forceinline__ FallbackRow<kColumns> fallback_attention(int count, double scale_log2, Key key, Dot dot,
                                                                    Value value) {
  constexpr double kInfinite = HUGE_VAL;
  const int lane = threadIdx.x % 32;
  double largest = -kInfinite, sum = 0;  // running maximum of the dot products; sum of the weights relative to it
  FallbackRow<kColumns> row = {};
  for (int first = 0; first < count; first += 32) {
    const long long own = first + lane < count ? key(first + lane) : -1;
    const unsigned allowed = __ballot_sync(~0u, own >= 0);
    if (!allowed) continue;
    // Score modification of the fallback.
    const double product = own >= 0 ? dot(own) : -kInfinite, logit = product * scale_log2;
    if (__any_sync(~0u, !(logit < kInfinite))) {  // NaN or +inf makes the whole row NaN
      sum = __longlong_as_double(0x7ff8000000000000LL);
      break;
    }
    const double top = warp_max(logit == -kInfinite ? -kInfinite : product);
    const double before = top > largest ? exp2((largest - top) * scale_log2) : 1;
    largest = fmax(largest, top);
    // Softmax numerator of the fallback.
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
  row.lse = (sum == 0 ? -kInfinite : largest * scale_log2 + log2(sum)) * kLn2<double>;
  return row;
}

}  // namespace spattn
