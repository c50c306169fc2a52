// Writer warps: store finished tiles and, in fused mode, every iteration's dQ by TMA, while the consumers proceed.
#pragma once

#include "sm90/isa/tma.cuh"
#include "sm90/backward/config.cuh"

namespace spattn::sm90_backward {

// One of kWriters warps. Warp 0 stores tiles; to hide latency, all warps take turns to add half of an iteration's dQ.
struct Writer {
  const Params& p;
  Shared& shared;
  const uint32_t turn;
  const int lane = threadIdx.x % 32;
  RingPosition<kTasks> tasks;
  uint32_t halves = 0;  // halves of dQ handled so far by all warps, over all iterations

  // Stores a task's results from the tiles that stage them.
  __device__ __forceinline__ void store_tile(const Assignment& assigned) {
    constexpr int kWidth = kScores ? kPanels : kValuePanels, kCopies = kResults * kWarpgroups * kWidth;
    static_assert(kCopies <= 32);
    if (lane >= kCopies) return;
    const int subtile = lane / kWidth % kWarpgroups, result = lane / (kWidth * kWarpgroups), panel = lane % kWidth;
    const int* at = assigned.work.subtile[subtile];
    const View& view = p.row_views[assigned.work.view];
    const Task& task = assigned.task;
    const int head = kByKeys ? task.batch * p.kv_batch + task.head_kv : task.batch * p.q_batch + task.head_q;
    tma_store(&p.maps[view.map + task.batch * p.batch_maps] + 2 + (kScores ? result : 1),
              shared_address(shared.result(tasks.stage % kBlocks, result)) +
                  (panel * kBlock + subtile * kSubtile) * kRowBytes,
              panel * 64, at[0], at[1] + view.shift_y, at[2] + view.shift_z, head);
    tma_store_commit();
  }

  // Adds half of an iteration's dQ to the sums of its sub-tile, after all preceding additions, so that the result is
  // deterministic. Each half has a counter.
  __device__ __forceinline__ void add(int64_t subtile, int rank) {
    constexpr uint32_t kBytes = kQuerySumBytes / kWarpgroups;
    const uint32_t half = halves % kWarpgroups;
    const int64_t place = subtile * kWarpgroups + half;
    float* target = p.query_sums + place * (kBytes / 4);
    const uint32_t source = shared_address(shared.queries.sums) + half * kBytes;
    while (added_to(p.added + place) != rank) {}
    fence_async_global();
    barrier_wait(shared_address(&shared.queries.full[halves % kFull]), halves / kFull % 2);
    if (rank == 0) bulk_store(target, source, kBytes);
    else bulk_add(target, source, kBytes);
    tma_store_commit();
    tma_store_wait_read();
    barrier_arrive(shared_address(&shared.queries.empty[half]));
    tma_store_wait();
    fence_async_global();
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p.added + place), "r"(rank + 1) : "memory");
  }

  // Adds this warp's halves of an item's iterations; executed by one lane.
  __device__ __forceinline__ void add_queries(const Assignment& assigned) {
    const Task task = assigned.task;
    const int begin = assigned.work.begin, end = assigned.work.end, heads = assigned.work.heads;
    for (int head = 0; head < heads; ++head) {
      const int64_t first = (int64_t(task.batch) * p.heads_q + task.head_q + head) * p.query_subtiles;
      for (int e = begin; e < end; ++e) {
        for (int half = 0; half < kWarpgroups; ++half, ++halves) {
          if (halves % kWriters != turn) continue;
          const Entry& entry = p.entries[e];
          add(first + int64_t(entry.head) * p.query_subtiles + entry.subtile, entry.rank);
        }
      }
    }
  }

  // Stores a task's results, then releases the shared memory that staged them.
  __device__ __forceinline__ void store(const Assignment& assigned) {
    barrier_wait(shared_address(&shared.done[tasks.stage]), tasks.parity);
    if (assigned.work.slot < 0) store_tile(assigned);
    tma_store_wait_read();
    __syncwarp();
    if (lane) return;
    if constexpr (kQueries) {
      barrier_arrive(shared_address(&shared.queries.left));
    } else {
      for (uint64_t& empty : shared.rows_empty[tasks.stage % kBlocks]) barrier_arrive(shared_address(&empty));
    }
  }

  __device__ void run() {
    for (;; tasks.advance()) {
      const Assignment& assigned = shared.assigned[tasks.stage];
      barrier_wait(shared_address(&shared.assigned_full[tasks.stage]), tasks.parity);
      const bool ended = assigned.work.heads == 0;
      __syncwarp();
      if (ended) break;
      if (kQueries && lane == 0) add_queries(assigned);
      __syncwarp();
      if (turn == 0) store(assigned);
      barrier_arrive(shared_address(&shared.assigned_empty[tasks.stage]));
    }
    tma_store_wait();
  }
};

}  // namespace spattn::sm90_backward
