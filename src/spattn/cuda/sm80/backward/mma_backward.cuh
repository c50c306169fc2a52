// Main loop of the tensor-core kernels: pipelined loads, products and epilogue. R is a tile of rows, C one of columns.
// S = R C' for q and k, D = R C' for dout and v, P = exp(scale S - lse), dS = P o (D - delta). The sums are dS C, where
// C holds k or q, and in the dK/dV kernel also P C, where C holds dout. A kernel supplies its products:
//
//   struct Products {
//     kRounds                                                                      true if operands are rounded to TF32
//     multiply<features>(Scores&, const Element* rows, const Element* columns)     S or D
//     add<features>(Sums&, const Scores&, const Element* columns)                  sums += P C or dS C
//     column(n, i)                              feature index of accumulator i < 2 of sums[atom][n]
//   };
//
// S and the sums use mma.m16n8's accumulator layout (sm80/scores.cuh). The feature index of a sum is column(n, i), not
// the layout's column.
#pragma once
#include "sm80/backward/mma_nonfinite.cuh"
#include "sm80/backward/mma_weights.cuh"

namespace spattn::sm80_backward {

template <typename T>
__device__ __forceinline__ void clear(T& sums) {
  for (auto& atom : sums) {
    for (auto& tile : atom) tile[0] = tile[1] = tile[2] = tile[3] = 0.f;
  }
}

template <typename Products>
struct Block {
  const Params& p;
  Shared& shared;
  // A sub-tile has at most 64 rows: if kRows == 64, the index of this CTA's rows is a compile-time zero.
  const int parts = kRows == 64 ? 1 : (p.pass.subtile_rows + kRows - 1) / kRows;
  const int first_row = kRows == 64 ? 0 : blockIdx.x % parts * kRows;
  const int subtile = blockIdx.x / parts % p.pass.subtiles;
  const Task& task = p.pass.tasks[blockIdx.x / parts / p.pass.subtiles];
  const Work& work = p.pass.work[task.item];
  float2 own[kAtoms][2];  // lse and delta, if rows are queries
  Sums<kDim> scores;
  Sums<kDimV> values;
#if SPATTN_TABLES
  Collected collected{p.captured};
#endif

  template <int kCount, int kRowChunks>
  __device__ __forceinline__ void load(Element* tile, const Array& array, int head, const int* position, int features) {
    const Element* data = sm80::head_of<const Element>(array, task.batch, head);
    sm80::load_rows<kCount, kRowChunks, kThreads, kAligned>(tile, data, array, position, 0, features);
  }

  // Post-processes the chunks that this thread has loaded, before the barrier.
  template <int kCount, bool kBoth>
  __device__ __forceinline__ void landed(Tiles<kCount, kBoth>& tiles) {
    if constexpr (Products::kRounds) {
      sm80::round_rows<kCount, kChunks, kThreads>(tiles.scored);
      if constexpr (kBoth) sm80::round_rows<kCount, kChunksV, kThreads>(tiles.valued);
    }
  }

  __device__ const float2* statistics(int head) const {
    return static_cast<const float2*>(p.statistics) + (static_cast<long long>(task.batch) * p.heads_q + head) * p.q_len;
  }

  // Loads the rows and this thread's statistics; complete after copies_wait() and a barrier.
  __device__ __forceinline__ void load_rows() {
    const int tile = work.tile + subtile / p.pass.row_parts,
              first = subtile % p.pass.row_parts * p.pass.subtile_rows + first_row;
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      const bool inside = first_row + row < p.pass.subtile_rows;
      shared.row_position[row] = inside ? sm80::position_of(p.pass.views[work.view], tile, first + row) : -1;
    }
    __syncthreads();
    const int head = kByKeys ? task.head_kv : task.head_q;
    load<kRows, kChunks>(shared.rows.scored, kByKeys ? p.k : p.q, head, shared.row_position, p.head_dim);
    if constexpr (kScores) {
      load<kRows, kChunksV>(shared.rows.valued, kByKeys ? p.v : p.dout, head, shared.row_position, p.head_dim_v);
    }
    if constexpr (Products::kRounds) {
      sm80::copies_wait();
      landed(shared.rows);
    }
    if constexpr (!kByKeys) {
#pragma unroll
      for (int number = 0; number < 2 * kAtoms; ++number) {
        const int position = shared.row_position[own_row(number / 2, number % 2)];
        own[number / 2][number % 2] = statistics(head)[max(position, 0)];
      }
    }
  }

  // Publishes an iteration and the positions of its columns to all threads. The ballot needs whole warps.
  __device__ __forceinline__ void tell(const Step& step, const Entry& entry, int place) {
    if (threadIdx.x == 0) shared.step[place] = {task.head_q + entry.head + step.head, step.first, step.mask};
    if (!step.exists() || threadIdx.x >= kColumns) return;
    const Pass& pass = p.pass;
    const int column = step.first + threadIdx.x, cell = entry.part * pass.subtile_columns + column;
    const View& view = pass.views[work.columns + entry.view];
    const int position = column < pass.subtile_columns ? sm80::position_of(view, entry.tile, cell) : -1;
    const unsigned real = __ballot_sync(~0u, position >= 0);
    shared.position[place][threadIdx.x] = position;
    if (threadIdx.x % 32 == 0) shared.real[place][threadIdx.x / 32] = real;
  }

  // Loads the columns of an iteration, if it exists.
  __device__ __forceinline__ void load_columns(int place, int stage) {
    if (!shared.step[place].exists()) return;
    const int* position = shared.position[place];
    const int head = kByKeys ? shared.step[place].head : task.head_kv;
    auto& columns = shared.columns[stage];
    load<kColumns, kChunks>(columns.scored, kByKeys ? p.q : p.k, head, position, p.head_dim);
    load<kColumns, kChunksV>(columns.valued, kByKeys ? p.dout : p.v, head, position, p.head_dim_v);
    if (!kByKeys || threadIdx.x >= kColumns) return;
    const int at = position[threadIdx.x];
    const unsigned target = shared_address(&shared.statistics[stage][threadIdx.x]);
    sm80::copy_async8(target, statistics(head) + max(at, 0), at >= 0);
  }

  // Adds one iteration to all sums. With kFinite, replaces non-finite values of the columns by 0.
  template <bool kFinite>
  __device__ __forceinline__ void add(int place, int stage) {
    const sm80::HeadScore<float> score(p.score, task.batch, kByKeys ? shared.step[place].head : task.head_q);
    Allowed allowed;
    const bool masked = find_allowed(allowed, p.pass, shared, place, first_row);
    auto& columns = shared.columns[stage];
    Scores s, d;
    clear(s);
    Products::template multiply<kDim>(s, shared.rows.scored, columns.scored);
    if constexpr (kScores) {
      clear(d);
      Products::template multiply<kDimV>(d, shared.rows.valued, columns.valued);
    }
#if SPATTN_TABLES
    collect(collected, s, d, own, allowed, score, shared, place);
#else
    weigh(s, d, static_cast<float>(p.scale), own, shared.statistics[stage], allowed, masked, score, shared, place);
    if constexpr (kFinite) {
      if constexpr (kValues) add_nonfinite<Products>(values, s, columns.valued);
      __syncthreads();
      clear_nonfinite<kColumns * kDim>(columns.scored);
      clear_nonfinite<kColumns * kDimV>(columns.valued);
      __syncthreads();
    }
    if constexpr (kValues) Products::template add<kDimV>(values, s, columns.valued);
    if constexpr (kScores) Products::template add<kDim>(scores, d, columns.scored);
#endif
  }

  // Runs all iterations of the item. Publishes each iteration two ahead and, with two stages, loads it one ahead.
  template <bool kFinite>
  __device__ __forceinline__ void add_all() {
    clear(scores);
    clear(values);
    Steps steps(p.pass, work, subtile);
    Entry entry;
    for (int place = 0; place < 2; ++place) {
      const Step step = steps.fetch(entry);
      tell(step, entry, place);
    }
    Step after = steps.fetch(entry);
    __syncthreads();
    if (kStages > 1) load_columns(0, 0);
    for (int place = 0, stage = 0; shared.step[place].exists(); stage = kStages - 1 - stage) {
      const int next = place + 1 == kSteps ? 0 : place + 1;
      if (kStages == 1) load_columns(place, 0);
      sm80::copies_wait();
      landed(shared.columns[stage]);
      __syncthreads();
      // The iteration's columns have landed; no thread reads the previous iteration's any more.
      if (kStages > 1) load_columns(next, 1 - stage);
      tell(after, entry, next + 1 == kSteps ? 0 : next + 1);
      add<kFinite>(place, stage);
      after = steps.fetch(entry);
      if (kStages == 1) __syncthreads();
      place = next;
    }
  }

  // Writes this thread's values of a gradient, to the workspace if it is a partial.
  template <int kFeatures>
  __device__ __forceinline__ void write(const Sums<kFeatures>& sums, float factor, const Array& target, void* partial,
                                        int features) const {
    const Pass& pass = p.pass;
    const int head = kByKeys ? task.head_kv : task.head_q;
    const long long place = static_cast<long long>(task.batch) * (kByKeys ? p.heads_kv : p.heads_q) + head;
    const long long slot = static_cast<long long>(work.slot) * pass.subtiles + subtile;
    const long long first = place * pass.partial_rows + slot * pass.subtile_rows + first_row;
#pragma unroll
    for (int number = 0; number < 2 * kAtoms; ++number) {
      const int row = own_row(number / 2, number % 2), position = shared.row_position[row];
      if (position < 0) continue;
      float* to = static_cast<float*>(partial) + (first + row) * features;
      Element* result = token<Element>(target, task.batch, head, position);
#pragma unroll
      for (int n = 0; n < kFeatures / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int feature = Products::column(n, i);
          const float x = sums[number / 2][n][number % 2 * 2 + i] * factor;
          if (feature >= features) continue;
          if (work.slot >= 0) to[feature] = x;
          else narrow(x, result[feature * target.column]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    load_rows();
    add_all<false>();
#if SPATTN_TABLES
    collected.finish(sm80::HeadScore<float>(p.score, task.batch, task.head_q));
#else
    const bool fine = (!kScores || finite<kDim>(scores, shared)) && (!kValues || finite<kDimV>(values, shared));
    if (__syncthreads_or(!fine)) add_all<true>();
    if constexpr (kScores) write<kDim>(scores, static_cast<float>(p.scale), p.scores, p.partial_scores, p.head_dim);
    if constexpr (kValues) write<kDimV>(values, 1.f, p.values, p.partial_values, p.head_dim_v);
#endif
  }
};

}  // namespace spattn::sm80_backward
