// Formula    out = softmax(scale * q k^T, over the plan's pairs) v and its log-sum-exp, forward.
// Grid       one to three persistent CTAs per SM (choose/specializations.py); an atomic counter hands out tasks (work
//            item, batch, head).
// Target     sm_90a: TMA, WGMMA, setmaxnreg.
// Types      bfloat16 or float16 in and out; float32 accumulation, statistics, workspace and lse. float32 out with q, k
//            and v as bfloat16 terms (sm90/terms.cuh), which split.cu writes. bfloat16 out with float8_e4m3fn.
// Warps      warpgroup 0: warp 0 is the producer (warp 2 a second one for gathered KV), warp 1 the writer; warpgroups
//            1 .. kBlockQ / 64: consumers, 64 query rows each. Two consumer warpgroups take turns on the tensor cores
//            (ping-pong), so that one's softmax overlaps the other's products; CTAs of one SM overlap without turns.
//            Each consumer also overlaps its softmax with its own PV product of the previous iteration. float32 tiles
//            of 64 rows: two consumer warpgroups take the iterations in turns (kShares). float8: consumers overlap
//            each other only; warps 2 and 3 (3 alone for gathered KV) transpose values in their stages.
// Shared     kQueries query tiles and a ring of kStages K or V stages, in the order K0 K1 V0 K2 V1 ... V(n-1):
//            224 KiB for head_dim 128, half of it with two CTAs per SM. The query tile also stages the output.
//            Head dimensions of q and v that differ: stages of 64 features, three of K and two of V for 192 and 128.
// Registers  120 to 240 per consumer thread, 40 to 128 per producer or writer thread (choose/specializations.py).
//            Without a score function and for head_dim_v up to 128, consumers do not spill, except with three terms of
//            128 features.
// Test       tests/cuda/sm90/test_wgmma_forward.py      Benchmark  benchmarks/peers/peers_cuda.py
// Source     Shah et al., FlashAttention-3 (arXiv:2407.08608): ping-pong and overlap. Plan contract:
//            planning/contract/types.py.

#include "common/chain.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/producer.cuh"
#include "sm90/forward/transposer.cuh"
#include "sm90/forward/writer.cuh"
#if SPATTN_FLOAT8
#include "sm90/forward/float8.cuh"
#endif

namespace spattn::sm90 {

#if SPATTN_FLOAT8
using OwnConsumer = Float8Consumer;
#else
using OwnConsumer = Consumer;
#endif

__device__ __forceinline__ bool has_empty_rows(const Params& p) {
  bool found = false;
  for (int i = 0; i < kProblems; ++i) found |= p.problems[i].block_q < kBlockQ;
  return found;
}

// Zeroes tiles: rows that no copy fills hold an earlier kernel's data, possibly NaN.
template <int kTiles, int kBytes>
__device__ __forceinline__ void clear(uint8_t (&tiles)[kTiles][kBytes]) {
  uint4* words = reinterpret_cast<uint4*>(tiles);
  for (int i = threadIdx.x; i < sizeof(tiles) / sizeof(uint4); i += kThreads) words[i] = {0, 0, 0, 0};
  fence_async_proxy();
}

extern "C" __constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

extern "C" __global__ void __launch_bounds__(kThreads, kCtas) hopper_attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  if (shared_address(dynamic) % 1024) __trap();  // the swizzle pattern restarts at 1024-byte boundaries
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueries; ++i) {
      barrier_init(shared_address(&shared.query_full[i]), copies_queries(params) ? kCopies : 1);
      barrier_init(shared_address(&shared.query_empty[i]), 32 + 4 * kShares);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), (kGathers ? kCopies : max(kTransposers, 1)) + kScored);
      if (kTransposers) barrier_init(shared_address(&shared.raw[i]), kGathers ? kCopies : 1);
      barrier_init(shared_address(&shared.empty[i]), 4 * (kShares ? 1 : kWarpgroups));
    }
    fence_barrier_init();
  }
  if (has_empty_rows(params)) clear(shared.query);
  __syncthreads();
  let_next_start();  // the next launch waits for this one, or reads none of its results
  if (threadIdx.x < 128) {
    registers_shrink<kProducerRegisters>();
    if (threadIdx.x < 32 || (kGathers && threadIdx.x / 32 == 2)) {
      Producer producer{params, shared, kGathers ? int(threadIdx.x) / 64 : 0};
      producer.run();
    } else if (threadIdx.x < 64) {
      Writer writer{params, shared};
      writer.run();
    } else {
      if (kProblems > 1) wait_for_previous();  // completion of this launch implies completion of all earlier ones
      if constexpr (kTransposers > 0) {
        Transposer transposer{params, shared, kGathers ? 0 : int(threadIdx.x) / 32 - 2};
        transposer.run();
      }
    }
  } else {
    registers_grow<kConsumerRegisters>();
    OwnConsumer consumer{params, shared};
    if constexpr (kShares) consumer.run_shared();
    else consumer.run();
  }
}

}  // namespace spattn::sm90
