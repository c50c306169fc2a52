// Formula    Philox4x32-10 of (position, query head, batch entry, 0 or 1), keyed by the seed: offset and odd multiplier
//            of each query, word of each key (request/dropout.py).
// Grid       a thread per query or key of each head.
// Target     compute capability 8.0 and later.
// Test       tests/cuda/test_dropout_kernels.py      Bound  instructions: 10 rounds for 4 or 8 bytes.
// source: Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011.

#include <cstdint>

#include "common/chain.cuh"

namespace spattn::common {

constexpr int kThreads = 256;

struct DropoutWords {
  uint2* rows;      // (batch, heads_q, q_len)
  uint32_t* words;  // (batch, heads_q, kv_len)
  uint64_t seed;
  const uint64_t* device_seed;  // replaces `seed` unless null
  int batch, heads_q, q_len, kv_len;
};

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(DropoutWords)};

extern "C" __global__ void __launch_bounds__(kThreads) dropout_words(const __grid_constant__ DropoutWords p) {
#if __CUDA_ARCH__ >= 900
  let_next_start();
#endif
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t length = int64_t(p.q_len) + p.kv_len, head = number / length;
  if (head >= int64_t(p.batch) * p.heads_q) return;
  const int64_t at = number % length;
  const bool is_query = at < p.q_len;
  const int64_t position = is_query ? at + p.kv_len - p.q_len : at - p.q_len;
  uint32_t a = uint32_t(position), b = uint32_t(head % p.heads_q), c = uint32_t(head / p.heads_q), d = !is_query;
  const uint64_t seed = p.device_seed ? *p.device_seed : p.seed;
  uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t(a) * 0xD2511F53u, right = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(right >> 32) ^ b ^ low, b = uint32_t(right);
    c = uint32_t(left >> 32) ^ d ^ high, d = uint32_t(left);
    low += 0x9E3779B9u, high += 0xBB67AE85u;
  }
  if (is_query) p.rows[head * p.q_len + at] = make_uint2(a, b | 1);
  else p.words[head * p.kv_len + at - p.q_len] = a;
}

}  // namespace spattn::common
