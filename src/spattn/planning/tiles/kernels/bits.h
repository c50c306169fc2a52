// Bit operations on arrays of words.
#pragma once

#include <algorithm>
#include <cstdint>

namespace spattn {

__attribute__((always_inline)) inline int64_t pairs_plain(const uint64_t* words, int64_t count) {
  int64_t pairs = 0;
  for (int64_t n = 0; n < count; ++n) pairs += __builtin_popcountll(words[n]);
  return pairs;
}

#if defined(__x86_64__)
__attribute__((target("popcnt"))) inline int64_t pairs_popcnt(const uint64_t* words, int64_t count) {
  return pairs_plain(words, count);
}
__attribute__((target("avx512f,avx512vpopcntdq"))) inline int64_t pairs_vpopcnt(const uint64_t* words, int64_t count) {
  return pairs_plain(words, count);
}
inline int64_t count_pairs(const uint64_t* words, int64_t count) {
  if (__builtin_cpu_supports("avx512vpopcntdq")) return pairs_vpopcnt(words, count);
  return __builtin_cpu_supports("popcnt") ? pairs_popcnt(words, count) : pairs_plain(words, count);
}
#else
inline int64_t count_pairs(const uint64_t* words, int64_t count) { return pairs_plain(words, count); }
#endif

// Sets the bits [first, stop), clipped to the array.
inline void set_bits(uint64_t* words, int64_t count, int64_t first, int64_t stop) {
  first = std::max<int64_t>(first, 0), stop = std::min(stop, 64 * count);
  for (int64_t word = first / 64; 64 * word < stop; ++word) {
    const int64_t low = std::max<int64_t>(first - 64 * word, 0), high = std::min<int64_t>(stop - 64 * word, 64);
    words[word] |= (~uint64_t{0} >> (64 - (high - low))) << low;
  }
}

}  // namespace spattn
