// Runs a kernel on the CPU, block after block. For kernels without inline PTX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <string.h>

#include <memory>
#include <ucontext.h>
#include <vector>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx;

// CUDA threads are contexts of one CPU thread, which switches at barriers.
struct Barrier {
  int count = 0, arrived = 0, generation = 0;
};
struct Threads {
  std::vector<ucontext_t> contexts;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<Barrier> barriers;  // of the block, then of each warp
  std::vector<double> lanes;
  std::vector<bool> votes, done;
  ucontext_t main;
  const void* params;

  explicit Threads(int count) : contexts(count), barriers(1 + count / 32), lanes(count), votes(count), done(count) {
    for (Barrier& barrier : barriers) barrier.count = 32;
    barriers[0].count = count;
  }
};
static Threads* threads;

inline void wait(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.count) barrier.arrived = 0, ++barrier.generation;
  while (barrier.generation == generation) swapcontext(&threads->contexts[threadIdx.x], &threads->main);
}
inline void __syncthreads() { wait(threads->barriers[0]); }
inline void __syncwarp() { wait(threads->barriers[1 + threadIdx.x / 32]); }
inline int __syncthreads_and(int vote) {
  threads->votes[threadIdx.x] = vote != 0;
  __syncthreads();
  bool found = true;
  for (bool other : threads->votes) found &= other;
  __syncthreads();
  return found;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  threads->lanes[threadIdx.x] = double(x);
  __syncwarp();
  const T other = T(threads->lanes[threadIdx.x ^ mask]);
  __syncwarp();
  return other;
}
template <class T>
T __shfl_sync(unsigned, T x, int) {
  return x;  // only in functions that these kernels do not call
}
inline unsigned __ballot_sync(unsigned, int) { return 0; }
inline int __any_sync(unsigned, int) { return 0; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll((long long)x); }

template <class T, class F>
T bits_of(F x) {
  T y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline unsigned long long __double_as_longlong(double x) { return bits_of<unsigned long long>(x); }
inline double __longlong_as_double(unsigned long long x) { return bits_of<double>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline void atomicAdd(unsigned long long* at, unsigned long long x) { *at += x; }
inline void atomicOr(unsigned long long* at, unsigned long long x) { *at |= x; }

#define RUN(kernel, Params)                                                   \
  static void run_thread() {                                                  \
    kernel(*static_cast<const Params*>(threads->params));                     \
    threads->done[threadIdx.x] = true;                                        \
    setcontext(&threads->main);                                               \
  }                                                                           \
  extern "C" void run(int blocks, const Params* params) {                     \
    const int count = launch_shape[0], stack = 1 << 17;                       \
    Threads own(count);                                                       \
    threads = &own, own.params = params;                                      \
    for (int i = 0; i < count; ++i) own.stacks.emplace_back(new char[stack]); \
    for (int block = 0; block < blocks; ++block) {                            \
      blockIdx.x = block;                                                     \
      for (int i = 0; i < count; ++i) {                                       \
        own.done[i] = false;                                                  \
        getcontext(&own.contexts[i]);                                         \
        own.contexts[i].uc_stack = {own.stacks[i].get(), 0, size_t(stack)};   \
        makecontext(&own.contexts[i], run_thread, 0);                         \
      }                                                                       \
      for (int left = count; left;) {                                         \
        left = 0;                                                             \
        for (int i = 0; i < count; ++i) {                                     \
          if (own.done[i]) continue;                                          \
          threadIdx.x = i, ++left;                                            \
          swapcontext(&own.main, &own.contexts[i]);                           \
        }                                                                     \
      }                                                                       \
    }                                                                         \
  }                                                                           \
  extern "C" long params_bytes() { return sizeof(Params); }
