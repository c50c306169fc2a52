// out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j] over the keys j that the plan allows for query i; lse[i] alongside.
// Fused multiply-adds in the inputs' own precision: float64, and float32 if attention_tf32.cu exceeds shared memory.
//
// grid      one CTA per (work item, batch, head), heads slowest; a flat list in x, so any number of heads fits
// target    sm_80 and later
// dtypes    float32 (accumulated in float32), float64 (in float64)
// warps     8; thread (x, y) of 16 × 16 owns query rows y + 16 i, key columns x + 16 j and one 16-byte chunk of each
//           slice of the output. All warps load
// shared    Q, a ring of two slices (64 keys × 256 bytes) that K and V stream through, P: 136 KiB at 128 queries,
//           head_dim 128, float32
// registers 238 per thread at 128 queries, head_dim 128, float32; 128 with two CTAs per SM; no spills
//           (tests/cuda/test_compile.py checks)
// test      tests/cuda/sm80/test_mma_forward.py
// benchmark benchmarks/kernels/fp32_cuda.py
// source    online softmax: Milakov & Gimelshein, arXiv:1805.02867
//
// macros    SPATTN_DTYPE, SPATTN_HEAD_DIM, SPATTN_HEAD_DIM_V (padded to whole slices), SPATTN_BLOCK_Q, SPATTN_BLOCK_KV,
//           SPATTN_ALIGNED (16-byte loads are possible)
#include "sm80/forward/fallback_row.cuh"
#include "sm80/forward/params.cuh"
#include "sm80/forward/ptx.cuh"
#include "sm80/forward/rows.cuh"

namespace spattn::sm80 {

constexpr int kSide = 16, kThreads = kSide * kSide;
constexpr int kSliceChunks = kSide, kSlice = kSliceChunks * kVector;  // columns per slice
constexpr int kDim = SPATTN_HEAD_DIM, kDimV = SPATTN_HEAD_DIM_V;
constexpr int kSlices = kDim / kSlice, kSlicesV = kDimV / kSlice;
constexpr int kBlockQ = SPATTN_BLOCK_Q, kBlockKV = SPATTN_BLOCK_KV;
constexpr int kKeys = 64, kStepsPerTile = kBlockKV / kKeys;
constexpr int kRows = kBlockQ / kSide, kColumns = kKeys / kSide;  // of S, per thread
constexpr bool kAligned = SPATTN_ALIGNED;
// CTAs per SM: two if the accumulators leave room, so that one's products hide the other's barriers and softmax.
constexpr int kAccumulatorWords = kRows * (kSlicesV * kVector + kColumns) * sizeof(Sum) / 4;
constexpr int kBlocks = kAccumulatorWords <= 48 ? 2 : 1, kUnroll = kBlocks == 2 ? 1 : 2;
// Pads rows of P so that two rows written at once by a warp fall into different halves of the banks.
constexpr int kWeightStride = kKeys + kSide;
static_assert(kDim % kSlice == 0 && kDimV % kSlice == 0 && kBlockQ % kSide == 0 && kBlockKV % kKeys == 0, "tile shape");

struct Shared {
  alignas(128) Element q[kSlices][kBlockQ * kSlice];
  alignas(128) Element slice[2][kKeys * kSlice];
  alignas(128) Element p[kBlockQ * kWeightStride];
  int key_position[2][kKeys];
  int query_position[kBlockQ];
};

union Chunk {
  uint4 bits;
  Element at[kVector];
};

__device__ __forceinline__ Chunk read_chunk(const Element* tile, int row, int chunk) {
  Chunk result;
  result.bits = *reinterpret_cast<const uint4*>(tile + chunk_at<kSliceChunks>(row, chunk) * kVector);
  return result;
}

// The stream of slices: all K slices, then all V slices of each iteration of 64 keys. A slice loads while the previous
// one is multiplied; one barrier per slice.
struct Stream {
  const Params& params;
  const Element *k, *v;
  int first_view, entry, end, sub = 0, number = 0;

  __device__ bool more() const { return entry < end; }
  __device__ int mask() const { return params.mask[entry]; }
  __device__ void next_step() {
    if (++sub == kStepsPerTile) {
      sub = 0;
      ++entry;
    }
  }
  // Positions of the current iteration's keys.
  __device__ void write_positions(int* position) const {
    if (threadIdx.x < kKeys && more()) {
      const View& view = params.views[first_view + params.key_view[entry]];
      position[threadIdx.x] = position_of(view, params.indices[entry], sub * kKeys + threadIdx.x);
    }
  }
  __device__ void load(Shared& shared, const int* position, bool is_value, int slice) const {
    load_rows<kKeys, kSliceChunks, kThreads, kAligned>(shared.slice[number & 1], is_value ? v : k,
                                                       is_value ? params.v : params.k, position, slice * kSlice,
                                                       is_value ? params.head_dim_v : params.head_dim);
  }
  // Waits for the last slice loaded and returns it; the other buffer is free afterwards.
  __device__ const Element* arrive(Shared& shared) {
    copies_wait();
    __syncthreads();
    return shared.slice[number++ & 1];
  }
};

using Scores = Sum[kRows][kColumns];
using Output = Sum[kRows][kSlicesV][kVector];

// S += Q Kᵀ over one slice of columns
__device__ __forceinline__ void multiply_query_key(Scores& s, const Element* q, const Element* k, int x, int y) {
#pragma unroll kUnroll
  for (int chunk = 0; chunk < kSliceChunks; ++chunk) {
    Chunk b[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) b[j] = read_chunk(k, x + kSide * j, chunk);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Chunk a = read_chunk(q, y + kSide * i, chunk);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int n = 0; n < kVector; ++n) s[i][j] = fma(widen(a.at[n]), widen(b[j].at[n]), s[i][j]);
      }
    }
  }
}

// O += P V for one slice of output columns
__device__ __forceinline__ void multiply_weight_value(Output& o, int slice, const Element* p, const Element* v, int x,
                                                      int y) {
#pragma unroll kUnroll
  for (int key = 0; key < kKeys; key += kVector) {
    Chunk b[kVector];
#pragma unroll
    for (int n = 0; n < kVector; ++n) b[n] = read_chunk(v, key + n, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Chunk a;
      a.bits = *reinterpret_cast<const uint4*>(p + (y + kSide * i) * kWeightStride + key);
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) o[i][slice][c] = fma(widen(a.at[n]), widen(b[n].at[c]), o[i][slice][c]);
      }
    }
  }
}

template <typename Combine>
__device__ __forceinline__ Sum across_row(Sum value, Combine combine) {
#pragma unroll
  for (int other = kSide / 2; other; other /= 2) value = combine(value, __shfl_xor_sync(~0u, value, other));
  return value;
}

// Score modification: from dot products of q and k to the softmax's input. The sign of the scale is already in Q; its
// magnitude is folded into the exponent.
__device__ __forceinline__ void logits_policy(Scores& s, const Params& params, int mask, int sub, int x, int y) {
  if (mask < 0) return;
  const unsigned long long* words = params.masks + static_cast<long long>(mask) * kBlockQ * kStepsPerTile + sub;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned long long bits = words[(y + kSide * i) * kStepsPerTile] >> x;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (!(bits >> (kSide * j) & 1)) s[i][j] = -infinity<Sum>();
    }
  }
}

// Softmax numerator: writes the weights exp2(S · scale_log2 − reference) of a row and returns their sum.
__device__ __forceinline__ Sum weights_policy(const Sum (&s)[kColumns], Element* row, Sum scale_log2, Sum reference,
                                              int x) {
  Sum sum = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const Sum weight = power_of_two(fma(s[j], scale_log2, -reference));
    sum += weight;
    narrow(weight, row[x + kSide * j]);
  }
  return sum;
}

// P = exp2(S · scale_log2 − row_max) into shared memory; rescales O and row_sum for a new maximum. row_max is scaled
// and rounded once, so that its rounding cancels. A row without keys keeps a maximum of −inf but subtracts 0.
__device__ __forceinline__ void softmax(const Scores& s, Output& o, Sum (&row_max)[kRows], Sum (&row_sum)[kRows],
                                        Element* p, Sum scale_log2, int x, int y) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Sum next = -infinity<Sum>();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) next = fmax(next, s[i][j]);
    next = across_row(next, [](Sum a, Sum b) { return fmax(a, b); });
    next = fmax(row_max[i], next * scale_log2);
    const Sum reference = next == -infinity<Sum>() ? Sum(0) : next;
    const Sum rescale = power_of_two(row_max[i] - reference);
    const Sum sum = weights_policy(s[i], p + (y + kSide * i) * kWeightStride, scale_log2, reference, x);
    row_max[i] = next;
    row_sum[i] = row_sum[i] * rescale + sum;
#pragma unroll
    for (int slice = 0; slice < kSlicesV; ++slice) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) o[i][slice][c] *= rescale;
    }
  }
}

// Writes a thread's part of a row, normalised; returns whether it is finite, with scores in range.
__device__ __forceinline__ bool finish_row(const Sum (&o)[kSlicesV][kVector], Sum row_max, Sum row_sum,
                                           const Params& params, const RowTarget& target, Element* head, int x) {
  const Sum inverse = row_sum == 0 ? Sum(0) : 1 / row_sum;
  bool finite = is_finite(row_sum) && within_reach(row_max);
#pragma unroll
  for (int slice = 0; slice < kSlicesV; ++slice) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const int column = slice * kSlice + x * kVector + c;
      const Sum value = o[slice][c] * inverse;
      finite = finite && is_finite(value);
      if (target.position < 0 || column >= params.head_dim_v) continue;
      if (target.partial) {
        static_cast<Sum*>(params.partial)[target.index * params.head_dim_v + column] = value;
      } else {
        narrow(value, head[target.position * params.out.row + column]);
      }
    }
  }
  if (x == 0 && target.position >= 0) {
    const Sum row_lse = (row_max + logarithm_of_two(row_sum)) * Sum(0.693147180559945309417);
    store_lse(params, target, row_sum == 0 ? -infinity<Sum>() : row_lse);
  }
  return finite || target.position < 0;
}

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads, kBlocks) attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  const Task task = find_task(params.items, params.first_block + blockIdx.x);
  const Work& work = params.work[task.number];
  const Component& component = params.components[work.component];
  const int batch = task.batch_head / params.heads_q, head = task.batch_head % params.heads_q;
  const Element* q = head_of<const Element>(params.q, batch, head);
  Stream stream{params,
                head_of<const Element>(params.k, batch, head / params.group),
                head_of<const Element>(params.v, batch, head / params.group),
                component.key_view,
                work.begin,
                work.end};

  stream.write_positions(shared.key_position[0]);
  for (int row = threadIdx.x; row < kBlockQ; row += kThreads) {
    shared.query_position[row] = position_of(params.views[component.query_view], work.query_tile, row);
  }
  __syncthreads();
  for (int slice = 0; slice < kSlices; ++slice) {
    load_rows<kBlockQ, kSliceChunks, kThreads, kAligned>(shared.q[slice], q, params.q, shared.query_position,
                                                         slice * kSlice, params.head_dim);
  }
  if (stream.more()) stream.load(shared, shared.key_position[0], false, 0);
  if (params.sign != 1) {
    copies_wait();
    __syncthreads();
    multiply_tile<kBlockQ * kDim, kThreads>(shared.q[0], params.sign);
  }

  Output o = {};
  Sum row_max[kRows], row_sum[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    row_max[i] = -infinity<Sum>();
    row_sum[i] = 0;
  }
  for (int buffer = 0; stream.more(); buffer ^= 1) {
    const int* position = shared.key_position[buffer];
    const int mask = stream.mask(), sub = stream.sub;
    Scores s = {};
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const Element* k = stream.arrive(shared);
      const bool last = slice + 1 == kSlices;
      stream.load(shared, position, last, last ? 0 : slice + 1);
      multiply_query_key(s, shared.q[slice], k, x, y);
    }
    logits_policy(s, params, mask, sub, x, y);
    stream.next_step();
    stream.write_positions(shared.key_position[buffer ^ 1]);
    softmax(s, o, row_max, row_sum, shared.p, static_cast<Sum>(params.scale_log2), x, y);
    __syncwarp();  // the half warp that wrote a row of P reads it
#pragma unroll
    for (int slice = 0; slice < kSlicesV; ++slice) {
      const Element* v = stream.arrive(shared);
      if (slice + 1 < kSlicesV) {
        stream.load(shared, position, true, slice + 1);
      } else if (stream.more()) {
        stream.load(shared, shared.key_position[buffer ^ 1], false, 0);
      }
      multiply_weight_value(o, slice, shared.p, v, x, y);
    }
    __syncwarp();  // before the next iteration overwrites P
  }
  copies_wait();

  Element* out = head_of<Element>(params.out, batch, head);
  unsigned again[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = y + kSide * i;
    const RowTarget target = row_target<kBlockQ>(params, work, task.batch_head, row, shared.query_position[row]);
    const Sum total = across_row(row_sum[i], [](Sum a, Sum b) { return a + b; });
    again[i] = __ballot_sync(~0u, !finish_row(o[i], row_max[i], total, params, target, out, x));
  }
  __syncwarp();  // fallback_row() overwrites other lanes' results
  const int first = threadIdx.x / 32 * 2;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    for (int half = 0; half < 2; ++half) {
      if (!(again[i] >> (16 * half) & 0xffffu)) continue;
      const int row = first + half + kSide * i;
      fallback_row<kBlockQ, kBlockKV, kDimV>(params, work, task.batch_head, row, shared.query_position[row]);
    }
  }
}

}  // extern "C"

}  // namespace spattn::sm80
