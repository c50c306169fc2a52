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
#define __noinline__ inline

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
  std::vector<bool> votes, done;
  ucontext_t main;
  const void* params;

  explicit Threads(int count) : contexts(count), barriers(1 + count / 32), votes(count), done(count) {
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
inline bool __syncthreads_or(int vote) { return !__syncthreads_and(!vote); }

// Calls found(lanes) with what the lanes of the warp pass.
template <class T, class Found>
auto exchange(const T& own, Found found) {
  static T lanes[32 * 32];
  T* const first = lanes + threadIdx.x / 32 * 32;
  first[threadIdx.x % 32] = own;
  __syncwarp();
  const auto result = found(first);
  __syncwarp();
  return result;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return exchange(x, [=](const T* lanes) { return lanes[threadIdx.x % 32 ^ mask]; });
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return exchange(x, [=](const T* lanes) { return lanes[lane]; });
}
inline unsigned __ballot_sync(unsigned, int vote) {
  return exchange(vote, [](const int* lanes) {
    unsigned found = 0;
    for (int i = 0; i < 32; ++i) found |= unsigned(lanes[i] != 0) << i;
    return found;
  });
}
inline int __any_sync(unsigned, int vote) { return __ballot_sync(~0u, vote) != 0; }
inline int __all_sync(unsigned, int vote) { return __ballot_sync(~0u, vote) == ~0u; }
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
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }

// Addresses of shared memory: the lower half of the pointer.
static const char* shared_base;
inline size_t __cvta_generic_to_shared(const void* at) {
  shared_base = static_cast<const char*>(at);
  return unsigned(reinterpret_cast<size_t>(at));
}
template <class T>
T* shared_pointer(unsigned address) {
  const size_t high = reinterpret_cast<size_t>(shared_base) & ~size_t(0xffffffffu);
  return reinterpret_cast<T*>(high | address);
}
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
