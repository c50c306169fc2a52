// Formula    dV = P' dO, dK = scale dS' Q (dK/dV kernel: rows are keys), or dQ = scale dS K (dQ kernel: rows are
//            queries), with P = exp(scale Q K' - lse) on the plan's pairs and dS = P o (dO V' - delta).
// Grid       one persistent CTA per SM; an atomic counter hands out tasks (work item, batch, head).
// Target     sm_90a: TMA, WGMMA, setmaxnreg.
// Types      bfloat16 or float16 in and out, float32 accumulation, statistics and workspace.
// Warps      warpgroup 0: warp 0 is the producer, warp 1 the writer; warpgroups 1 and 2: consumers, 64 rows each. P and
//            dS are register operands: the dK/dV kernel computes S and dP transposed.
// Fused      SPATTN_QUERIES: the dK/dV kernel also computes dQ = dS K, half of the features per warpgroup. Warps 1 to 3
//            add it to float32 sums in global memory (TMA), in task order. A task waits only for earlier tasks, all of
//            which already run or are done.
// Tables     A fused kernel sums dS along diagonals for the gradients of arrays that a score function captures.
// Shared     kBlocks row tiles of two operands, a ring of kStages column stages. Row tiles also stage the results.
// Registers  216 to 240 per consumer thread (specializations.py), 72 to 24 per other thread.
// Test       tests/cuda/sm90/test_wgmma_backward.py      Benchmark  benchmarks/peers/peers_cuda.py
// Source     Dao et al., FlashAttention (arXiv:2205.14135), appendix B; sub-tiles: schedule/subtiles.py.

#include "common/chain.cuh"
#include "sm90/backward/consumer.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/writer.cuh"

namespace spattn::sm90_backward {

extern "C" __constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

extern "C" __global__ void __launch_bounds__(kThreads, 1) hopper_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (shared_address(dynamic) % 1024) __trap();  // the swizzle pattern restarts at 1024-byte boundaries
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
      if (!params.waits) wait_for_previous();  // completion of this launch implies completion of all earlier ones
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

}  // namespace spattn::sm90_backward
