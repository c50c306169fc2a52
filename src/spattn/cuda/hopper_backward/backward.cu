// Formula    dV = P' dO, dK = scale dS' Q (rows are keys), or dQ = scale dS K (rows are queries), with
//            P = exp(scale Q K' - lse) on the pass's pairs and dS = P o (dO V' - delta).
// Grid       one persistent CTA an SM; tasks (work item, batch, head) are handed out by an atomic counter.
// Target     sm_90a: TMA, WGMMA, setmaxnreg.
// Types      bfloat16 or float16 in and out, float32 accumulation, statistics and workspace.
// Warps      warpgroup 0: its first warp loads (TMA), its second stores results; warpgroups 1 and 2: 64 rows each. P and
//            dS are operands in registers: by keys S and dP are computed transposed.
// One pass   SPATTN_QUERIES: the pass by keys computes dQ = dS K of each step too, half of the features a warpgroup, and
//            the second to fourth warp add it to float32 sums in global memory (TMA), item after item in the order of
//            the tasks: who comes later waits. A task waits for earlier ones alone, and these have all been taken.
// Shared     kBlocks row tiles of two operands, a ring of kStages steps of columns. Results leave through the row tile.
// Registers  240 a consumer thread, 24 the others.
// Test       tests/cuda/test_hopper_backward.py      Benchmark  benchmarks/peers/peers_cuda.py
// Source     Dao et al., FlashAttention (arXiv:2205.14135), appendix B; passes: schedule/slabs.py.

#include "common/chain.cuh"
#include "hopper_backward/consumer.cuh"
#include "hopper_backward/producer.cuh"
#include "hopper_backward/writer.cuh"

namespace spattn::hopper_backward {

// {threads, dynamic shared bytes, bytes of the parameter}, read by launch.py.
extern "C" __constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

extern "C" __global__ void __launch_bounds__(kThreads, 1) hopper_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (shared_address(dynamic) % 1024) __trap();  // the swizzle counts from 1024-byte boundaries
  if (threadIdx.x == 0) {
    constexpr int kConsumers = 4 * kWarpgroups;  // warps
    for (int i = 0; i < kTasks; ++i) {
      barrier_init(shared_address(&shared.assigned_full[i]), 32);
      barrier_init(shared_address(&shared.assigned_empty[i]), 32 * kWriters + 128 * kWarpgroups);
      barrier_init(shared_address(&shared.done[i]), 128 * kWarpgroups);
    }
    for (int i = 0; i < kBlocks; ++i) {
      barrier_init(shared_address(&shared.rows_full[i]), 1);
      for (uint64_t& empty : shared.rows_empty[i]) barrier_init(shared_address(&empty), kQueries ? kConsumers : 1);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), kConsumers);
    }
    for (uint64_t& full : shared.queries.full) barrier_init(shared_address(&full), 4);
    for (uint64_t& empty : shared.queries.empty) barrier_init(shared_address(&empty), 1);
    barrier_init(shared_address(&shared.queries.left), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (params.waits) wait_for_previous();
  let_next_start();
  if (params.gate != nullptr && *params.gate == 0) return;
  if (threadIdx.x < 128) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x < 32) {
      Producer producer{params, shared};
      producer.run();
      if (!params.waits) wait_for_previous();  // whoever waits for this launch waits for all before it
    } else if (threadIdx.x < 32 + 32 * kWriters) {
      Writer writer{params, shared, threadIdx.x / 32 - 1};
      writer.run();
    }
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer consumer{params, shared};
    consumer.run();
  }
}

}  // namespace spattn::hopper_backward
