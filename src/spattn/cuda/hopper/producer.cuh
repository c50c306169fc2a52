// The warp that loads: query tiles, keys and values by TMA, tasks by an atomic counter.
#pragma once

#include "hopper/barrier.cuh"
#include "hopper/config.cuh"
#include "hopper/mask.cuh"
#include "hopper/tma.cuh"

namespace spattn::hopper {

// A lane's share of a step: the tile it loads, as coordinates of a tensor map.
struct StepTile {
  int x, y, z, map, mask;
};

// Everything that the producer must know of a task before its first copy; `task.item` is -1 behind the last task.
struct Lookup {
  Task task;
  Work work;
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
  RingPosition<kStages> ring;
  RingPosition<kQueries> query;
  StepTile previous;  // its values are still to be loaded
  int previous_head = -1;

  __device__ __forceinline__ StepTile load_entries(const Lookup& now, int e) const {
    const int last = min(e, now.work.end - 1);
    const Entry entry = p.entries[last];
    const View& view = p.key_views[now.work.key_view + entry.view];
    return {entry.x, entry.y + view.shift_y, entry.z + view.shift_z, view.map + now.task.batch * p.batch_maps,
            e < now.work.end ? p.entry_masks[last] : kNoTile};
  }

  // Four dependent reads: done for the next task while this one's copies are under way.
  __device__ __forceinline__ Lookup look_up(int number) const {
    Lookup found;
    found.task.item = -1;
    if (number < p.task_count) {
      found.task = p.tasks[number];
      found.work = p.work[found.task.item];
      found.tiles = load_entries(found, found.work.begin + lane);
    }
    return found;
  }

  __device__ __forceinline__ void load_query(const Lookup& now) {
    const uint32_t full = shared_address(&shared.query_full[query.stage]);
    const View& view = p.query_views[now.work.query_view];
    barrier_wait(shared_address(&shared.query_empty[query.stage]), query.parity ^ 1);
    if (lane == 0) {
      shared.assigned[query.stage].work = now.work;
      shared.assigned[query.stage].task = now.task;
      barrier_arrive_expect(full, p.block_q * kPanels * kRowBytes);
    }
    if (lane < kWarpgroups * kPanels) {
      const int half = lane / kPanels, panel = lane % kPanels;
      const uint32_t destination =
          shared_address(shared.query[query.stage]) + panel * kBlockQ * kRowBytes + half * 64 * kRowBytes;
      tma_load(destination, &p.maps[view.map + now.task.batch * p.batch_maps], full, panel * 64,
               now.work.x + half * view.half[2], now.work.y + view.shift_y + half * view.half[1],
               now.work.z + view.shift_z + half * view.half[0], now.task.batch * p.q_batch + now.task.head_q);
    }
    query.advance();
  }

  // Fills the next stage with keys (kValue = 0) or values (1); lane = tile * kPanels + panel issues one copy.
  template <int kValue>
  __device__ __forceinline__ void load_step(const StepTile& tile, int head) {
    const uint32_t full = shared_address(&shared.full[ring.stage]);
    const int number = lane / kPanels, panel = lane % kPanels;
    barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    if (kValue == 0) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int mask = __shfl_sync(0xffffffff, tile.mask, t * kPanels);
        if (lane == 0) shared.masks[ring.stage][t] = mask;
      }
    }
    if (lane == 0) barrier_arrive_expect(full, kStageBytes);
    if (lane < kTiles * kPanels) {
      const uint32_t destination =
          shared_address(shared.ring[ring.stage]) + (panel * kStepKV + number * kBlockKV) * kRowBytes;
      tma_load(destination, &p.maps[tile.map + kValue], full, panel * 64, tile.x, tile.y, tile.z, head);
    }
    ring.advance();
  }

  __device__ __forceinline__ void load_previous_values() {
    if (previous_head >= 0) load_step<1>(previous, previous_head);
  }

  // The counter hands out task_count + gridDim.x tickets in all, whoever draws them. A ticket is used long after it
  // was drawn, so that nothing waits for the atomic.
  __device__ __forceinline__ int draw() const { return lane == 0 ? atomicAdd(p.counter, 1) : 0; }

  // Number of a ticket's task; whoever holds the last ticket puts the counter back to zero.
  __device__ __forceinline__ int settle(int ticket) const {
    if (lane == 0 && ticket == p.task_count + gridDim.x - 1) atomicExch(p.counter, 0);
    return gridDim.x + __shfl_sync(0xffffffff, ticket, 0);
  }

  // Loads a task and returns the next one, whose ticket is replaced by the ticket of the one after it.
  __device__ __forceinline__ Lookup load_task(Lookup& now, int& ticket) {
    Lookup next;
    load_query(now);
    const int number = lane / kPanels % kTiles;
    const int head = now.task.batch * p.kv_batch + now.task.head_kv;
    for (int e = now.work.begin; e < now.work.end; e += kTiles) {
      const int place = (e - now.work.begin) % 32;
      if (place == 0 && e > now.work.begin) now.tiles = load_entries(now, e + lane);
      const StepTile current = broadcast(now.tiles, place + number);
      load_step<0>(current, head);
      load_previous_values();
      previous = current;
      previous_head = head;
      if (e == now.work.begin) next = look_up(settle(ticket));
    }
    ticket = draw();
    return next;
  }

  __device__ void run() {
    int ticket = draw();
    Lookup now = look_up(blockIdx.x);
    while (now.task.item >= 0) now = load_task(now, ticket);
    settle(ticket);
    load_previous_values();
    barrier_wait(shared_address(&shared.query_empty[query.stage]), query.parity ^ 1);
    if (lane == 0) {
      shared.assigned[query.stage].work = {0, 0, 0, 0, 0, 0, 0, 0};
      barrier_arrive(shared_address(&shared.query_full[query.stage]));
    }
  }
};

}  // namespace spattn::hopper
