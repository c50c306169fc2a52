// The warp that stores results and recomputes rows that came out non-finite.
#pragma once

#include "sm90_barrier.cuh"
#include "sm90_config.cuh"
#include "sm90_repair.cuh"
#include "sm90_tma.cuh"

namespace spattn {

// One warp that writes finished items, so that the consumers go on with the next ones.
struct Writer {
    const Params& p;
    Shared& shared;
    static constexpr int kRows = kBlockQ / 32;  // rows a lane
    const int lane = threadIdx.x % 32;
    RingPosition<kQueries> query;

    __device__ __forceinline__ void store_tile(const Work& work) {
        const View& view = p.query_views[work.item.query_view];
        const int part = lane / kPanels, panel = lane % kPanels;
        if (lane < kWarpgroups * kPanels) {
            tma_store(&p.maps[view.map + 1 + work.unit.batch * p.batch_maps],
                      shared_address(shared.query[query.slot]) + (panel * kBlockQ + part * 64) * kRowBytes, panel * 64,
                      work.item.x + part * view.half[2], work.item.y + view.shift_y + part * view.half[1],
                      work.item.z + view.shift_z + part * view.half[0],
                      work.unit.batch * p.q_batch + work.unit.head_q);
            tma_store_commit();
        }
    }

    __device__ __forceinline__ void store_lse(const Work& work, int row, float lse) {
        int64_t position;
        const bool valid =
            cell_position(p.query_views[work.item.query_view], work.item.x, work.item.y, work.item.z, row, position);
        if (work.item.slot >= 0) {
            p.partial_lse[partial_row(p, work, row)] = lse;
        } else if (valid) {
            p.lse[(static_cast<int64_t>(work.unit.batch) * p.heads_q + work.unit.head_q) * p.q_len + position] = lse;
        }
    }

    __device__ void join_prior(const Work& work, int row, float (&result)[kDim / 32], float& lse) {
        const int64_t prior = prior_row(p, work, row);
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
    __device__ void repair(const Work& work, int row) {
        int64_t position;
        float result[kDim / 32], lse;
        if (!cell_position(p.query_views[work.item.query_view], work.item.x, work.item.y, work.item.z, row, position)) {
            return;
        }
        repair_row<Element, kDim, kTileKV, kWarpgroups>(p, work.item, work.unit, row, position, result, lse);
        if (work.item.slot <= -2) join_prior(work, row, result, lse);
        Element* out = static_cast<Element*>(p.out) + work.unit.batch * p.out_stride.batch +
                       work.unit.head_q * p.out_stride.head + position * p.out_stride.token;
        for (int i = 0; i < kDim / 32; ++i) {
            const int d = lane + 32 * i;
            if (d >= p.head_dim_v) continue;
            if (work.item.slot >= 0) p.partial_out[partial_row(p, work, row) * p.head_dim_v + d] = result[i];
            else from_float(result[i], out[d]);
        }
        if (lane == 0) store_lse(work, row, lse);
    }

    __device__ __forceinline__ void repair_all(const Work& work, uint32_t broken) {
        tma_store_wait();
        __syncwarp();
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
            for (uint32_t rows = __shfl_sync(0xffffffff, broken, i); rows; rows &= rows - 1) {
                repair(work, 32 * i + __ffs(rows) - 1);
            }
        }
    }

    // Gives the query tile back as soon as the copy engine has read it; what is left works from registers.
    __device__ void run() {
        for (;; query.advance()) {
            barrier_wait(shared_address(&shared.done[query.slot]), query.parity);
            const Work work = shared.work[query.slot];
            if (work.item.begin >= work.item.end) break;
            if (work.item.slot < 0) store_tile(work);
            float lse[kRows];
            uint32_t broken = 0;  // lane i: which of rows 32 i ... are not finite
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int row = lane + 32 * i;
                lse[i] = shared.lse[query.slot][row];
                const bool flag = shared.repair[query.slot][row / 16] >> (row % 16) & 1;
                const uint32_t rows = __ballot_sync(0xffffffff, flag);
                broken = lane == i ? rows : broken;
            }
            tma_store_wait_read();
            barrier_arrive(shared_address(&shared.query_empty[query.slot]));
#pragma unroll
            for (int i = 0; i < kRows; ++i) store_lse(work, lane + 32 * i, lse[i]);
            if (__any_sync(0xffffffff, broken != 0)) repair_all(work, broken);
        }
        tma_store_wait();
    }
};

}  // namespace spattn
