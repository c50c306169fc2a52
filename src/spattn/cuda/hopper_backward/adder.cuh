// Two warps that add up dQ in global memory, one step each in turns, so that one's waiting hides behind the other's.
#pragma once

#include "hopper/tma.cuh"
#include "hopper_backward/config.cuh"

namespace spattn::hopper_backward {

struct Adder {
  const Params& p;
  Shared& shared;
  const uint32_t turn;  // 0: even steps, 1: odd ones
  RingPosition<kBlocks> rows;
  uint32_t steps = 0;

  // How often something was added to the sums of a slab, with everything that was added before it was counted.
  __device__ __forceinline__ static int added_to(const int32_t* added) {
    int times;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(times) : "l"(added) : "memory");
    return times;
  }

  // Adds dQ of a step to the sums of its slab when all that come before it are in: the sums are the same every time.
  __device__ __forceinline__ void add(int64_t sums, int rank) {
    int32_t* added = p.added + sums;
    float* target = p.query_sums + sums * (kQuerySumBytes / 4);
    const uint32_t source = shared_address(shared.queries.sums);
    while (added_to(added) != rank) {}
    fence_async_global();
    barrier_wait(shared_address(&shared.queries.full[turn]), steps / 2 % 2);
    if (rank == 0) bulk_store(target, source, kQuerySumBytes);
    else bulk_add(target, source, kQuerySumBytes);
    tma_store_commit();
    tma_store_wait_read();
    barrier_arrive(shared_address(&shared.queries.empty[turn]));
    tma_store_wait();
    fence_async_global();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(added), "r"(rank + 1) : "memory");
  }

  // One lane does it.
  __device__ void run() {
    for (;; rows.advance()) {
      barrier_wait(shared_address(&shared.rows_full[rows.stage]), rows.parity);
      const Work& work = shared.assigned[rows.stage].work;
      const Task task = shared.assigned[rows.stage].task;
      const int begin = work.begin, end = work.end, heads = work.heads;
      barrier_arrive(shared_address(&shared.rows_empty[rows.stage]));
      if (heads == 0) break;
      for (int head = 0; head < heads; ++head) {
        for (int e = begin; e < end; ++e, ++steps) {
          if (steps % 2 != turn) continue;
          const Entry& entry = p.entries[e];
          const int64_t place = int64_t(task.batch) * p.heads_q + task.head_q + entry.head + head;
          add(place * p.query_slabs + entry.slab, entry.rank);
        }
      }
    }
  }
};

}  // namespace spattn::hopper_backward
