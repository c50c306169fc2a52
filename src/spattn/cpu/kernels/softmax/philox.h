// Philox4x32-10, a counter-based random number generator: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy
// as 1, 2, 3. SC 2011.
#pragma once
#include "kernels.h"

namespace spattn {
namespace SPATTN_ISA {

// See PhiloxFunction. Loops over blocks of counters, which compilers vectorize.
inline void philox(uint64_t seed, uint32_t first, uint32_t head, uint32_t batch, uint32_t stream, int64_t count,
                   uint32_t* word0, uint32_t* word1) noexcept {
  constexpr int kBlock = 64, kRounds = 10;
  for (int64_t start = 0; start < count; start += kBlock) {
    uint32_t x0[kBlock], x1[kBlock], x2[kBlock], x3[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      x0[i] = first + uint32_t(start) + uint32_t(i), x1[i] = head, x2[i] = batch, x3[i] = stream;
    }
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < kRounds; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
      for (int i = 0; i < kBlock; ++i) {
        const uint64_t a = uint64_t(x0[i]) * 0xD2511F53u, b = uint64_t(x2[i]) * 0xCD9E8D57u;
        x0[i] = uint32_t(b >> 32) ^ x1[i] ^ key0, x1[i] = uint32_t(b);
        x2[i] = uint32_t(a >> 32) ^ x3[i] ^ key1, x3[i] = uint32_t(a);
      }
    }
    const int64_t some = count - start < kBlock ? count - start : kBlock;
    for (int64_t i = 0; i < some; ++i) word0[start + i] = x0[i];
    for (int64_t i = 0; word1 && i < some; ++i) word1[start + i] = x1[i];
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
