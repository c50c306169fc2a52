// Exact sums in fixed point. Integer atomics accumulate them, so that the order of the additions does not matter.
#pragma once

namespace spattn {

// Word w of an accumulator counts units of 2^(32 w - 160); the last word holds flags of NaN and infinity. Bits below
// 2^-160 are dropped; magnitudes from 2^127 on count as infinite. A word has room for 2^31 additions.
constexpr int kValueWords = 9, kWords = kValueWords + 1, kLowest = -160;
constexpr unsigned long long kPositive = 1, kNegative = 2, kNaN = 4;

__device__ inline void add_exactly(unsigned long long* words, double x) {
  if (x == 0) return;
  const unsigned long long bits = __double_as_longlong(x), fraction = bits & ((1ull << 52) - 1);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const bool negative = bits >> 63;
  if (exponent >= 1023 + 127) {
    const bool nan = exponent == 0x7ff && fraction;
    atomicOr(words + kValueWords, nan ? kNaN : negative ? kNegative : kPositive);
    return;
  }
  int place = exponent - 1075 - kLowest;  // of the mantissa's lowest bit
  if (place <= -53) return;
  unsigned long long mantissa = fraction | 1ull << 52;  // x is normal: the previous line dropped denormals
  if (place < 0) mantissa >>= -place, place = 0;
  const int word = place / 32, shift = place % 32;
  const unsigned long long low = mantissa << shift;
  const unsigned long long pieces[3] = {low & 0xffffffffu, low >> 32, shift ? mantissa >> (64 - shift) : 0};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (pieces[i]) atomicAdd(words + word + i, negative ? 0ull - pieces[i] : pieces[i]);
  }
}

__device__ inline void add_exactly(unsigned long long* words, float x) {
  const unsigned bits = __float_as_uint(x), exponent = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
  if (exponent >= 127 + 127) {
    const bool nan = exponent == 0xff && fraction;
    atomicOr(words + kValueWords, nan ? kNaN : bits >> 31 ? kNegative : kPositive);
    return;
  }
  const int place = max(static_cast<int>(exponent), 1) - 150 - kLowest;  // of the mantissa's lowest bit
  const unsigned long long mantissa = exponent ? fraction | 1u << 23 : fraction, shifted = mantissa << place % 32;
  const unsigned long long pieces[2] = {shifted & 0xffffffffu, shifted >> 32};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (pieces[i]) atomicAdd(words + place / 32 + i, bits >> 31 ? 0ull - pieces[i] : pieces[i]);
  }
}

// Returns the value of an accumulator, within an ulp or two; it does not depend on the order of the additions.
__device__ inline double accumulated(const unsigned long long* words) {
  const unsigned long long flags = words[kValueWords];
  if (flags) {
    const double infinite = __longlong_as_double(0x7ff0000000000000ll);
    return flags == kPositive ? infinite : flags == kNegative ? -infinite : infinite - infinite;
  }
  long long digits[kValueWords], carry = 0;  // digits of 32 bits; the last one has the sign
  for (int w = 0; w < kValueWords; ++w) {
    digits[w] = static_cast<long long>(words[w]) + carry;
    carry = digits[w] >> 32;
    if (w + 1 < kValueWords) digits[w] &= 0xffffffffll;
  }
  const bool negative = digits[kValueWords - 1] < 0;
  if (negative) {  // negate
    carry = 0;
    for (int w = 0; w < kValueWords; ++w) {
      digits[w] = carry - digits[w];
      carry = digits[w] >> 32;
      if (w + 1 < kValueWords) digits[w] &= 0xffffffffll;
    }
  }
  double sum = 0;
  for (int w = 0; w < kValueWords; ++w) sum += ldexp(static_cast<double>(digits[w]), 32 * w + kLowest);
  return negative ? -sum : sum;
}

}  // namespace spattn
