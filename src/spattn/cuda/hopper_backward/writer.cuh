// The warps that store results by TMA, so that the consumers go on with what comes next: finished tiles and, in one pass,
// dQ of every step.
#pragma once

#include "hopper/tma.cuh"
#include "hopper_backward/config.cuh"

namespace spattn::hopper_backward {

// Number 0 of kWriters stores tiles; all of them add up dQ, a step each in turns, so that one's waiting hides behind the
// others'.
struct Writer {
  const Params& p;
  Shared& shared;
  const uint32_t turn;
  const int lane = threadIdx.x % 32;
  RingPosition<kBlocks> rows;
  uint32_t steps = 0;

  // dK and dV lie where k and v were, dQ where q was. Where dV is alone it lies in the place of k.
  __device__ __forceinline__ void store_tile(const Assignment& assigned) {
    constexpr int kResults = kScores + kValues, kCopies = kResults * kWarpgroups * kPanels;
    static_assert(kCopies <= 32);
    if (lane >= kCopies) return;
    const int slab = lane / kPanels % kWarpgroups, result = lane / (kPanels * kWarpgroups), panel = lane % kPanels;
    const int* at = assigned.work.slab[slab];
    const View& view = p.row_views[assigned.work.view];
    const Task& task = assigned.task;
    const int head = kByKeys ? task.batch * p.kv_batch + task.head_kv : task.batch * p.q_batch + task.head_q;
    tma_store(&p.maps[view.map + task.batch * p.batch_maps] + 2 + (kScores ? result : 1),
              shared_address(shared.rows[rows.stage][result]) + (panel * kBlock + slab * kSlab) * kRowBytes, panel * 64,
              at[0], at[1] + view.shift_y, at[2] + view.shift_z, head);
    tma_store_commit();
  }

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
    barrier_wait(shared_address(&shared.queries.full[turn]), steps / kWriters % 2);
    if (rank == 0) bulk_store(target, source, kQuerySumBytes);
    else bulk_add(target, source, kQuerySumBytes);
    tma_store_commit();
    tma_store_wait_read();
    barrier_arrive(shared_address(&shared.queries.empty[turn]));
    tma_store_wait();
    fence_async_global();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(added), "r"(rank + 1) : "memory");
  }

  // This warp's steps of an item; one lane does it.
  __device__ __forceinline__ void add_queries(const Assignment& assigned) {
    const Task task = assigned.task;
    const int begin = assigned.work.begin, end = assigned.work.end, heads = assigned.work.heads;
    if (turn != 0) barrier_arrive(shared_address(&shared.rows_empty[rows.stage]));  // the assignment has been read
    for (int head = 0; head < heads; ++head) {
      for (int e = begin; e < end; ++e, ++steps) {
        if (steps % kWriters != turn) continue;
        const Entry& entry = p.entries[e];
        const int64_t place = int64_t(task.batch) * p.heads_q + task.head_q + entry.head + head;
        add(place * p.query_slabs + entry.slab, entry.rank);
      }
    }
  }

  __device__ void run() {
    for (;; rows.advance()) {
      const Assignment& assigned = shared.assigned[rows.stage];
      barrier_wait(shared_address(&shared.rows_full[rows.stage]), rows.parity);
      const bool ended = assigned.work.heads == 0;
      __syncwarp();
      if (ended) break;
      if (kQueries && lane == 0) add_queries(assigned);
      __syncwarp();
      if (turn != 0) continue;
      barrier_wait(shared_address(&shared.done[rows.stage]), rows.parity);
      if (assigned.work.slot < 0) store_tile(assigned);
      tma_store_wait_read();
      barrier_arrive(shared_address(&shared.rows_empty[rows.stage]));
    }
    tma_store_wait();
  }
};

}  // namespace spattn::hopper_backward
