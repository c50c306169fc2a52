// The warp that stores results and recomputes rows that came out non-finite.
#pragma once

#include "hopper/barrier.cuh"
#include "hopper/config.cuh"
#include "hopper/exact_row.cuh"
#include "hopper/tma.cuh"

namespace spattn::hopper {

// One warp that writes finished tiles, so that the consumers go on with the next ones.
struct Writer {
  const Params& p;
  Shared& shared;
  static constexpr int kRows = kBlockQ / 32;  // rows a lane
  const int lane = threadIdx.x % 32;
  RingPosition<kQueries> query;

  __device__ __forceinline__ void store_tile(const Assignment& assigned) {
    const View& view = p.query_views[assigned.work.query_view];
    const int half = lane / kPanels, panel = lane % kPanels;
    if (lane < kWarpgroups * kPanels) {
      tma_store(&p.maps[view.map + 1 + assigned.task.batch * p.batch_maps],
                shared_address(shared.query[query.stage]) + (panel * kBlockQ + half * 64) * kRowBytes, panel * 64,
                assigned.work.x + half * view.half[2], assigned.work.y + view.shift_y + half * view.half[1],
                assigned.work.z + view.shift_z + half * view.half[0],
                assigned.task.batch * p.q_batch + assigned.task.head_q);
      tma_store_commit();
    }
  }

  __device__ __forceinline__ void store_lse(const Assignment& assigned, int row, float lse) {
    int64_t position;
    const bool valid = query_position(p, assigned, row, position);
    if (assigned.work.slot >= 0 && row < p.block_q) {
      p.partial_lse[partial_row(p, assigned, row)] = lse;
    } else if (valid && p.lse != nullptr) {
      const Task& task = assigned.task;
      p.lse[(static_cast<int64_t>(task.batch) * p.heads_q + task.head_q) * p.q_len + position] = lse;
    }
  }

  __device__ void join_prior(const Assignment& assigned, int row, float (&result)[kDim / 32], float& lse) {
    const int64_t prior = prior_row(p, assigned, row);
    if (prior < 0) return;
    const Blend both = blend(lse, p.partial_lse[prior]);
    lse = both.lse;
    for (int i = 0; i < kDim / 32; ++i) {
      const int d = lane + 32 * i;
      const float rest = d < p.head_dim_v ? p.partial_out[prior * p.head_dim_v + d] : 0.0f;
      result[i] = result[i] * both.own + rest * both.other;
    }
  }

  // Computes a non-finite row again and overwrites it.
  __device__ void write_exact_row(const Assignment& assigned, int row) {
    int64_t position;
    float result[kDim / 32], lse;
    if (!query_position(p, assigned, row, position)) return;
    exact_row(p, assigned, row, position, result, lse);
    if (assigned.work.slot <= -2) join_prior(assigned, row, result, lse);
    Element* out = static_cast<Element*>(p.out) + assigned.task.batch * p.out_stride.batch +
                   assigned.task.head_q * p.out_stride.head + position * p.out_stride.token;
    for (int i = 0; i < kDim / 32; ++i) {
      const int d = lane + 32 * i;
      if (d >= p.head_dim_v) continue;
      if (assigned.work.slot >= 0) p.partial_out[partial_row(p, assigned, row) * p.head_dim_v + d] = result[i];
      else narrow(result[i], out[d]);
    }
    if (lane == 0) store_lse(assigned, row, lse);
  }

  __device__ __forceinline__ void write_exact_rows(const Assignment& assigned, uint32_t own) {
    tma_store_wait();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      for (uint32_t rows = __shfl_sync(0xffffffff, own, i); rows; rows &= rows - 1) {
        write_exact_row(assigned, 32 * i + __ffs(rows) - 1);
      }
    }
  }

  // Gives the query tile back as soon as the copy engine has read it; what is left works from registers.
  __device__ void run() {
    for (;; query.advance()) {
      barrier_wait(shared_address(&shared.done[query.stage]), query.parity);
      const Assignment assigned = shared.assigned[query.stage];
      if (assigned.work.begin >= assigned.work.end) break;
      if (assigned.work.slot < 0) store_tile(assigned);
      float lse[kRows];
      uint32_t exact = 0;  // lane i: which of rows 32 i ... are not finite
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = lane + 32 * i;
        lse[i] = shared.lse[query.stage][row];
        const bool flag = shared.exact_rows[query.stage][row / 16] >> (row % 16) & 1;
        const uint32_t rows = __ballot_sync(0xffffffff, flag);
        exact = lane == i ? rows : exact;
      }
      tma_store_wait_read();
      barrier_arrive(shared_address(&shared.query_empty[query.stage]));
#pragma unroll
      for (int i = 0; i < kRows; ++i) store_lse(assigned, lane + 32 * i, lse[i]);
      if (__any_sync(0xffffffff, exact != 0)) write_exact_rows(assigned, exact);
    }
    tma_store_wait();
  }
};

}  // namespace spattn::hopper
