// The softmax of one row, key by key, in float64: what every kernel falls back to for rows that its tiles could not do.
//
// The difference of two dot products comes before the scale. A logit rounded to float32, or a product that the compiler
// fuses with the subtraction behind it and compares with one that was rounded, is off by up to |logit| / 2^24: beyond
// 2^30 or so such an exponent is worth nothing. Differences of dot products are exact to 2^-53 of them, fused or not.
#pragma once

namespace spattn {

// From this logit on (base 2), a row goes the exact way. A tile kernel takes all exponents of a row relative to one rounded
// maximum. The rounding cancels as long as it leaves the weights in the range of their type, float16 at the least: here
// it is half a unit of the last place, 1 at the most.
template <typename T>
constexpr T kFarLogit = sizeof(T) == 4 ? T(1ll << 24) : T(1ll << 53);

// Whether a tile kernel can do a row with this maximum; it can do one that has seen no key, whose maximum is -inf.
template <typename T>
__device__ __forceinline__ bool within_reach(T row_max) {
  return fabs(row_max) < kFarLogit<T> || (row_max < 0 && isinf(row_max));
}

struct ExactSoftmax {
  double scale;  // |scale| · log2(e); the dot products carry its sign
  double largest = -__longlong_as_double(0x7ff0000000000000LL);  // dot product
  double sum = 0;                                                // of the weights

  // What a key weighs, and what sums over the keys before it have to be multiplied with.
  struct Weight {
    double own, before;
  };

  __device__ __forceinline__ Weight add(double dot) {
    const double logit = dot * scale;
    Weight weight = {logit - logit, 1};  // 0; NaN of a logit that is NaN or infinite, which the row then is
    if (logit < 0 && isinf(logit)) {
      weight.own = 0;
    } else if (dot > largest) {
      weight = {1 + weight.own, exp2((largest - dot) * scale)};
      largest = dot;
    } else {
      weight.own += exp2((dot - largest) * scale);
    }
    sum = sum * weight.before + weight.own;
    return weight;
  }

  // A sum of weighted values over the keys, divided by the sum of the weights; 0 for a row that attends to nothing.
  __device__ __forceinline__ double normalised(double weighted) const { return sum == 0 ? 0 : weighted / sum; }

  // Natural logarithm of the sum of exponentials; -inf for a row that attends to nothing.
  __device__ __forceinline__ double lse() const {
    return (sum == 0 ? largest : largest * scale + log2(sum)) * 0.693147180559945309417;
  }
};

}  // namespace spattn
