// Sums of gradients of tables and sinks, in any order of their terms: fixed-point numbers of 288 bits.
#pragma once
#include "kernels.h"
#include "simd/element.h"

namespace spattn {
namespace SPATTN_ISA {

// Adds a term to an accumulator; bits below 2^-160 are dropped, magnitudes from 2^127 on count as infinite.
inline void add_exact(double term, int64_t* words, bool shared) {
  const auto add = [&](int64_t* to, int64_t value) {
    if (shared) {
      __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
    } else {
      *to += value;
    }
  };
  const uint64_t bits = bit_cast<uint64_t>(term);
  const bool negative = bits >> 63;
  const int64_t exponent = int64_t(bits >> 52 & 0x7ff) - 1023;
  if (exponent >= 127) {
    const int64_t flag = term != term ? kNotANumber : negative ? kMinusInfinity : kPlusInfinity;
    __atomic_fetch_or(words + kSumWords - 1, flag, __ATOMIC_RELAXED);
    return;
  }
  uint64_t mantissa = (bits & 0xfffffffffffff) | uint64_t(1) << 52;
  int64_t place = exponent - 52 + 160;  // of the lowest bit
  if (place < 0) {
    if (place <= -53) return;
    mantissa >>= -place, place = 0;
  }
  const unsigned __int128 shifted = (unsigned __int128)mantissa << (place % 32);
  for (int64_t word = place / 32, i = 0; i < 3; ++i, ++word) {
    const int64_t digit = int64_t(uint64_t(shifted >> (32 * i)) & 0xffffffff);
    if (digit) add(words + word, negative ? -digit : digit);
  }
}

// Adds a term to the element of a table's gradient at the indices index(axis); drops it if an index is out of range.
template <class T, class Index>
SPATTN_INLINE void add_term(const ScoreTable& table, bool shared, double term, const Index& index) {
  int64_t element = 0;
  for (int axis = 0; axis < table.axes; ++axis) {
    int64_t at = index(axis);
    at += at < 0 ? table.shape[axis] : 0;
    if (uint64_t(at) >= uint64_t(table.shape[axis])) return;
    element = element * table.shape[axis] + at;
  }
  if (table.direct) {
    const T value = T(term);
    memcpy(table.direct + element * int64_t(sizeof(T)), &value, sizeof value);
  } else if (element >= table.begin && element < table.end) {
    add_exact(term, table.sums + (element - table.begin) * kSumWords, shared);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
