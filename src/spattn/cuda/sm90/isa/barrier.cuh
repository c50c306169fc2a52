// Hopper's barriers: mbarriers in shared memory and named barriers. One PTX instruction per function.
//
// An mbarrier completes a phase once all arrivals and all announced bytes are in. A waiter passes the parity of the
// phase that it waits for. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>

#include "common/shared_address.cuh"

namespace spattn::sm90 {

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives `count` times.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives, and announces `bytes` that TMA will deliver in this phase.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_try_wait(barrier, parity)) {}
}

// Synchronizes on a named barrier of the CTA, 1 .. 15; 0 belongs to __syncthreads.
__device__ __forceinline__ void named_sync(uint32_t name, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(uint32_t name, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Orders this thread's generic shared-memory accesses before later accesses by WGMMA and TMA (async proxy).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders generic and async-proxy accesses to global memory, in both directions.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Reallocates registers (setmaxnreg); every warp of the warpgroup must execute it.
template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True for one fixed lane of the warp; the compiler knows that it is the only one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n}"
      : "=r"(elected));
  return elected;
}

// Moves a warp-uniform value to a uniform register, as operand descriptors need. (The compiler knows that a warp
// reduction is uniform, but not that a shuffle is.)
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffff, value); }

// A ring stage, and the parity of its current phase.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Advances by `count` stages, at most kStages.
  __device__ __forceinline__ void advance(uint32_t count) {
    stage += count;
    if (stage < kStages) return;
    stage -= kStages;
    parity ^= 1;
  }
};

}  // namespace spattn::sm90
