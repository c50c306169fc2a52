// out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j] over the keys j that the plan allows to query i; lse[i] alongside.
//
// grid      one block per (work item, batch, head), heads slowest; a flat list in x, so any number of heads fits
// target    sm_80 and later: mma.sync m16n8k16, ldmatrix, cp.async
// dtypes    float16, bfloat16; accumulation, softmax statistics and the workspace are float32
// warps     SPATTN_BLOCK_Q / (16 · SPATTN_ATOMS), each owns 16 · SPATTN_ATOMS query rows for the whole item; all load
// shared    Q + one K + one V tile of 64 keys (65 KiB at 128 queries, head_dim 128; 97 KiB at 64 queries, head_dim 256)
// registers 240 to 255 a thread where each warp has 32 rows, nothing spilled (tests/cuda/test_compile.py checks) but the
//           row sums at head_dim 128 on sm_90
// test      tests/cuda/test_forward.py
// benchmark benchmarks/peers_cuda.py
// source    online softmax: Milakov & Gimelshein, arXiv:1805.02867; the loop's two-barrier overlap of loads and products
//           and P kept in registers: FlashAttention-2, Dao, arXiv:2307.08691
//
// macros    SPATTN_DTYPE, SPATTN_HEAD_DIM, SPATTN_HEAD_DIM_V (padded), SPATTN_BLOCK_Q, SPATTN_BLOCK_KV, SPATTN_ATOMS,
//           SPATTN_ALIGNED (16-byte loads are possible)
#include "exact_row.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace spattn {

constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kBlockQ = SPATTN_BLOCK_Q, kBlockKV = SPATTN_BLOCK_KV;
constexpr int kKeys = 64;  // keys of one step; a wider tile takes several
constexpr int kStepsPerTile = kBlockKV / kKeys;
constexpr int kAtoms = SPATTN_ATOMS, kRowsPerWarp = 16 * kAtoms;
constexpr int kThreads = kBlockQ / kRowsPerWarp * 32;
constexpr int kChunks = kDim / kVector, kChunksV = kDimV / kVector;
constexpr bool kAligned = SPATTN_ALIGNED;
// Up to 32 registers of Q fragments are kept; beyond that Q is read from shared memory again for every tile.
constexpr bool kKeepQuery = kAtoms * kDim <= 128;
static_assert(kBlockQ % kRowsPerWarp == 0 && kBlockKV % kKeys == 0, "tile shape");

struct Shared {
  alignas(128) Element q[kBlockQ * (kDim > kDimV ? kDim : kDimV)];  // at the end the output, on its way to 16-byte stores
  alignas(128) Element k[kKeys * kDim];
  alignas(128) Element v[kKeys * kDimV];
  int key_position[2][kKeys];
  int query_position[kBlockQ];
};

// 64 keys of an entry of a tile list; `view` is -1 after the last.
struct Step {
  int view, tile, mask, sub;

  __device__ bool exists() const { return view >= 0; }
  __device__ void write_positions(int* position, const Params& params) const {
    if (!exists()) return;
    for (int key = threadIdx.x; key < kKeys; key += kThreads) {
      position[key] = position_of(params.views[view], tile, sub * kKeys + key);
    }
  }
};

// The steps of a work item, in order. A step is fetched long before it is used, because its three loads take a while.
struct Steps {
  const Params& params;
  int first_view, entry, end, sub = 0;

  __device__ Step fetch() {
    if (entry >= end) return {-1, 0, -1, 0};
    const Step step = {first_view + params.key_view[entry], params.indices[entry], params.mask[entry], sub};
    if (++sub == kStepsPerTile) {
      sub = 0;
      ++entry;
    }
    return step;
  }
};

using Scores = float[kAtoms][kKeys / 8][4];
using Output = float[kAtoms][kDimV / 8][4];
using QueryFragments = unsigned[kKeepQuery ? kDim / 16 : 1][kAtoms][4];

__device__ __forceinline__ void load_query(unsigned (&a)[kAtoms][4], const Shared& shared, int k16) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * kRowsPerWarp + lane % 16;
  const unsigned base = shared_address(shared.q + chunk_at<kChunks>(row, lane / 16) * kVector);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    load_matrices(a[atom], advance<kChunks>(base, 2 * k16) + atom * 16 * kChunks * 16);
  }
}

// S = Q Kᵀ
__device__ __forceinline__ void multiply_query_key(Scores& s, const Shared& shared, QueryFragments& q) {
  const int lane = threadIdx.x % 32;
  const unsigned base =
      shared_address(shared.k + chunk_at<kChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * kVector);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) s[atom][n][0] = s[atom][n][1] = s[atom][n][2] = s[atom][n][3] = 0.f;
  }
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    auto& a = q[kKeepQuery ? k16 : 0];
    if constexpr (!kKeepQuery) load_query(a, shared, k16);
#pragma unroll
    for (int n16 = 0; n16 < kKeys / 16; ++n16) {
      unsigned b[4];
      load_matrices(b, advance<kChunks>(base, 2 * k16) + n16 * 16 * kChunks * 16);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        multiply_add(s[atom][2 * n16], a[atom], b[0], b[1], Element());
        multiply_add(s[atom][2 * n16 + 1], a[atom], b[2], b[3], Element());
      }
    }
  }
}

// O += P V; the accumulator layout of S is the operand layout of P, so P never leaves its registers.
__device__ __forceinline__ void multiply_probability_value(Output& o, const Scores& p, const Shared& shared) {
  const int lane = threadIdx.x % 32;
  const unsigned base = shared_address(shared.v + chunk_at<kChunksV>(lane % 16, lane / 16) * kVector);
#pragma unroll
  for (int k16 = 0; k16 < kKeys / 16; ++k16) {
    unsigned a[kAtoms][4];
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = p[atom][2 * k16 + i / 2] + 2 * (i % 2);
        narrow(pair[0], pair[1], *reinterpret_cast<Pair*>(&a[atom][i]));
      }
    }
#pragma unroll
    for (int n16 = 0; n16 < kDimV / 16; ++n16) {
      unsigned b[4];
      load_matrices_transposed(b, advance<kChunksV>(base, 2 * n16) + k16 * 16 * kChunksV * 16);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        multiply_add(o[atom][2 * n16], a[atom], b[0], b[1], Element());
        multiply_add(o[atom][2 * n16 + 1], a[atom], b[2], b[3], Element());
      }
    }
  }
}

__device__ __forceinline__ void mask_scores(Scores& s, const Params& params, const Step& step) {
  const int first = threadIdx.x / 32 * kRowsPerWarp + threadIdx.x % 32 / 4;
  const unsigned long long* words = params.masks + static_cast<long long>(step.mask) * kBlockQ * kStepsPerTile + step.sub;
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      apply_mask(s[atom], half, words[(first + atom * 16 + half * 8) * kStepsPerTile]);
    }
  }
}

// P = exp2(S · scale_log2 − row_max); O and row_sum follow a new maximum.
__device__ __forceinline__ void softmax(Scores& s, Output& o, RowState (&state)[kAtoms][2], float scale_log2) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float rescale = update(state[atom][half], s[atom], half, scale_log2);
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n) {
        o[atom][n][2 * half] *= rescale;
        o[atom][n][2 * half + 1] *= rescale;
      }
    }
  }
}

// Writes one row of a thread's accumulators, normalised: to the workspace, or narrowed into the shared tile that
// store_output() copies out. Returns whether every number of the row is finite or the row is empty, for the whole quad.
__device__ __forceinline__ bool finish_row(Output& o, RowState& state, int atom, int half, const Params& params,
                                           Shared& shared, const RowTarget& target, int row) {
  const int quad_lane = threadIdx.x % 4;
  const float row_sum = quad_sum(state.row_sum), inverse = row_sum == 0.f ? 0.f : 1.f / row_sum;
  bool finite = is_finite(row_sum);
#pragma unroll
  for (int n = 0; n < kDimV / 8; ++n) {
    const float x = o[atom][n][2 * half] * inverse, y = o[atom][n][2 * half + 1] * inverse;
    finite = finite && is_finite(x) && is_finite(y);
    const int column = n * 8 + quad_lane * 2;
    if (!target.partial) {
      narrow(x, y, *reinterpret_cast<Pair*>(shared.q + chunk_at<kChunksV>(row, n) * kVector + quad_lane * 2));
    } else if (target.position >= 0) {
      float* out = static_cast<float*>(params.partial) + target.index * params.head_dim_v + column;
      if (column < params.head_dim_v) out[0] = x;
      if (column + 1 < params.head_dim_v) out[1] = y;
    }
  }
  if (quad_lane == 0 && target.position >= 0) {
    const float row_lse = (state.row_max + log2f(row_sum)) * 0.6931471805599453f;
    static_cast<float*>(target.partial ? params.partial_lse : params.lse)[target.index] =
        row_sum == 0.f ? -infinity<float>() : row_lse;
  }
  return (__ballot_sync(~0u, finite) >> (threadIdx.x % 32 / 4 * 4) & 15) == 15;
}

// This warp's rows of the shared output tile, 16 bytes a lane.
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

// Normalises and writes this warp's rows, then repeats those that did not come out finite.
__device__ __forceinline__ void finish(Output& o, RowState (&state)[kAtoms][2], const Params& params, Shared& shared,
                                       const Work& work, int batch_head) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kRowsPerWarp;
  unsigned again[kAtoms][2];
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + atom * 16 + half * 8 + lane / 4, position = shared.query_position[row];
      const RowTarget target = row_target<kBlockQ>(params, work, batch_head, row, position);
      const bool fine = finish_row(o, state[atom][half], atom, half, params, shared, target, row) || position < 0;
      again[atom][half] = __ballot_sync(~0u, !fine);
    }
  }
  __syncwarp();
  if (work.slot < 0) {
    store_output(params, shared, head_of<Element>(params.out, batch_head / params.heads_q, batch_head % params.heads_q));
  }
  __syncwarp();  // an exact row overwrites what other lanes wrote
  for (int number = 0; number < 2 * kAtoms; ++number) {
    for (unsigned rows = again[number / 2][number % 2] & 0x11111111u; rows; rows &= rows - 1) {
      const int row = first + number * 8 + (__ffs(rows) - 1) / 4;
      exact_row<kBlockQ, kBlockKV, kDimV>(params, work, batch_head, row, shared.query_position[row]);
    }
  }
}

}  // namespace spattn

extern "C" {

__constant__ int launch_shape[3] = {spattn::kThreads, sizeof(spattn::Shared), sizeof(spattn::Params)};

__global__ void __launch_bounds__(spattn::kThreads, 1) attention(const __grid_constant__ spattn::Params params) {
  using namespace spattn;
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Job job = find_job(params.items, params.first_block + blockIdx.x);
  const Work& work = params.work[job.number];
  const int batch = job.batch_head / params.heads_q, head = job.batch_head % params.heads_q;
  const Element* q = head_of<const Element>(params.q, batch, head);
  const Element* k = head_of<const Element>(params.k, batch, head / params.heads_per_kv);
  const Element* v = head_of<const Element>(params.v, batch, head / params.heads_per_kv);

  const Component& component = params.components[work.component];
  Steps steps{params, component.key_view, work.begin, work.end};
  Step now = steps.fetch(), next = steps.fetch();
  now.write_positions(shared.key_position[0], params);
  for (int row = threadIdx.x; row < kBlockQ; row += kThreads) {
    shared.query_position[row] = position_of(params.views[component.query_view], work.query_tile, row);
  }
  __syncthreads();
  load_rows<kBlockQ, kChunks, kThreads, kAligned>(shared.q, q, params.q, shared.query_position, 0, params.head_dim);
  if (now.exists()) {
    load_rows<kKeys, kChunks, kThreads, kAligned>(shared.k, k, params.k, shared.key_position[0], 0, params.head_dim);
  }
  copies_wait();
  __syncthreads();
  if (params.query_factor != 1) {
    multiply_tile<kBlockQ * kDim, kThreads>(shared.q, params.query_factor);
    __syncthreads();
  }
  QueryFragments fragments;
  if constexpr (kKeepQuery) {
#pragma unroll
    for (int k16 = 0; k16 < kDim / 16; ++k16) load_query(fragments[k16], shared, k16);
  }

  Output o = {};
  RowState state[kAtoms][2];
  for (int buffer = 0; now.exists(); buffer ^= 1) {
    // K has landed, and everybody is done with V.
    load_rows<kKeys, kChunksV, kThreads, kAligned>(shared.v, v, params.v, shared.key_position[buffer], 0,
                                                   params.head_dim_v);
    next.write_positions(shared.key_position[buffer ^ 1], params);
    Scores s;
    multiply_query_key(s, shared, fragments);
    if (now.mask >= 0) mask_scores(s, params, now);
    copies_wait();
    __syncthreads();
    // V and the next positions have landed, and everybody is done with K.
    if (next.exists()) {
      load_rows<kKeys, kChunks, kThreads, kAligned>(shared.k, k, params.k, shared.key_position[buffer ^ 1], 0,
                                                    params.head_dim);
    }
    now = next;
    next = steps.fetch();
    softmax(s, o, state, static_cast<float>(params.scale_log2));
    multiply_probability_value(o, s, shared);
    copies_wait();
    __syncthreads();
  }
  finish(o, state, params, shared, params.work[job.number], job.batch_head);
}

}  // extern "C"
