// Writer warp: stores results and recomputes non-finite rows.
#pragma once

#include "sm90/isa/barrier.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/fallback_row.cuh"
#include "sm90/forward/gather.cuh"
#include "sm90/isa/tma.cuh"

namespace spattn::sm90 {

// Stores finished tiles, so that consumers proceed to the next ones.
struct Writer {
  const Params& p;
  Shared& shared;
  static constexpr int kRows = kBlockQ / 32;  // rows per lane
  const int lane = threadIdx.x % 32;
  RingPosition<kQueries> query;

  // Scatters rows to their tokens, 16 bytes per lane.
  __device__ __forceinline__ void scatter_tile(const Assignment& assigned) {
    const Problem& own = p.problems[0];
    const uint8_t* tile = shared.query[query.stage];
    Element* target =
        static_cast<Element*>(own.out) + assigned.batch * own.out_stride.batch + assigned.head * own.out_stride.head;
    constexpr int kChunks = kDimV / kVector, kTogether = 32 / kChunks;
    const int chunk = lane % kChunks;
    int at[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int64_t position;
      at[i] = query_position(p, assigned, 32 * i + lane, position) ? position : -1;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll 4
      for (int n = lane / kChunks; n < 32; n += kTogether) {
        const int64_t position = __shfl_sync(0xffffffff, at[i], n);
        if (position < 0 || chunk * kVector >= own.head_dim_v) continue;
        const uint4 words = *reinterpret_cast<const uint4*>(tile + Gatherer::place<kBlockQ>(32 * i + n, chunk));
        *reinterpret_cast<uint4*>(target + position * own.out_stride.token + chunk * kVector) = words;
      }
    }
  }

  __device__ __forceinline__ void store_tile(const Assignment& assigned) {
    const View& view = p.query_views[assigned.work.query_view];
    const Problem& own = problem_of(p, assigned);
    if (copies_queries(p)) return scatter_tile(assigned);
    const int half = lane / kOutPanels, panel = lane % kOutPanels;
    if (lane < kRowGroups * kOutPanels) {
      tma_store(&p.maps[view.map + 1 + assigned.batch * own.batch_maps],
                shared_address(shared.query[query.stage]) + (panel * kBlockQ + half * 64) * kRowBytes,
                panel * kOutColumns, assigned.work.x + half * view.half[2],
                assigned.work.y + view.shift_y + half * view.half[1],
                assigned.work.z + view.shift_z + half * view.half[0], assigned.batch * own.q_batch + assigned.head);
      tma_store_commit();
    }
  }

  __device__ __forceinline__ void store_lse(const Assignment& assigned, int row, float lse) {
    int64_t position;
    const Problem& own = problem_of(p, assigned);
    const bool valid = query_position(p, assigned, row, position);
    if (assigned.work.slot >= 0 && row < own.block_q) {
      own.partial_lse[partial_row(p, assigned, row)] = lse;
    } else if (valid && own.lse != nullptr) {
      own.lse[(static_cast<int64_t>(assigned.batch) * own.heads_q + assigned.head) * own.q_len + position] = lse;
    }
  }

  __device__ void join_prior(const Assignment& assigned, int row, float (&result)[kDimV / 32], float& lse) {
    const int64_t prior = prior_row(p, assigned, row);
    const Problem& own = problem_of(p, assigned);
    if (prior < 0) return;
    const Blend both = blend(lse, own.partial_lse[prior]);
    lse = both.lse;
    for (int i = 0; i < kDimV / 32; ++i) {
      const int d = lane + 32 * i;
      const float rest = d < own.head_dim_v ? own.partial_out[prior * own.head_dim_v + d] : 0.0f;
      result[i] = result[i] * both.own + rest * both.other;
    }
  }

  // Recomputes a non-finite row in float64 and overwrites it.
  __device__ void write_fallback_row(const Assignment& assigned, int row) {
    int64_t position;
    const Problem& own = problem_of(p, assigned);
    float result[kDimV / 32], lse;
    if (!query_position(p, assigned, row, position)) return;
    fallback_row(p, assigned, row, position, result, lse);
    if (assigned.work.slot <= -2) join_prior(assigned, row, result, lse);
    if constexpr (kSinks) {
      const float factor = assigned.work.slot < 0 ? add_sink(row_sink(p, assigned, row), lse) : 1.0f;
      for (int i = 0; i < kDimV / 32; ++i) result[i] *= factor;
    }
    Element* out = static_cast<Element*>(own.out) + assigned.batch * own.out_stride.batch +
                   assigned.head * own.out_stride.head + position * own.out_stride.token;
    for (int i = 0; i < kDimV / 32; ++i) {
      const int d = lane + 32 * i;
      if (d >= own.head_dim_v) continue;
      if (assigned.work.slot >= 0) own.partial_out[partial_row(p, assigned, row) * own.head_dim_v + d] = result[i];
      else narrow(result[i], out[d]);
    }
    if (lane == 0) store_lse(assigned, row, lse);
  }

  __device__ __forceinline__ void write_fallback_rows(const Assignment& assigned, uint32_t own) {
    tma_store_wait();
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      for (uint32_t rows = __shfl_sync(0xffffffff, own, i); rows; rows &= rows - 1) {
        write_fallback_row(assigned, 32 * i + __ffs(rows) - 1);
      }
    }
  }

  // Stores all tiles. Releases a query tile once TMA has read it: the rest works from registers.
  __device__ void run() {
    for (;; query.advance()) {
      named_sync(kDone + query.stage, kDoneThreads);
      const Assignment assigned = shared.assigned[query.stage];
      if (assigned.work.begin >= assigned.work.end) break;
      if (assigned.work.slot < 0) store_tile(assigned);
      float lse[kRows];
      uint32_t exact = 0;  // lane i: bitmask of the non-finite rows among rows 32 i to 32 i + 31
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = lane + 32 * i;
        lse[i] = shared.lse[query.stage][row];
        const uint32_t rows = __ballot_sync(0xffffffff, lse[i] != lse[i]);
        exact = lane == i ? rows : exact;
      }
      tma_store_wait_read();
      barrier_arrive(shared_address(&shared.query_empty[query.stage]));
#pragma unroll
      for (int i = 0; i < kRows; ++i) store_lse(assigned, lane + 32 * i, lse[i]);
      if (__any_sync(0xffffffff, exact != 0)) write_fallback_rows(assigned, exact);
    }
    tma_store_wait();
  }
};

}  // namespace spattn::sm90
