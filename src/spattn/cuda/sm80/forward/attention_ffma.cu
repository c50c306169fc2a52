// out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j] over the keys j that the plan allows for query i; lse[i] alongside.
// Fused multiply-adds in float64.
//
// grid      one CTA per SPATTN_ROWS rows of a (work item, batch, head), heads slowest; a flat list in x
// target    sm_80 and later
// dtypes    float64
// warps     8; thread (x, y) of 16 × 16 owns query rows y + 16 i, key columns x + 16 j and one 16-byte chunk of each
//           slice of the output. All warps load
// shared    Q, P, and a ring of two slices (64 keys × 32 features) for K and V: 137 KiB at 64 queries, head_dim 128
// registers 128 per thread with two CTAs per SM; no spills (tests/cuda/test_compile.py checks)
// test      tests/cuda/sm80/test_mma_forward.py
// source    online softmax: Milakov & Gimelshein, arXiv:1805.02867
//
// macros    those of attention_mma.cu without SPATTN_ATOMS; head dimensions are padded to whole slices
#include "sm80/forward/fallback_row.cuh"
#include "sm80/forward/steps.cuh"
#include "sm80/rows.cuh"

namespace spattn::sm80 {

constexpr int kSide = 16, kThreads = kSide * kSide;
constexpr int kChunks = kSide, kSlice = kChunks * kVector;  // chunks per row, and features, of a slice
constexpr int kSlices = kDim / kSlice, kSlicesV = kDimV / kSlice;
constexpr int kOwn = kRows / kSide, kColumns = kKeys / kSide;  // rows and columns of S per thread
// CTAs per SM: two if the accumulators leave enough registers, so that one multiplies while the other waits.
constexpr int kBlocks = kOwn * (kSlicesV * kVector + kColumns) <= 24 ? 2 : 1, kUnroll = kBlocks == 2 ? 1 : 2;
// Pads rows of P so that the two rows that a warp writes at once fall into different halves of the banks.
constexpr int kWeightStride = kKeys + kSide;
static_assert(kDim % kSlice == 0 && kDimV % kSlice == 0 && kRows % kSide == 0, "tile shape");

struct Shared {
  alignas(128) Element q[kSlices][kRows * kSlice];
  alignas(128) Element slice[2][kKeys * kSlice];
  alignas(128) Element p[kRows * kWeightStride];
  int key_position[2][kKeys];
  int query_position[kRows];
};

__device__ __forceinline__ double2 read_chunk(const Element* tile, int row, int chunk) {
  return *reinterpret_cast<const double2*>(tile + chunk_at<kChunks>(row, chunk) * kVector);
}

// Streams the slices of K, then of V: one loads while the previous one is multiplied, with one barrier per slice.
struct Stream {
  const Params& params;
  Shared& shared;
  const Element *k, *v;
  int number = 0;

  __device__ void load(int slice, const int* position) const {
    const bool value = slice >= kSlices;
    load_rows<kKeys, kChunks, kThreads, kAligned>(shared.slice[number & 1], value ? v : k, value ? params.v : params.k,
                                                  position, (value ? slice - kSlices : slice) * kSlice,
                                                  value ? params.head_dim_v : params.head_dim);
  }
  // Waits for the last loaded slice and returns it; the other buffer is then free.
  __device__ const Element* arrive() {
    copies_wait();
    __syncthreads();
    return shared.slice[number++ & 1];
  }
};

template <typename Combine>
__device__ __forceinline__ Sum across_row(Sum value, Combine combine) {
#pragma unroll
  for (int other = kSide / 2; other; other /= 2) value = combine(value, __shfl_xor_sync(~0u, value, other));
  return value;
}

// Attention of one CTA's rows.
struct Block {
  const Params& params;
  Shared& shared;
  const int first_row, x = threadIdx.x % kSide, y = threadIdx.x / kSide;
  Sum o[kOwn][kSlicesV][kVector] = {};
  Softmax<Sum> state[kOwn];

  // S += Q Kᵀ over one slice of features
  __device__ __forceinline__ void multiply_query_key(Sum (&s)[kOwn][kColumns], const Element* q, const Element* k) {
#pragma unroll kUnroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      double2 b[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) b[j] = read_chunk(k, x + kSide * j, chunk);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const double2 a = read_chunk(q, y + kSide * i, chunk);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) s[i][j] = fma(a.y, b[j].y, fma(a.x, b[j].x, s[i][j]));
      }
    }
  }

  // Turns products q · k into the softmax's input: applies the score function, then the mask.
  __device__ __forceinline__ void score_and_mask(Sum (&s)[kOwn][kColumns], const HeadScore<Sum>& score,
                                                 const Step& step, const int* key_position) const {
    if constexpr (kScored) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int query = shared.query_position[y + kSide * i];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) s[i][j] = score(s[i][j], query, key_position[x + kSide * j]);
      }
    }
    if (step.mask < 0) return;
    const unsigned long long* words = step.words(params);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const Mask mask{words[(first_row + y + kSide * i) * kWords] >> x};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (!mask.allows(kSide * j)) s[i][j] = -infinity<Sum>();
      }
    }
  }

  // Writes P = exp2(S · scale_log2 − row_max), after dropout, to shared memory; rescales O and the row sums for a new
  // maximum.
  __device__ __forceinline__ void softmax(Sum (&s)[kOwn][kColumns], const HeadScore<Sum>& score,
                                          const int* key_position) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const auto pairs = [&](auto visit) {
#pragma unroll
        for (int j = 0; j < kColumns; j += 2) visit(s[i][j], s[i][j + 1]);
      };
      const auto largest = [](Sum value) { return across_row(value, [](Sum a, Sum b) { return fmax(a, b); }); };
      const Sum rescale = state[i].update(params.scale_log2, pairs, largest);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const Sum kept = score.kept(shared.query_position[y + kSide * i], key_position[x + kSide * j]);
        shared.p[(y + kSide * i) * kWeightStride + x + kSide * j] = s[i][j] * kept;
      }
#pragma unroll
      for (int slice = 0; slice < kSlicesV; ++slice) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) o[i][slice][c] *= rescale;
      }
    }
  }

  // O += P V for one slice of output features
  __device__ __forceinline__ void multiply_weight_value(int slice, const Element* v) {
#pragma unroll kUnroll
    for (int key = 0; key < kKeys; key += 2) {
      const double2 b0 = read_chunk(v, key, x), b1 = read_chunk(v, key + 1, x);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const double2 a = *reinterpret_cast<const double2*>(shared.p + (y + kSide * i) * kWeightStride + key);
        Sum(&sum)[kVector] = o[i][slice];
        sum[0] = fma(a.y, b1.x, fma(a.x, b0.x, sum[0]));
        sum[1] = fma(a.y, b1.y, fma(a.x, b0.y, sum[1]));
      }
    }
  }

  // Writes a thread's part of row `i`, normalised; returns true if the row is final: finite, with scores in range.
  __device__ __forceinline__ bool finish_row(int i, const Work& work, int batch_head, Element* head) {
    const int row = y + kSide * i, position = shared.query_position[row];
    const RowTarget target = row_target<kBlockQ>(params, work, batch_head, first_row + row, position);
    state[i].row_sum = across_row(state[i].row_sum, [](Sum a, Sum b) { return a + b; });
    Sum lse = state[i].lse();
    const Sum inverse = state[i].inverse() * add_sink(sink_of<Sum>(params, work, batch_head), lse);
    bool finite = state[i].in_range();
    Sum* out = target.partial ? static_cast<Sum*>(params.partial) + target.index * params.head_dim_v
                              : head + position * params.out.row;
#pragma unroll
    for (int slice = 0; slice < kSlicesV; ++slice) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        const int column = slice * kSlice + x * kVector + c;
        const Sum value = o[i][slice][c] * inverse;
        finite = finite && is_finite(value);
        if (position >= 0 && column < params.head_dim_v) out[column] = value;
      }
    }
    if (x == 0 && position >= 0) store_lse(params, target, lse);
    return finite || position < 0;
  }
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads, kBlocks) attention(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Task task = own_task(params);
  const int first_row = own_first_row(params);
  const Work& work = params.work[task.number];
  const Component& component = params.components[work.component];
  const int batch = task.batch_head / params.heads_q, head = task.batch_head % params.heads_q;
  const HeadScore<Sum> score(params.score, batch, head);
  Stream stream{params, shared, head_of<const Element>(params.k, batch, head / params.group),
                head_of<const Element>(params.v, batch, head / params.group)};
  Steps steps{params, component.key_view, work.begin, work.end};
  Step now = steps.fetch(), next = steps.fetch();
  now.write_positions<kThreads>(shared.key_position[0], params);
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    shared.query_position[row] = position_of(params.views[component.query_view], work.query_tile, first_row + row);
  }
  __syncthreads();
  for (int slice = 0; slice < kSlices; ++slice) {
    load_rows<kRows, kChunks, kThreads, kAligned>(shared.q[slice], head_of<const Element>(params.q, batch, head),
                                                  params.q, shared.query_position, slice * kSlice, params.head_dim);
  }
  if (now.exists()) stream.load(0, shared.key_position[0]);
  if (params.sign != 1) {
    copies_wait();
    __syncthreads();
    multiply_tile<kRows * kDim, kThreads>(shared.q[0], params.sign);
  }

  Block block{params, shared, first_row};
  for (int buffer = 0; now.exists(); buffer ^= 1) {
    const int *position = shared.key_position[buffer], *following = shared.key_position[buffer ^ 1];
    Sum s[kOwn][kColumns] = {};
#pragma unroll 1
    for (int slice = 0; slice < kSlices; ++slice) {
      const Element* k = stream.arrive();
      stream.load(slice + 1, position);
      block.multiply_query_key(s, shared.q[slice], k);
    }
    block.score_and_mask(s, score, now, position);
    next.write_positions<kThreads>(shared.key_position[buffer ^ 1], params);
    now = next;
    next = steps.fetch();
    block.softmax(s, score, position);
    __syncwarp();  // the half warp that wrote a row of P reads it
#pragma unroll
    for (int slice = 0; slice < kSlicesV; ++slice) {
      const Element* v = stream.arrive();
      if (slice + 1 < kSlicesV) {
        stream.load(kSlices + slice + 1, position);
      } else if (now.exists()) {
        stream.load(0, following);
      }
      block.multiply_weight_value(slice, v);
    }
    __syncwarp();  // before the next iteration overwrites P
  }
  copies_wait();

  Element* out = head_of<Element>(params.out, batch, head);
  unsigned again[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) again[i] = __ballot_sync(~0u, !block.finish_row(i, work, task.batch_head, out));
  __syncwarp();  // fallback_row() overwrites other lanes' results
#pragma unroll
  for (int number = 0; number < 2 * kOwn; ++number) {
    if (!(again[number / 2] >> (16 * (number % 2)) & 0xffffu)) continue;
    const int row = threadIdx.x / 32 * 2 + number % 2 + number / 2 * kSide;
    fallback_row<kBlockQ, kBlockKV, kDimV>(params, work, task.batch_head, first_row + row, shared.query_position[row]);
  }
}

}  // extern "C"

}  // namespace spattn::sm80
