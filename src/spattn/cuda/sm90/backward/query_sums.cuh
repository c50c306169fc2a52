// dQ in fused mode. The warpgroups exchange each iteration's dS through shared memory; each computes half of the
// features of dQ = dS K, from the dS of all 128 keys.
#pragma once

#include "sm90/backward/warpgroup.cuh"

namespace spattn::sm90_backward {

using QueryProduct = Product<kQueries ? kDim / 2 : 64>;
constexpr int kQueryProducts = QueryProduct::kCount;

struct QueryProducts {
  uint32_t steps = 0;

  // Waits until TMA has read the results of the previous item, staged in the memory of dS and the sums.
  __device__ __forceinline__ static void begin(const Warpgroup& own) {
    static_assert(kTasks == 2);  // so the stage index is the parity of its item
    barrier_wait(shared_address(&own.shared.queries.left), own.tasks.stage ^ 1);
  }

  // Writes dS. Its buffer is free: dQ of the iteration before the previous one is complete.
  __device__ __forceinline__ void write(const Warpgroup& own, const uint32_t (&gradients)[kWeights]) const {
    QuerySums& sums = own.shared.queries;
#pragma unroll
    for (int i = 0; i < kStep / 8; i += 2) {
      store_matrices(own.matrix_address(sums.gradients[steps % 2], i), gradients[2 * i], gradients[2 * i + 1],
                     gradients[2 * i + 2], gradients[2 * i + 3]);
    }
    fence_async_proxy();
  }

  // Synchronizes with the other warpgroup and starts dQ.
  __device__ __forceinline__ void multiply(const Warpgroup& own, float (&q)[kQueryProducts]) const {
    const uint32_t half = kDim == 64 ? own.number * 64 : own.number * kBlock * kRowBytes;
    const uint32_t gradients = shared_address(own.shared.queries.gradients[steps % 2]);
    const uint64_t a = operand_descriptor(uniform(gradients), 16, 1024);
    const uint64_t b =
        operand_descriptor(uniform(shared_address(own.shared.operand(own.rows.stage, 0)) + half), 16, 1024);
    named_sync(kBoth, 128 * kWarpgroups);
    pin(q);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kBlock / 16; ++chunk) {
      QueryProduct::template shared<1>(q, a + chunk * 16 * kRowBytes / 16, b + chunk * 16 * kRowBytes / 16, chunk != 0);
    }
    wgmma_commit();
  }

  // Hands dQ to the writer: float4 i of thread t is at 128 i + t.
  __device__ __forceinline__ void hand_over(const Warpgroup& own, const float (&q)[kQueryProducts]) {
    QuerySums& sums = own.shared.queries;
    wait_left(own);
    float4* target = reinterpret_cast<float4*>(sums.sums) + own.number * kQueryProducts / 4 * 128 + own.thread;
#pragma unroll
    for (int i = 0; i < kQueryProducts / 4; ++i) {
      target[128 * i] = make_float4(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
    }
    fence_async_proxy();
    __syncwarp();
    own.arrive(sums.full[(steps * kWarpgroups + own.number) % kFull]);
    ++steps;
  }

  // Waits until the writer has read the half that this warpgroup handed over before.
  __device__ __forceinline__ void wait_left(const Warpgroup& own) const {
    barrier_wait(shared_address(&own.shared.queries.empty[own.number]), steps % 2 ^ 1);
  }

  // Waits until both warpgroups no longer use the memory of dS and the sums of an item.
  __device__ __forceinline__ void end(const Warpgroup& own) const {
    wait_left(own);
    named_sync(kBoth, 128 * kWarpgroups);
  }
};

}  // namespace spattn::sm90_backward
