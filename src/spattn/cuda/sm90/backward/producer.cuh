// Producer warp: draws tasks from an atomic counter and loads their row tiles and columns by TMA.
#pragma once

#include <cstddef>

#include "sm90/isa/tma.cuh"
#include "sm90/backward/config.cuh"

namespace spattn::sm90_backward {

// Index of a field's first word in an Assignment.
#define SPATTN_WORD(field) (offsetof(Assignment, field) / 4)
static_assert(sizeof(Assignment) / 4 <= 32);

struct Producer {
  const Params& p;
  Shared& shared;
  const int lane = threadIdx.x % 32;
  RingPosition<kStages> ring;
  RingPosition<kBlocks> rows;
  RingPosition<kTasks> tasks;

  // Returns word `number` of a task. The warp's registers hold a task's Assignment: lane l has word l.
  __device__ __forceinline__ static int word_of(int now, int number) { return __shfl_sync(0xffffffff, now, number); }

  // Returns the tensor map coordinate of the first head of a task's rows (kRows) or columns.
  template <bool kRows>
  __device__ __forceinline__ int head_of(int now) const {
    constexpr bool kKeys = kRows == kByKeys;
    return word_of(now, SPATTN_WORD(task.batch)) * (kKeys ? p.kv_batch : p.q_batch) +
           word_of(now, kKeys ? SPATTN_WORD(task.head_kv) : SPATTN_WORD(task.head_q));
  }

  // Looks up entries e, e + 1, ... of a task's list, one per lane.
  __device__ __forceinline__ void look_up_columns(int now, int e, uint32_t buffer) {
    const int end = word_of(now, SPATTN_WORD(work.end)), head = head_of<false>(now);
    const int first_view = word_of(now, SPATTN_WORD(work.columns));
    const int first_map = word_of(now, SPATTN_WORD(task.batch)) * p.batch_maps;
    const int at = min(e + lane, end - 1);
    const Entry entry = p.entries[at];
    const View& view = p.column_views[first_view + entry.view];
    const bool real = e + lane < end;
    __syncwarp();
    if constexpr (kScored) {
      const int head_q = word_of(now, SPATTN_WORD(task.head_q));
      const bool padded = has_padding(view, entry.x, entry.y, entry.z);
      shared.next_positions[buffer][lane] = {tile_positions(view, entry.x, entry.y, entry.z, kByKeys ? p.q_offset : 0),
                                             head_q + (kByKeys ? entry.head : 0), padded ? at : -1};
    }
    shared.columns[buffer][lane] = {entry.x,
                                    entry.y + view.shift_y,
                                    entry.z + view.shift_z,
                                    view.map + first_map,
                                    head + entry.head,
                                    {real ? entry.masks[0] : kNoTile, real ? entry.masks[1] : kNoTile}};
    __syncwarp();
  }

  // Looks up a task by four dependent loads, which overlap the current task's copies. Past the last task, returns an
  // assignment without heads.
  __device__ __forceinline__ int look_up(int number, uint32_t buffer) {
    constexpr int kWork = sizeof(Work) / 4, kTask = sizeof(Task) / 4;
    static_assert(SPATTN_WORD(task) == kWork);
    if (number >= p.task_count) return 0;
    const int item = p.tasks[number].item;
    int found = 0;
    if (lane < kWork) found = reinterpret_cast<const int*>(p.work + item)[lane];
    else if (lane < kWork + kTask) found = reinterpret_cast<const int*>(p.tasks + number)[lane - kWork];
    __syncwarp();
    look_up_columns(found, word_of(found, SPATTN_WORD(work.begin)), buffer);
    return found;
  }

  __device__ __forceinline__ void assign(int now) {
    barrier_wait(shared_address(&shared.assigned_empty[tasks.stage]), tasks.parity ^ 1);
    if (lane < sizeof(Assignment) / 4) reinterpret_cast<int*>(&shared.assigned[tasks.stage])[lane] = now;
    barrier_arrive(shared_address(&shared.assigned_full[tasks.stage]));
    tasks.advance();
  }

  // Loads the rows of one operand. Call it for the last operand first, which consumers release first.
  __device__ __forceinline__ void load_rows(int now, int operand) {
    constexpr int kCopies = kWarpgroups * kPanels;
    constexpr uint32_t kStatistics = kByKeys ? 0 : kBlock * sizeof(Statistic);
    static_assert(kCopies + kWarpgroups <= 32);
    const uint32_t full = shared_address(&shared.rows_full[rows.stage]);
    const View& view = p.row_views[word_of(now, SPATTN_WORD(work.view))];
    const int panel = lane % kPanels, head = head_of<true>(now);
    const bool copies = lane < kCopies && panel < (operand ? kValuePanels : kPanels);
    const int subtile = lane < kCopies ? lane / kPanels : lane % kWarpgroups;
    const auto coordinate = [&](int of, int axis) { return word_of(now, SPATTN_WORD(work.subtile) + 3 * of + axis); };
    int x = coordinate(subtile, 0), y = coordinate(subtile, 1), z = coordinate(subtile, 2);
    // The rows of a sub-tile outside of the view have no pairs and are not stored: the first one stands for it.
    const int from = is_outside(view, x, y, z) ? 0 : subtile;
    x = coordinate(from, 0), y = coordinate(from, 1) + view.shift_y, z = coordinate(from, 2) + view.shift_z;
    const TensorMap* map = &p.maps[view.map + word_of(now, SPATTN_WORD(task.batch)) * p.batch_maps];
    barrier_wait(shared_address(&shared.rows_empty[rows.stage][operand]), rows.parity ^ 1);
    if (lane == 0 && operand == kOperands - 1) barrier_arrive_expect(full, kRowsBytes + kStatistics);
    __syncwarp();
    if (copies) {
      const uint32_t target =
          shared_address(shared.operand(rows.stage, operand)) + (panel * kBlock + subtile * kSubtile) * kRowBytes;
      tma_load(target, map + operand, full, panel * 64, x, y, z, head);
    } else if (!kByKeys && operand == 0 && lane < kCopies + kWarpgroups) {
      tma_load(shared_address(&shared.statistics[rows.stage * kBlock + subtile * kSubtile]), map + 3, full, 0, x, y, z,
               head);
    }
  }

  // Computes the positions of a task's rows, for dropout.
  __device__ __forceinline__ void look_up_rows(int now) {
    const int subtile = lane % kWarpgroups, at = SPATTN_WORD(work.subtile) + 3 * subtile;
    const View& view = p.row_views[word_of(now, SPATTN_WORD(work.view))];
    const int x = word_of(now, at), y = word_of(now, at + 1), z = word_of(now, at + 2);
    __syncwarp();
    if (lane < kWarpgroups) shared.row_positions[lane] = tile_positions(view, x, y, z, kByKeys ? 0 : p.q_offset);
    __syncwarp();
  }

  // A lane's share of an iteration's random words.
  struct LaneWords {
    ColumnWords columns[kStep / 32];
    RowWords rows[kBlock / 32];
  };

  // Loads the random words of the next iteration.
  template <class Own = decltype(Score::Head<float>::dropout)>
  __device__ __forceinline__ void load_words(int now, uint32_t buffer, int place, int head, LaneWords& found) const {
    const int query_head = shared.next_positions[buffer][place].query_head + head;
    const Own own = Score::open<float>(*p.score, p.q_offset, word_of(now, SPATTN_WORD(task.batch)), query_head).dropout;
    const auto read = [&](int position, auto& words) {
      if constexpr (sizeof words == sizeof(uint32_t)) words = own.word(position);
      else words = own.row(position);
    };
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i)
      read(shared.next_positions[buffer][place + i / 2].cells.of(i % 2 * 32 + lane), found.columns[i]);
#pragma unroll
    for (int i = 0; i < kBlock / 32; ++i) read(shared.row_positions[i / 2].of(i % 2 * 32 + lane), found.rows[i]);
  }

  __device__ __forceinline__ void write_words(const LaneWords& found) {
    StageWords& words = shared.words[ring.stage];
#pragma unroll
    for (int i = 0; i < kStep / 32; ++i) words.columns[i * 32 + lane] = found.columns[i];
#pragma unroll
    for (int i = 0; i < kBlock / 32; ++i) words.rows[i * 32 + lane] = found.rows[i];
    __syncwarp();
  }

  // Publishes the positions of the next stage; executed by one lane.
  __device__ __forceinline__ void publish_positions(uint32_t buffer, int place, int head) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      ColumnPositions next = shared.next_positions[buffer][place + t];
      next.query_head += head;
      shared.positions[ring.stage][t] = next;
    }
  }

  // Fills the next stage with the columns of q or k (kSecond = 0), or of dout or v (1). Lane tile * kWidth + panel
  // issues one copy; the lanes after those copy the statistics.
  template <int kSecond>
  __device__ __forceinline__ void load_columns(int now, uint32_t buffer, int place, int head) {
    const Column* columns = shared.columns[buffer] + place;
    constexpr bool kStatistics = kByKeys && kSecond;
    constexpr int kWidth = kSecond ? kValuePanels : kPanels, kCopies = kTiles * kWidth;
    const uint32_t full = shared_address(&shared.full[ring.stage]);
    const int number = lane < kCopies ? lane / kWidth : lane % kTiles, panel = lane % kWidth;
    const Column& column = columns[number];
    LaneWords words;  // loaded before the wait for a stage, which hides it
    if constexpr (Score::kDrops && !kSecond) load_words(now, buffer, place, head, words);
    barrier_wait(shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    if constexpr (Score::kDrops && !kSecond) write_words(words);
    if (lane == 0) {
      if constexpr (kScored && !kSecond) publish_positions(buffer, place, head);
      for (int t = 0; !kSecond && t < kTiles; ++t) {
        for (int w = 0; w < kWarpgroups; ++w) shared.masks[ring.stage][t][w] = columns[t].masks[w];
      }
      barrier_arrive_expect(full, kStep * kWidth * kRowBytes + (kStatistics ? kStep * sizeof(Statistic) : 0));
    }
    __syncwarp();
    const TensorMap* map = &p.maps[column.map];
    if (lane < kCopies) {
      const uint32_t target = shared_address(shared.ring[ring.stage]) + (panel * kStep + number * kSubtile) * kRowBytes;
      tma_load(target, map + kSecond, full, panel * 64, column.x, column.y, column.z, column.head + head);
    } else if (kStatistics && lane < kCopies + kTiles) {
      tma_load(shared_address(&shared.statistics[ring.stage * kStep + number * kSubtile]), map + 3, full, 0, column.x,
               column.y, column.z, column.head + head);
    }
    ring.advance();
  }

  // The counter hands out task_count + kIdle * gridDim.x tickets in all, in any order. A ticket is drawn long before
  // its use, to hide the latency of the atomic. A CTA's first task is its block index. In fused mode, however, tasks
  // wait for earlier ones, and a CTA that is not resident yet must not hold one: CTAs draw the first task too.
  static constexpr int kIdle = kQueries ? 2 : 1;

  __device__ __forceinline__ int draw() const { return lane == 0 ? atomicAdd(p.counter, 1) : 0; }

  // Returns the task index of a ticket; the holder of the last ticket resets the counter.
  __device__ __forceinline__ int settle(int ticket) const {
    if (lane == 0 && ticket == p.task_count + kIdle * gridDim.x - 1) atomicExch(p.counter, 0);
    return (kQueries ? 0 : gridDim.x) + __shfl_sync(0xffffffff, ticket, 0);
  }

  // Loads a task, which must have columns, and returns the next one; draws the ticket of the one after that.
  __device__ __forceinline__ int load_task(int now, uint32_t buffer, int& ticket) {
    const int begin = word_of(now, SPATTN_WORD(work.begin)), end = word_of(now, SPATTN_WORD(work.end));
    const int heads = word_of(now, SPATTN_WORD(work.heads));
    int next = 0;
    assign(now);
    for (int operand = kOperands - 1; operand > 0; --operand) load_rows(now, operand);
    if constexpr (Score::kDrops) look_up_rows(now);
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int e = begin; e < end; e += kTiles) {
        const int place = (e - begin) % 32;
        if (place == 0 && e + head > begin) look_up_columns(now, e, buffer);
        load_columns<0>(now, buffer, place, head);
        load_columns<1>(now, buffer, place, head);
        if (e != begin || head != 0) continue;
        load_rows(now, 0);
        rows.advance();
        next = look_up(settle(ticket), buffer ^ 1);
      }
    }
    ticket = draw();
    return next;
  }

  __device__ void run() {
    const int first = kQueries ? settle(draw()) : blockIdx.x;
    int ticket = draw();
    uint32_t buffer = 0;
    for (int now = look_up(first, 0); word_of(now, SPATTN_WORD(work.heads)); buffer ^= 1) {
      now = load_task(now, buffer, ticket);
    }
    settle(ticket);
    assign(0);
  }
};

#undef SPATTN_WORD

}  // namespace spattn::sm90_backward
