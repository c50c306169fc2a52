// The warp that stores finished tiles by TMA, so that the consumers go on with the next ones.
#pragma once

#include "hopper/tma.cuh"
#include "hopper_backward/config.cuh"

namespace spattn::hopper_backward {

struct Writer {
  const Params& p;
  Shared& shared;
  const int lane = threadIdx.x % 32;
  RingPosition<kBlocks> rows;

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

  __device__ void run() {
    for (;; rows.advance()) {
      const Assignment& assigned = shared.assigned[rows.stage];
      barrier_wait(shared_address(&shared.done[rows.stage]), rows.parity);
      if (assigned.work.heads == 0) break;
      if (assigned.work.slot < 0) store_tile(assigned);
      tma_store_wait_read();
      barrier_arrive(shared_address(&shared.rows_empty[rows.stage]));
    }
    tma_store_wait();
  }
};

}  // namespace spattn::hopper_backward
