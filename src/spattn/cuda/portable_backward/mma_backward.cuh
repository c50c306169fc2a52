// The loop that the tensor-core kernels share: loads that overlap products, weights, and the way out. With rows R and
// columns C, S = R C' of q and k, D = R C' of dout and v, P = exp(scale S - lse) and dS = P o (D - delta), the sums are
// dS C over k or q and, by keys, P C over dout. A kernel hands in its products:
//
//   struct Products {
//     multiply(Scores&, const Element* rows, const Element* columns)     S or D
//     add(Sums&, const Scores&, const Element* columns)                  sums += P C
//     column(n, i)                        the feature that accumulator i < 2 of sums[atom][n] holds
//   };
//
// S and the sums have mma.m16n8's accumulator layout (portable/softmax.cuh), the latter but for column().
#pragma once
#include "portable/softmax.cuh"
#include "portable_backward/mma_steps.cuh"

namespace spattn::portable_backward {

using Scores = float[kAtoms][kColumns / 8][4];
template <int kFeatures>
using Sums = float[kAtoms][kFeatures / 8][4];

// A row half of a thread: rows g and g + 8 of an atom, g = lane / 4.
__device__ __forceinline__ int own_row(int atom, int half) {
  return threadIdx.x / 32 * kRowsPerWarp + atom * 16 + half * 8 + threadIdx.x % 32 / 4;
}

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
  const int slab = blockIdx.x % p.pass.slabs;
  const Task& task = p.pass.tasks[blockIdx.x / p.pass.slabs];
  const Work& work = p.pass.work[task.item];
  float2 own[kAtoms][2];  // lse and delta of rows that are queries
  Sums<kDim> scores;
  Sums<kDimV> values;

  __device__ const Element* head_of(const Array& array, int head) const {
    return portable::head_of<const Element>(array, task.batch, head);
  }

  __device__ const float2* statistics(int head) const {
    return static_cast<const float2*>(p.statistics) + (static_cast<long long>(task.batch) * p.heads_q + head) * p.q_len;
  }

  // Rows, and what a thread keeps of its own. A barrier must follow before they are read.
  __device__ __forceinline__ void load_rows() {
    const int tile = work.tile + slab / p.pass.row_parts, first = slab % p.pass.row_parts * p.pass.slab_rows;
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      const bool inside = row < p.pass.slab_rows;
      shared.row_position[row] = inside ? portable::position_of(p.pass.views[work.view], tile, first + row) : -1;
    }
    __syncthreads();
    const int head = kByKeys ? task.head_kv : task.head_q;
    const Array &scored = kByKeys ? p.k : p.q, &valued = kByKeys ? p.v : p.dout;
    portable::load_rows<kRows, kChunks, kThreads, kAligned>(shared.rows.scored, head_of(scored, head), scored,
                                                            shared.row_position, 0, p.head_dim);
    if constexpr (kScores) {
      portable::load_rows<kRows, kChunksV, kThreads, kAligned>(shared.rows.valued, head_of(valued, head), valued,
                                                               shared.row_position, 0, p.head_dim_v);
    }
    if constexpr (!kByKeys) {
#pragma unroll
      for (int number = 0; number < 2 * kAtoms; ++number) {
        const int position = shared.row_position[own_row(number / 2, number % 2)];
        own[number / 2][number % 2] = statistics(head)[max(position, 0)];
      }
    }
  }

  // Tells everybody of a step and the positions of its columns. The ballot takes whole warps.
  __device__ __forceinline__ void announce(const Step& step, const Entry& entry, int place) {
    if (threadIdx.x == 0) shared.step[place] = {task.head_q + entry.head + step.head, step.first, step.mask};
    if (!step.exists() || threadIdx.x >= kColumns) return;
    const Pass& pass = p.pass;
    const int column = step.first + threadIdx.x;
    const View& view = pass.views[work.columns + entry.view];
    const int cell = entry.part * pass.slab_columns + column;
    const int position = column < pass.slab_columns ? portable::position_of(view, entry.tile, cell) : -1;
    const unsigned real = __ballot_sync(~0u, position >= 0);
    shared.position[place][threadIdx.x] = position;
    if (threadIdx.x % 32 == 0) shared.real[place][threadIdx.x / 32] = real;
  }

  // Loads the columns of a step, if there is one.
  __device__ __forceinline__ void load_columns(int place, int stage) {
    if (!shared.step[place].exists()) return;
    const int* position = shared.position[place];
    const int head = kByKeys ? shared.step[place].head : task.head_kv;
    const Array &scored = kByKeys ? p.q : p.k, &valued = kByKeys ? p.dout : p.v;
    auto& columns = shared.columns[stage];
    portable::load_rows<kColumns, kChunks, kThreads, kAligned>(columns.scored, head_of(scored, head), scored, position,
                                                               0, p.head_dim);
    portable::load_rows<kColumns, kChunksV, kThreads, kAligned>(columns.valued, head_of(valued, head), valued, position,
                                                                0, p.head_dim_v);
    if (!kByKeys || threadIdx.x >= kColumns) return;
    const int at = position[threadIdx.x];
    const unsigned target = shared_address(&shared.statistics[stage][threadIdx.x]);
    portable::copy_async8(target, statistics(head) + max(at, 0), at >= 0);
  }

  // The pairs of a row with the columns of a step that are allowed, padding not.
  __device__ __forceinline__ unsigned long long allowed(int place, int row) const {
    const unsigned* words = shared.real[place];
    const unsigned long long real = kColumns == 64 ? words[0] | (unsigned long long)words[1] << 32 : words[0];
    const Step& step = shared.step[place];
    if (step.mask == kFull) return real;
    const long long first = static_cast<long long>(step.mask) * p.pass.slab_rows;
    return real & p.pass.bits[first + min(row, p.pass.slab_rows - 1)] >> step.first;
  }

  // The logits policy and the weights policy: S becomes P, and D becomes dS. Both are 0 where a pair is not allowed,
  // whatever its column holds.
  __device__ __forceinline__ void weigh(Scores& s, Scores& d, const unsigned long long (&bits)[kAtoms][2], bool masked,
                                        int stage) {
    constexpr float kLog2E = 1.442695040888963407f;
    const float scale_log2 = static_cast<float>(p.scale) * kLog2E;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = 8 * n + threadIdx.x % 4 * 2 + i % 2;
          const float2 query = kByKeys ? shared.statistics[stage][column] : own[atom][i / 2];
          s[atom][n][i] = power_of_two(fmaf(s[atom][n][i], scale_log2, -kLog2E * query.x));
          if constexpr (kScores) d[atom][n][i] = s[atom][n][i] * (d[atom][n][i] - query.y);
        }
      }
      if (!masked) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        portable::apply_mask(s[atom], half, bits[atom][half], 0.f);
        if constexpr (kScores) portable::apply_mask(d[atom], half, bits[atom][half], 0.f);
      }
    }
  }

  // Takes what is not finite out of a step's columns, after it has been added to the values of the rows that see it: a
  // weight times such a number is that number. Its scores were not finite either, so dS is NaN or 0 and needs no more.
  __device__ __forceinline__ void settle(const Scores& weights, int stage) {
    auto& columns = shared.columns[stage];
    if constexpr (kValues) add_nonfinite(weights, columns.valued);
    __syncthreads();
    clean<kChunks>(columns.scored);
    clean<kChunksV>(columns.valued);
    __syncthreads();
  }

  __device__ __forceinline__ void add_nonfinite(const Scores& weights, const Element* columns) {
#pragma unroll
    for (int number = 0; number < 2 * kAtoms; ++number) {
      const unsigned long long seen = seen_columns(weights[number / 2], number % 2);
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int feature = Products::column(n, i);
          for (unsigned long long rest = seen; rest; rest &= rest - 1) {
            const int chunk = portable::chunk_at<kChunksV>(__ffsll(rest) - 1, feature / kVector);
            const float x = widen(columns[chunk * kVector + feature % kVector]);
            if (!is_finite(x)) values[number / 2][n][number % 2 * 2 + i] += x;
          }
        }
      }
    }
  }

  // A bit for each column that has a weight in a row half.
  __device__ __forceinline__ static unsigned long long seen_columns(const float (&weights)[kColumns / 8][4], int half) {
    unsigned long long seen = 0;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (weights[n][2 * half + i] != 0.f) seen |= 1ull << (8 * n + threadIdx.x % 4 * 2 + i);
      }
    }
    seen |= __shfl_xor_sync(~0u, seen, 1);
    return seen | __shfl_xor_sync(~0u, seen, 2);
  }

  template <int kRowChunks>
  __device__ __forceinline__ void clean(Element* tile) {
    for (int i = threadIdx.x; i < kColumns * kRowChunks * kVector; i += kThreads) {
      if (!is_finite(float(widen(tile[i])))) narrow(0.f, tile[i]);
    }
  }

  template <bool kCareful>
  __device__ __forceinline__ void multiply(int place, int stage) {
    unsigned long long bits[kAtoms][2];
#pragma unroll
    for (int number = 0; number < 2 * kAtoms; ++number) {
      bits[number / 2][number % 2] = allowed(place, own_row(number / 2, number % 2));
    }
    const bool masked = shared.step[place].mask != kFull || bits[0][0] != ~0ull >> (64 - kColumns);
    const auto& columns = shared.columns[stage];
    Scores s, d;
    clear(s);
    Products::template multiply<kDim>(s, shared.rows.scored, columns.scored);
    if constexpr (kScores) {
      clear(d);
      Products::template multiply<kDimV>(d, shared.rows.valued, columns.valued);
    }
    weigh(s, d, bits, masked, stage);
    if constexpr (kCareful) settle(s, stage);
    if constexpr (kValues) Products::template add<kDimV>(values, s, columns.valued);
    if constexpr (kScores) Products::template add<kDim>(scores, d, columns.scored);
  }

  // All steps of the item. Each is announced two steps ahead, and loaded one step ahead where there are stages.
  template <bool kCareful>
  __device__ __forceinline__ void accumulate() {
    clear(scores);
    clear(values);
    Steps steps(p.pass, work, slab);
    Entry entry;
    for (int place = 0; place < 2; ++place) {
      const Step step = steps.fetch(entry);
      announce(step, entry, place);
    }
    Step after = steps.fetch(entry);
    __syncthreads();
    if (kStages > 1) load_columns(0, 0);
    for (int place = 0, stage = 0; shared.step[place].exists(); stage = kStages - 1 - stage) {
      const int next = place + 1 == kSteps ? 0 : place + 1;
      if (kStages == 1) load_columns(place, 0);
      portable::copies_wait();
      __syncthreads();
      if (kStages > 1) load_columns(next, 1 - stage);
      announce(after, entry, next + 1 == kSteps ? 0 : next + 1);
      multiply<kCareful>(place, stage);
      after = steps.fetch(entry);
      if (kStages == 1) __syncthreads();
      place = next;
    }
  }

  template <int kFeatures>
  __device__ __forceinline__ bool finite(const Sums<kFeatures>& sums) const {
    float probe = 0.f;  // NaN where a sum of a row that is written is not finite
#pragma unroll
    for (int number = 0; number < 2 * kAtoms; ++number) {
      if (shared.row_position[own_row(number / 2, number % 2)] < 0) continue;
#pragma unroll
      for (int n = 0; n < kFeatures / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) probe = fmaf(sums[number / 2][n][number % 2 * 2 + i], 0.f, probe);
      }
    }
    return probe == 0.f;
  }

  // Writes this thread's share of a gradient, to the workspace where others have parts of its rows.
  template <int kFeatures>
  __device__ __forceinline__ void write(const Sums<kFeatures>& sums, float factor, const Array& target, void* partial,
                                        int features) {
    const Pass& pass = p.pass;
    const int head = kByKeys ? task.head_kv : task.head_q;
    const long long place = static_cast<long long>(task.batch) * (kByKeys ? p.heads_kv : p.heads_q) + head;
    const long long first = place * pass.partial_rows + (static_cast<long long>(work.slot) * pass.slabs + slab) * pass.slab_rows;
#pragma unroll
    for (int number = 0; number < 2 * kAtoms; ++number) {
      const int row = own_row(number / 2, number % 2), position = shared.row_position[row];
      if (position < 0) continue;
      float* to = static_cast<float*>(partial) + (first + row) * features;
      Element* own_target = token<Element>(target, task.batch, head, position);
#pragma unroll
      for (int n = 0; n < kFeatures / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int feature = Products::column(n, i);
          const float x = sums[number / 2][n][number % 2 * 2 + i] * factor;
          if (feature >= features) continue;
          if (work.slot >= 0) to[feature] = x;
          else narrow(x, own_target[feature * target.column]);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    load_rows();
    accumulate<false>();
    // A number that is not finite may belong to a column that a row does not see: 0 times it is NaN.
    const bool fine = (!kScores || finite<kDim>(scores)) && (!kValues || finite<kDimV>(values));
    if (__syncthreads_or(!fine)) accumulate<true>();
    if constexpr (kScores) write<kDim>(scores, static_cast<float>(p.scale), p.scores, p.partial_scores, p.head_dim);
    if constexpr (kValues) write<kDimV>(values, 1.f, p.values, p.partial_values, p.head_dim_v);
  }
};

}  // namespace spattn::portable_backward
