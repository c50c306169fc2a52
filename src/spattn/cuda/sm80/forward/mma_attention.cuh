// Main loop of the tensor-core kernels: pipelined loads, masks, online softmax and epilogue. A kernel supplies its
// products:
//
//   struct Products {
//     struct Query;                                   operand fragments of Q kept in registers, if any
//     load_query(Query&, const Shared&)
//     multiply_query_key(Scores&, const Shared&, Query&)                   S = Q Kᵀ
//     multiply_weight_value(Output&, const Scores&, const Shared&)    O += P V
//     column(n, i)                                    output feature of accumulator i < 2 of o[atom][n]
//     narrow2(Element* tile, row, n, x, y)            writes both accumulators to the shared output tile
//     landed<rows, chunks>(Element* tile)             post-processes the chunks that a thread has loaded
//   };
//
// S and O use mma.m16n8's accumulator layout (scores.cuh). The output feature is column(n, i), not the layout's column.
// source: online softmax: Milakov & Gimelshein, arXiv:1805.02867; two-barrier overlap of loads and products, and P in
// registers: FlashAttention-2, Dao, arXiv:2307.08691
#pragma once
#include "sm80/forward/fallback_row.cuh"
#include "sm80/forward/steps.cuh"
#include "sm80/rows.cuh"

namespace spattn::sm80 {

constexpr int kAtoms = SPATTN_ATOMS, kRowsPerWarp = 16 * kAtoms, kThreads = kRows / kRowsPerWarp * 32;
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
static_assert(kRows % kRowsPerWarp == 0, "tile shape");

struct Shared {
  alignas(128) Element q[kRows * (kDim > kDimV ? kDim : kDimV)];  // also stages the output for vectorized stores
  alignas(128) Element k[kKeys * kDim];
  alignas(128) Element v[kKeys * kDimV];
  int key_position[2][kKeys];
  int query_position[kRows];
};

using Scores = float[kAtoms][kKeys / 8][4];
using Output = float[kAtoms][kDimV / 8][4];

// Calls visit(x, query, key) for each pair of this thread: its score or weight x, and the rows of q and k.
template <typename Visit>
__device__ __forceinline__ void visit_pairs(Scores& s, const Shared& shared, const int* key_position, Visit visit) {
  const int first = threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
#pragma unroll
  for (int number = 0; number < 2 * kAtoms; ++number) {
    const int query = shared.query_position[first + number * 8];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        visit(s[number / 2][n][number % 2 * 2 + i], query, key_position[n * 8 + threadIdx.x % 4 * 2 + i]);
      }
    }
  }
}

// Turns products q · k into the softmax's input: applies the score function, then the mask.
__device__ __forceinline__ void score_and_mask(Scores& s, const HeadScore<float>& score, const Params& params,
                                               const Shared& shared, const Step& step, const int* key_position,
                                               int first_row) {
  const int first = threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
  if constexpr (kScored) {
    visit_pairs(s, shared, key_position, [&](float& x, int query, int key) { x = score(x, query, key); });
  }
  if (step.mask < 0) return;
  const unsigned long long* words = step.words(params);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned long long bits = words[(first_row + first + atom * 16 + half * 8) * kWords];
      Mask{bits >> step.first_bit()}.apply(s[atom], half, -infinity<float>());
    }
  }
}

// Computes P = exp2(S · scale_log2 − row_max); rescales O and the row sums for a new maximum.
__device__ __forceinline__ void softmax(Scores& s, Output& o, Softmax<float> (&state)[kAtoms][2], float scale_log2) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pairs = [&](auto visit) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) visit(s[atom][n][2 * half], s[atom][n][2 * half + 1]);
      };
      const float rescale = state[atom][half].update(scale_log2, pairs, quad_max);
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        o[atom][n][2 * half] *= rescale;
        o[atom][n][2 * half + 1] *= rescale;
      }
    }
  }
}

// Normalises one row of a thread's accumulators and writes it to the workspace, or narrowed to the shared tile of
// store_output(). Returns true on the whole quad if the row is final: finite, with scores in range.
template <typename Products>
__device__ __forceinline__ bool finish_row(const Output& o, Softmax<float> state, int atom, int half,
                                           const Params& params, Shared& shared, const RowTarget& target, int row,
                                           float sink) {
  state.row_sum = quad_sum(state.row_sum);
  float lse = state.lse();
  const float inverse = state.inverse() * add_sink(sink, lse);
  bool finite = state.in_range();
#pragma unroll
  for (int n = 0; n < kDimV / 8; ++n) {
    const float x = o[atom][n][2 * half] * inverse, y = o[atom][n][2 * half + 1] * inverse;
    finite = finite && is_finite(x) && is_finite(y);
    if (!target.partial) {
      Products::narrow2(shared.q, row, n, x, y);
    } else if (target.position >= 0) {
      float* out = static_cast<float*>(params.partial) + target.index * params.head_dim_v;
      const int columns[2] = {Products::column(n, 0), Products::column(n, 1)};
      if (columns[0] < params.head_dim_v) out[columns[0]] = x;
      if (columns[1] < params.head_dim_v) out[columns[1]] = y;
    }
  }
  if (threadIdx.x % 4 == 0 && target.position >= 0) store_lse(params, target, lse);
  return (__ballot_sync(~0u, finite) >> (threadIdx.x % 32 / 4 * 4) & 15) == 15;
}

// Copies this warp's rows of the shared output tile to global memory, 16 bytes per lane.
__device__ __forceinline__ void store_output(const Params& params, const Shared& shared, Element* out) {
  const int first = threadIdx.x / 32 * kRowsPerWarp;
  for (int i = threadIdx.x % 32; i < kRowsPerWarp * kChunksV; i += 32) {
    const int row = first + i / kChunksV, chunk = i % kChunksV, position = shared.query_position[row];
    if (position < 0 || chunk * kVector >= params.head_dim_v) continue;
    const Element* source = shared.q + chunk_at<kChunksV>(row, chunk) * kVector;
    Element* destination = out + position * params.out.row + chunk * kVector;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int j = 0; j < kVector && chunk * kVector + j < params.head_dim_v; ++j) destination[j] = source[j];
    }
  }
}

// Normalises and writes this warp's rows, then recomputes rows that are not final.
template <typename Products>
__device__ __forceinline__ void finish(const Output& o, const Softmax<float> (&state)[kAtoms][2], const Params& params,
                                       Shared& shared, const Work& work, int batch_head, int first_row) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRowsPerWarp;
  const float sink = sink_of<float>(params, work, batch_head);
  unsigned again[kAtoms][2];
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + atom * 16 + half * 8 + lane / 4, position = shared.query_position[row];
      const RowTarget target = row_target<kBlockQ>(params, work, batch_head, first_row + row, position);
      const bool fine =
          finish_row<Products>(o, state[atom][half], atom, half, params, shared, target, row, sink) || position < 0;
      again[atom][half] = __ballot_sync(~0u, !fine);
    }
  }
  __syncwarp();
  if (work.slot < 0) {
    const int batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
    store_output(params, shared, head_of<Element>(params.out, batch, head));
  }
  __syncwarp();  // fallback_row() overwrites other lanes' results
  for (int number = 0; number < 2 * kAtoms; ++number) {
    for (unsigned rows = again[number / 2][number % 2] & 0x11111111u; rows; rows &= rows - 1) {
      const int row = first + number * 8 + (__ffs(rows) - 1) / 4;
      fallback_row<kBlockQ, kBlockKV, kDimV>(params, work, batch_head, first_row + row, shared.query_position[row]);
    }
  }
}

template <typename Products>
__device__ __forceinline__ void attend(const Params& params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Task task = own_task(params);
  const int first_row = own_first_row(params);
  const Work& work = params.work[task.number];
  const int batch = task.batch_head / params.heads_q, head = task.batch_head % params.heads_q;
  const Element* q = head_of<const Element>(params.q, batch, head);
  const Element* k = head_of<const Element>(params.k, batch, head / params.group);
  const Element* v = head_of<const Element>(params.v, batch, head / params.group);

  const HeadScore<float> score(params.score, batch, head);
  const Component& component = params.components[work.component];
  Steps steps{params, component.key_view, work.begin, work.end};
  Step now = steps.fetch(), next = steps.fetch();
  now.write_positions<kThreads>(shared.key_position[0], params);
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    shared.query_position[row] = position_of(params.views[component.query_view], work.query_tile, first_row + row);
  }
  __syncthreads();
  load_rows<kRows, kChunks, kThreads, kAligned>(shared.q, q, params.q, shared.query_position, 0, params.head_dim);
  if (now.exists()) {
    load_rows<kKeys, kChunks, kThreads, kAligned>(shared.k, k, params.k, shared.key_position[0], 0, params.head_dim);
  }
  copies_wait();
  Products::template landed<kRows, kChunks>(shared.q);
  if (now.exists()) Products::template landed<kKeys, kChunks>(shared.k);
  __syncthreads();
  if (params.sign != 1) {
    multiply_tile<kRows * kDim, kThreads>(shared.q, params.sign);
    __syncthreads();
  }
  typename Products::Query query;
  Products::load_query(query, shared);

  Output o = {};
  Softmax<float> state[kAtoms][2];
  for (int buffer = 0; now.exists(); buffer ^= 1) {
    // K has landed; no thread reads V any more.
    load_rows<kKeys, kChunksV, kThreads, kAligned>(shared.v, v, params.v, shared.key_position[buffer], 0,
                                                   params.head_dim_v);
    next.write_positions<kThreads>(shared.key_position[buffer ^ 1], params);
    Scores s;
    Products::multiply_query_key(s, shared, query);
    score_and_mask(s, score, params, shared, now, shared.key_position[buffer], first_row);
    copies_wait();
    Products::template landed<kKeys, kChunksV>(shared.v);
    __syncthreads();
    // V and the next positions have landed; no thread reads K any more.
    if (next.exists()) {
      load_rows<kKeys, kChunks, kThreads, kAligned>(shared.k, k, params.k, shared.key_position[buffer ^ 1], 0,
                                                    params.head_dim);
    }
    now = next;
    next = steps.fetch();
    softmax(s, o, state, static_cast<float>(params.scale_log2));
    if constexpr (Score::kDrops) {
      visit_pairs(s, shared, shared.key_position[buffer],
                  [&](float& weight, int query, int key) { weight *= score.kept(query, key); });
    }
    Products::multiply_weight_value(o, s, shared);
    copies_wait();
    if (now.exists()) Products::template landed<kKeys, kChunks>(shared.k);
    __syncthreads();
  }
  finish<Products>(o, state, params, shared, params.work[task.number], task.batch_head, first_row);
}

}  // namespace spattn::sm80
