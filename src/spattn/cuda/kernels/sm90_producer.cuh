// The warp that loads: query tiles, keys and values by TMA, units by an atomic counter.
#pragma once

#include "sm90_barrier.cuh"
#include "sm90_config.cuh"
#include "sm90_mask.cuh"
#include "sm90_tma.cuh"

namespace spattn {

// A lane's share of a step: the tile it loads, as coordinates of a tensor map.
struct StepTile {
    int x, y, z, map, mask;
};

// Everything the producer must know of a unit before its first copy.
struct Assignment {
    Unit unit;
    Item item;
    StepTile tiles;  // lane l: entry begin + l of the list
};

__device__ __forceinline__ StepTile broadcast(const StepTile& tile, int lane) {
    constexpr uint32_t kAll = 0xffffffff;
    return {__shfl_sync(kAll, tile.x, lane), __shfl_sync(kAll, tile.y, lane), __shfl_sync(kAll, tile.z, lane),
            __shfl_sync(kAll, tile.map, lane), __shfl_sync(kAll, tile.mask, lane)};
}

struct Producer {
    const Params& p;
    Shared& shared;
    const int lane = threadIdx.x % 32;
    RingPosition<kSlots> ring;
    RingPosition<kQueries> query;
    StepTile previous;  // its values are still to be loaded
    int previous_head = -1;

    __device__ __forceinline__ StepTile load_entries(const Assignment& work, int e) const {
        const int last = min(e, work.item.end - 1);
        const Entry entry = p.entries[last];
        const View& view = p.key_views[work.item.key_view + entry.view];
        return {entry.x, entry.y + view.shift_y, entry.z + view.shift_z, view.map + work.unit.batch * p.batch_maps,
                e < work.item.end ? p.entry_masks[last] : kNoTile};
    }

    // Four dependent reads: done for the next unit while this one's copies are under way.
    __device__ __forceinline__ Assignment look_up(int number) const {
        Assignment work;
        work.unit.item = -1;
        if (number < p.unit_count) {
            work.unit = p.units[number];
            work.item = p.items[work.unit.item];
            work.tiles = load_entries(work, work.item.begin + lane);
        }
        return work;
    }

    __device__ __forceinline__ void load_query(const Assignment& work) {
        const uint32_t full = shared_address(&shared.query_full[query.slot]);
        const View& view = p.query_views[work.item.query_view];
        barrier_wait(shared_address(&shared.query_empty[query.slot]), query.parity ^ 1);
        if (lane == 0) {
            shared.work[query.slot].item = work.item;
            shared.work[query.slot].unit = work.unit;
            barrier_arrive_expect(full, kQueryBytes);
        }
        if (lane < kWarpgroups * kPanels) {
            const int part = lane / kPanels, panel = lane % kPanels;
            const uint32_t destination = shared_address(shared.query[query.slot]) + panel * kBlockQ * kRowBytes +
                                         part * 64 * kRowBytes;
            tma_load(destination, &p.maps[view.map + work.unit.batch * p.batch_maps], full, panel * 64,
                     work.item.x + part * view.half[2], work.item.y + view.shift_y + part * view.half[1],
                     work.item.z + view.shift_z + part * view.half[0],
                     work.unit.batch * p.q_batch + work.unit.head_q);
        }
        query.advance();
    }

    // Fills the next slot with keys (kValue = 0) or values (1); lane = tile * kPanels + panel issues one copy.
    template <int kValue>
    __device__ __forceinline__ void load_step(const StepTile& tile, int head) {
        const uint32_t full = shared_address(&shared.full[ring.slot]);
        const int part = lane / kPanels, panel = lane % kPanels;
        barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
        if (kValue == 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int mask = __shfl_sync(0xffffffff, tile.mask, t * kPanels);
                if (lane == 0) shared.masks[ring.slot][t] = mask;
            }
        }
        if (lane == 0) barrier_arrive_expect(full, kSlotBytes);
        if (lane < kTiles * kPanels) {
            const uint32_t destination =
                shared_address(shared.ring[ring.slot]) + (panel * kStepKV + part * kTileKV) * kRowBytes;
            tma_load(destination, &p.maps[tile.map + kValue], full, panel * 64, tile.x, tile.y, tile.z, head);
        }
        ring.advance();
    }

    __device__ __forceinline__ void load_previous_values() {
        if (previous_head >= 0) load_step<1>(previous, previous_head);
    }

    // The counter hands out unit_count + gridDim.x tickets in all, whoever draws them. A ticket is used long after it
    // was drawn, so that nothing waits for the atomic.
    __device__ __forceinline__ int draw() const { return lane == 0 ? atomicAdd(p.counter, 1) : 0; }

    // Number of a ticket's unit; whoever holds the last ticket puts the counter back to zero.
    __device__ __forceinline__ int settle(int ticket) const {
        if (lane == 0 && ticket == p.unit_count + gridDim.x - 1) atomicExch(p.counter, 0);
        return gridDim.x + __shfl_sync(0xffffffff, ticket, 0);
    }

    // Loads a unit and returns the next one, whose ticket is replaced by the ticket of the one after it.
    __device__ __forceinline__ Assignment load_unit(Assignment& work, int& ticket) {
        Assignment next;
        load_query(work);
        const int part = lane / kPanels % kTiles;
        const int head = work.unit.batch * p.kv_batch + work.unit.head_kv;
        for (int e = work.item.begin; e < work.item.end; e += kTiles) {
            const int place = (e - work.item.begin) % 32;
            if (place == 0 && e > work.item.begin) work.tiles = load_entries(work, e + lane);
            const StepTile current = broadcast(work.tiles, place + part);
            load_step<0>(current, head);
            load_previous_values();
            previous = current;
            previous_head = head;
            if (e == work.item.begin) next = look_up(settle(ticket));
        }
        ticket = draw();
        return next;
    }

    __device__ void run() {
        int ticket = draw();
        Assignment work = look_up(blockIdx.x);
        while (work.unit.item >= 0) work = load_unit(work, ticket);
        settle(ticket);
        load_previous_values();
        barrier_wait(shared_address(&shared.query_empty[query.slot]), query.parity ^ 1);
        if (lane == 0) {
            shared.work[query.slot].item = {0, 0, 0, 0, 0, 0, 0, 0};
            barrier_arrive(shared_address(&shared.query_full[query.slot]));
        }
    }
};

}  // namespace spattn
