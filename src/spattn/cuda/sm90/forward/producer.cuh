// Producer warps: draw tasks from an atomic counter and load their tiles. TMA loads queries, keys and values, except
// gathered rows, which are copied one by one.
#pragma once

#include "common/chain.cuh"
#include "sm90/isa/barrier.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/dropout.cuh"
#include "sm90/forward/gather.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/isa/tma.cuh"

namespace spattn::sm90 {

// A lane's tile of an iteration, as tensor map coordinates. For gathered keys, x is the tile's index.
struct StepTile {
  int x, y, z, map, mask;
};

// All that the producer must know before a task's first copy; `task.item` is -1 past the last task.
struct Lookup {
  Task task;
  Work work;
  StepTile tiles;           // lane l holds the tile of entry begin + l
  TilePositions positions;  // of that tile, for score functions and dropout
};

// Broadcasts lane `lane`'s tile to uniform registers, so that TMA instructions need no load after the wait for a stage.
__device__ __forceinline__ StepTile broadcast(const StepTile& tile, int lane) {
  const bool own = threadIdx.x % 32 == lane;
  const auto of = [&](int value) { return static_cast<int>(uniform(own ? value : 0)); };
  return {of(tile.x), of(tile.y), of(tile.z), of(tile.map), of(tile.mask)};
}

struct StepTiles {
  StepTile of[kTiles];
};

// Positions of a task's queries, for score functions of key - query.
struct QueryRow {
  int first, step;
  bool one_row;
  Score::Head<float> head;
};

// Batch entry and head of an iteration's keys and, for gathered plans, their positions.
struct StepKeys {
  int item = -1, batch, head;
  StepRows rows;
};

struct Producer {
  const Params& p;
  Shared& shared;
  const int part;  // index of this producer warp; all process the same tasks, warp 0 publishes them
  const int lane = threadIdx.x % 32;
  RingPosition<kStages> ring;
  RingPosition<kQueries> query;
  RingPosition<kWordStages> words;
  StepTiles previous;  // tiles whose values are still to be loaded
  StepKeys previous_keys;
  Gatherer gatherer{part};
  int task_number = blockIdx.x;  // static schedule only

  // Looks up the tile of entry e for this lane.
  __device__ __forceinline__ void load_entry(Lookup& now, int e) const {
    const int last = min(e, now.work.end - 1);
    const Entry entry = p.entries[last];
    const View& view = p.key_views[now.work.key_view + entry.view];
    const int mask = e < now.work.end ? p.entry_masks[last] : kNoTile;
    if constexpr (kGathers) {
      now.tiles = {view.map + entry.x, 0, 0, 0, mask};
      now.positions.first = view.map + entry.x;
      return;
    }
    const Problem& own = problem_of(p, view);
    const int map = view.map + now.task.batch * own.batch_maps;
    now.tiles = {entry.x, entry.y + view.shift_y, entry.z + view.shift_z, map, mask};
    if constexpr (kScored) {
      now.positions = tile_positions(view, entry.x, entry.y, entry.z, view.offset > 0 ? int(own.moved) : 0);
    }
  }

  // Looks up the next task: a chain of dependent loads that overlaps this task's copies. With kInSteps, each iteration
  // of a long item does one lookup, so that no copy waits for the whole chain. With two warpgroups, iterations are long
  // enough to do all lookups at once.
  __device__ __forceinline__ void look_up_task(Lookup& found, int number) const {
    found.task.item = -1;
    if (number < p.task_count) {
      found.task = p.tasks[number];
      if (kWarpgroups > 1) found.work = p.work[found.task.item];
      if (kWarpgroups > 1) load_entry(found, found.work.begin + lane);
    }
  }

  __device__ __forceinline__ void look_up_work(Lookup& found) const {
    if (kWarpgroups == 1 && found.task.item >= 0) found.work = p.work[found.task.item];
  }

  __device__ __forceinline__ void look_up_tiles(Lookup& found) const {
    if (kWarpgroups == 1 && found.task.item >= 0) load_entry(found, found.work.begin + lane);
  }

  __device__ __forceinline__ Lookup look_up(int number) const {
    Lookup found;
    look_up_task(found, number);
    look_up_work(found);
    look_up_tiles(found);
    return found;
  }

  // Prefetches the key positions of the iteration that begins with the tile of lane `place`.
  __device__ __forceinline__ void look_up_keys(const Lookup& now, int place, StepRows& rows) const {
#pragma unroll
    for (int i = 0; i < StepRows::kWords; ++i) {
      const int word = part * StepRows::kWords + i;
      const StepTile tile = broadcast(now.tiles, place + word / (kBlockKV / 32));
      rows.at[i] = -1;
      if (tile.mask == kNoTile) continue;
      rows.at[i] = p.key_rows[int64_t(tile.x) * kBlockKV + word % (kBlockKV / 32) * 32 + lane];
    }
  }

  __device__ __forceinline__ void gather_query(const Lookup& now, uint32_t full) {
    const Assignment assigned = {now.work, now.task.batch, now.task.head_q};
    QueryRows rows;
#pragma unroll
    for (int i = 0; i < QueryRows::kWords; ++i) {
      int64_t position;
      const int row = (part * QueryRows::kWords + i) * 32 + lane;
      rows.at[i] = query_position(p, assigned, row, position) ? position : -1;
    }
    const RowSource source = row_source<0>(p, now.task.batch, now.task.head_q);
    const uint32_t target = shared_address(shared.query[query.stage]);
    constexpr int kParts = kPanels == kValuePanels ? 1 : kKeySlices, kWidth = kPanels / kParts;
#pragma unroll
    for (int i = 0; i < kParts; ++i) gatherer.copy<kWidth>(target + i * kWidth * kBlockQ * kRowBytes, source, rows, i);
    gatherer.submit(full);
    query.advance();
  }

  __device__ __forceinline__ void load_query(const Lookup& now) {
    const uint32_t full = shared_address(&shared.query_full[query.stage]);
    const uint32_t target = shared_address(shared.query[query.stage]);
    const View& view = p.query_views[now.work.query_view];
    const Problem& own = problem_of(p, view);
    barrier_wait(shared_address(&shared.query_empty[query.stage]), query.parity ^ 1);
    const bool copied = copies_queries(p);
    if (elect_one() && part == 0) {
      shared.assigned[query.stage] = {now.work, now.task.batch, now.task.head_q};
      if (!copied) {
        barrier_arrive_expect(full, own.block_q * kTermPanels * kRowBytes);
#pragma unroll 1
        for (int half = 0; half < kRowGroups; ++half) {
          const int dx = half * view.half[2], dy = half * view.half[1], dz = half * view.half[0];
          // Rows outside of the view are not stored: the first ones stand for them.
          const bool real = !half || !is_outside(view, now.work.x + dx, now.work.y + dy, now.work.z + dz);
#pragma unroll
          for (int panel = 0; panel < kTermPanels; ++panel) {
            tma_load(target + (panel * kBlockQ + half * 64) * kRowBytes,
                     &p.maps[view.map + now.task.batch * own.batch_maps], full, panel * kPanelColumns,
                     now.work.x + (real ? dx : 0), now.work.y + view.shift_y + (real ? dy : 0),
                     now.work.z + view.shift_z + (real ? dz : 0), now.task.batch * own.q_batch + now.task.head_q);
          }
        }
      }
    }
    if (copied) return gather_query(now, full);
    query.advance();
  }

  __device__ __forceinline__ QueryRow query_row(const Lookup& now) const {
    const View& view = p.query_views[now.work.query_view];
    const Problem& own = problem_of(p, view);
    int64_t position;
    cell_position(view, now.work.x, now.work.y, now.work.z, 0, position);
    return {int(position) + query_offset(own), int(view.stride[2]), view.box[2] >= own.block_q,
            Score::open<float>(*own.score, query_offset(own), now.task.batch, now.task.head_q)};
  }

  // Computes the numbers of the diagonals of an iteration, whose tiles lane `place` and the following ones hold.
  // Requires rows of keys with the step of the queries, and no array index that needs a bounds check; otherwise
  // computes none.
  template <class Published = IterationDiagonals>
  __device__ __forceinline__ void compute_diagonals(const TilePositions& positions, int place, const QueryRow& queries,
                                                    typename Published::Lane& found) const {
    if constexpr (kDiagonals) {
      bool shared_numbers = queries.one_row;
      int first[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int step = __shfl_sync(0xffffffff, positions.step, place + t);
        const bool one_row = __shfl_sync(0xffffffff, int(positions.one_row()), place + t);
        first[t] = __shfl_sync(0xffffffff, positions.first, place + t) - queries.first;
        const int begin = first[t] - (kBlockQ - 1) * step, end = first[t] + 63 * step;
        shared_numbers = shared_numbers && one_row && step == queries.step &&
                         Score::inside(0, 0, min(begin, end), max(begin, end), queries.head);
      }
      found.extent = shared_numbers ? Extent::diagonal : Extent::pair;
      if (!shared_numbers) return;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) Published::compute(found, t, first[t], queries.step, queries.head);
      Published::compare(found);
    }
  }

  // Loads the random words of an iteration's keys, whose tiles lane `place` and the following ones hold.
  template <class Dropping>
  __device__ __forceinline__ void load_words(const Lookup& now, int place, typename Dropping::Lane& found) const {
    if constexpr (Score::kDrops) {
      if (part != 0) return;  // the warp that publishes
      const auto dropout = Dropping::dropout_of(p, {now.work, now.task.batch, now.task.head_q});
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        TilePositions tile = now.positions;
        for (uint32_t* word :
             {&tile.first, &tile.step, &tile.next_row, &tile.next_plane, &tile.per_cell, &tile.plane_per_row})
          *word = __shfl_sync(0xffffffff, *word, place + t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int cell = half * 32 + lane;
          found.of[t][half] =
              dropout.word(kGathers ? p.key_rows[int64_t(tile.first) * kBlockKV + cell] : tile.of(cell));
        }
      }
    }
  }

  template <class Lane>
  __device__ __forceinline__ void publish_words(const Lane& found) {
    if constexpr (Score::kDrops) {
      found.write(shared.words[words.stage]);
      words.advance();
    }
  }

  // Publishes with the keys of a stage, which TMA loads, what consumers need to know of them. Lane `place` and the
  // following ones hold the positions.
  __device__ __forceinline__ void publish(uint32_t stage, const TilePositions& positions, int place,
                                          const IterationDiagonals::Lane& diagonals, const WeightDrops::Lane& found) {
    const uint32_t tile = lane - place;
    if (kModified && tile < kTiles) shared.positions[stage][tile] = positions;
    if constexpr (kDiagonals) shared.diagonals[stage].write(diagonals);
    publish_words(found);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.full[stage]));
  }

  // Fills the next stages with keys (kValue = 0) or values (1).
  template <int kValue>
  __device__ __forceinline__ void load_step(const StepTiles& tiles, const StepKeys& keys, bool last = false) {
#pragma unroll
    for (int slice = 0; slice < (kValue ? kValueSlices : kKeySlices); ++slice) {
      load_slice<kValue>(tiles, keys, slice, last);
    }
  }

  template <int kValue>
  __device__ __forceinline__ void load_slice(const StepTiles& tiles, const StepKeys& keys, int slice, bool last) {
    const bool raw = kTransposers && kValue;
    const uint32_t target = shared_address(shared.ring[ring.stage]);
    const uint32_t full = shared_address(raw ? &shared.raw[ring.stage] : &shared.full[ring.stage]);
    barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    if (elect_one() && part == 0) {
      // nothing is published with these
      if (kScored && (kValue || slice)) barrier_arrive(shared_address(&shared.full[ring.stage]));
      if (raw) shared.masks[ring.stage][0] = last ? kLastValues : 0;
      if (kTransposers > 1 && !raw) barrier_arrive(full, kTransposers - 1);
#pragma unroll
      for (int t = 0; t < kTiles && kValue == 0 && slice == 0; ++t) shared.masks[ring.stage][t] = tiles.of[t].mask;
      if constexpr (!kGathers) {
        barrier_arrive_expect(full, kStageBytes);
#pragma unroll
        for (int i = 0; i < kTiles * kTerms * kSlicePanels; ++i) {
          const int t = i / (kTerms * kSlicePanels), panel = i % (kTerms * kSlicePanels);
          const int first = panel / kSlicePanels * kDim + (slice * kSlicePanels + panel % kSlicePanels) * kPanelColumns;
          const StepTile& tile = tiles.of[t];
          tma_load(target + (panel * kStepKV + t * kBlockKV) * kRowBytes, &p.maps[tile.map + kValue], full, first,
                   tile.x, tile.y, tile.z, keys.head);
        }
      }
    }
    if constexpr (kGathers) {
      gatherer.copy<kSlicePanels>(target, row_source<1 + kValue>(p, keys.batch, keys.head), keys.rows, slice);
      gatherer.submit(full);
    }
    ring.advance();
  }

  __device__ __forceinline__ void load_previous_values(bool last = false) {
    if (previous_keys.item >= 0) load_step<1>(previous, previous_keys, last);
  }

  // True if tasks are assigned statically, in boustrophedon order, instead of drawn from the counter: with several
  // producer warps, or with at most two tasks per CTA. In the second case all tickets would be drawn before any task is
  // done, so that the CTA with the longest task could also get the longest second task.
  __device__ __forceinline__ bool take_turns() const { return kGathers || p.task_count <= int(2 * gridDim.x); }

  // Draws a ticket. The counter hands out task_count + gridDim.x tickets in all, in any order. A ticket is drawn long
  // before its use, to hide the latency of the atomic.
  __device__ __forceinline__ int draw() const { return lane == 0 && !take_turns() ? atomicAdd(p.counter, 1) : 0; }

  // Returns the task index of a ticket; the holder of the last ticket resets the counter.
  __device__ __forceinline__ int settle(int ticket) {
    const int blocks = gridDim.x;
    if (take_turns()) return task_number = 2 * (task_number / blocks + 1) * blocks - 1 - task_number;
    if (lane == 0 && ticket == p.task_count + gridDim.x - 1) atomicExch(p.counter, 0);
    return gridDim.x + __shfl_sync(0xffffffff, ticket, 0);
  }

  // Loads a task and returns the next one; draws the ticket of the one after that.
  __device__ __forceinline__ Lookup load_task(Lookup& now, int& ticket) {
    Lookup next;
    StepRows ahead;                 // key positions of the next iteration, prefetched
    WeightDrops::Lane words_ahead;  // random words of the next iteration, prefetched
    if constexpr (kGathers) look_up_keys(now, 0, ahead);
    load_words<WeightDrops>(now, 0, words_ahead);
    load_query(now);
    const Problem& own = problem_of(p, p.query_views[now.work.query_view]);
    StepKeys keys;
    keys.item = now.task.item, keys.batch = now.task.batch;
    keys.head = kGathers ? now.task.head_kv : now.task.batch * own.kv_batch + now.task.head_kv;
    QueryRow queries;
    if constexpr (kDiagonals) queries = query_row(now);
    const bool step_by_step = kInSteps && now.work.end - now.work.begin > 2 * kTiles;
    for (int e = now.work.begin; e < now.work.end; e += kTiles) {
      const int place = (e - now.work.begin) % 32;
      if (place == 0 && e > now.work.begin) {
        load_entry(now, e + lane);
        if constexpr (kGathers) look_up_keys(now, 0, ahead);
        load_words<WeightDrops>(now, 0, words_ahead);
      }
      StepTiles current;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) current.of[t] = broadcast(now.tiles, place + t);
      if constexpr (kGathers) {
        keys.rows = ahead;
        if (place + kTiles < 32) look_up_keys(now, place + kTiles, ahead);
      }
      const uint32_t stage = ring.stage;
      IterationDiagonals::Lane diagonals;  // computed before the wait for a stage, which hides it
      compute_diagonals(now.positions, place, queries, diagonals);
      load_step<0>(current, keys);
      if (kScored && part == 0) publish(stage, now.positions, place, diagonals, words_ahead);
      if (place + kTiles < 32) load_words<WeightDrops>(now, place + kTiles, words_ahead);
      load_previous_values();
      previous = current;
      previous_keys = keys;
      const int done = e - now.work.begin;
      if (done == 0 && step_by_step) look_up_task(next, settle(ticket));
      else if (done == 0) next = look_up(settle(ticket));
      else if (done == kTiles && step_by_step) look_up_work(next);
      else if (done == 2 * kTiles && step_by_step) look_up_tiles(next);
    }
    if constexpr (kShares) {  // the ring ends with the task: consumers know a stage by its iteration
      load_previous_values();
      previous_keys.item = -1;
    }
    ticket = draw();
    return next;
  }

  __device__ void run() {
    int ticket = draw();
    Lookup now = look_up(blockIdx.x);
    if (kProblems == 1)
      wait_for_previous();  // the previous launch may write q, k, v and read out, but writes no tables
    while (now.task.item >= 0) now = load_task(now, ticket);
    settle(ticket);
    if (kTransposers) ring.advance();  // transposers find values in every other stage
    load_previous_values(true);
    barrier_wait(shared_address(&shared.query_empty[query.stage]), query.parity ^ 1);
    if (lane == 0 && part == 0) {
      shared.assigned[query.stage] = {};
    }
    const uint32_t full = shared_address(&shared.query_full[query.stage]);
    if (copies_queries(p)) gatherer.submit(full);
    else if (lane == 0 && part == 0) barrier_arrive(full);
  }
};

}  // namespace spattn::sm90
