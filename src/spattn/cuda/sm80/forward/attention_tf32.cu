// out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j] over the keys j that the plan allows for query i; lse[i] alongside.
// For float32: three TF32 products, as accurate as float32 arithmetic, or one rounded TF32 product.
//
// grid      one CTA per SPATTN_ROWS rows of a (work item, batch, head), heads slowest; a flat list in x
// target    sm_80 and later: mma.sync m16n8k8 tf32, cp.async
// dtypes    float32; accumulation, softmax statistics and the workspace are float32
// warps     SPATTN_ROWS / 16, 16 query rows each for the whole item; all load. Each warp splits all of K and V itself:
//           parts split once in shared memory would double the shared-memory reads, which already take half the time
// shared    Q + one K + one V tile of SPATTN_KEYS keys: 129 KiB at 128 queries, head_dim 128, 64 keys
// registers 186 per thread for one product at head_dim 128, 222 for three at 64, no spills; three products from 128 on
//           use 255 and spill 18 to 40 words per iteration (thousands of instructions)
// test      tests/cuda/sm80/test_mma_forward.py, tests/cuda/sm80/test_tf32.py
// benchmark benchmarks/kernels/fp32_cuda.py
// source    three-product split, and frequent accumulation outside the tensor cores, which round towards zero: Ootomo &
//           Yokota, arXiv:2203.03341
//
// macros    SPATTN_TERMS: 3, or 1 for operands rounded to TF32; SPATTN_DTYPE (float32), SPATTN_HEAD_DIM,
//           SPATTN_HEAD_DIM_V (padded to multiples of 32), SPATTN_BLOCK_Q, SPATTN_BLOCK_KV, SPATTN_ROWS,
//           SPATTN_KEYS, SPATTN_ATOMS (1), SPATTN_ALIGNED (16-byte loads are possible)
#include "sm80/forward/mma_attention.cuh"

namespace spattn::sm80 {

constexpr bool kSplit = SPATTN_TERMS == 3;
constexpr int kColumns = 32;  // features per pass: 8 chunks, 4 k-slices of 8 or 4 n-tiles of 8
constexpr int kTiles = kKeys / 8;
constexpr int kHeld = 4;  // key tiles of P split and kept in registers at a time
static_assert(kAtoms == 1 && kDim % kColumns == 0 && kDimV % kColumns == 0, "tile shape");
static_assert(kTiles == kHeld || kTiles == 2 * kHeld, "P is taken in one piece or two");

// A product may permute its K index if both operands agree. Here every fragment is a whole 16-byte chunk:
// - Q Kᵀ: lane t of a quad reads chunks 2 t and 2 t + 1 of a pass. A chunk serves two products: elements 2 e and
//   2 e + 1 are k = t and t + 4 of product e.
// - P V: k = t and t + 4 are keys 2 t and 2 t + 1, as in P's accumulator layout; quad g reads chunk g of a pass, and
//   element j of the chunk is column g of tile j. So column c of tile j is feature 4 c + j of the pass.
// In both cases eight consecutive lanes read eight different bank groups (chunk_at).
struct Operand {
  unsigned high[4], low[4];
};

// Splits x into high + low, exact to 2⁻²³ |x|. The tensor cores ignore the low 13 bits. `high` is rounded to nearest:
// the sign of `low` is then independent, and the omitted product low · low has mean zero. An infinite x gives NaN, and
// fallback_row() recomputes the row.
__device__ __forceinline__ Operand split(float x0, float x1, float x2, float x3) {
  const float x[4] = {x0, x1, x2, x3};
  Operand result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kSplit) {
      result.high[i] = (__float_as_uint(x[i]) + 0x1000u) & 0xffffe000u;
      result.low[i] = __float_as_uint(x[i] - __uint_as_float(result.high[i]));
    } else {
      result.high[i] = __float_as_uint(x[i]);  // landed() has rounded it
    }
  }
  return result;
}

template <int kCount>
__device__ __forceinline__ void add(float (*total)[4], const float (&sum)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[n][i] += sum[n][i];
  }
}

__device__ __forceinline__ Operand rounded(float x0, float x1, float x2, float x3) {
  return {{round_to_tf32(x0), round_to_tf32(x1), round_to_tf32(x2), round_to_tf32(x3)}, {}};
}

// Multiplies m16n8k8 operands (a0 … a3), (b0, b1). Adds high · high to `sum`, high · low and low · high to `rest`.
__device__ __forceinline__ void multiply_add(float (&sum)[4], float (&rest)[4], const Operand& a, const Operand& b0,
                                             const Operand& b1, int i0, int i1) {
  if constexpr (kSplit) {
    multiply_add_tf32(rest, a.low, b0.high[i0], b1.high[i1]);
    multiply_add_tf32(rest, a.high, b0.low[i0], b1.low[i1]);
  }
  multiply_add_tf32(sum, a.high, b0.high[i0], b1.high[i1]);
}

// S = Q Kᵀ
__device__ __forceinline__ void multiply_query_key(Scores& scores, const Shared& shared) {
  const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  auto& s = scores[0];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
  float rest[kTiles][4] = {};
#pragma unroll 2
  for (int pass = 0; pass < kDim / kColumns; ++pass) {
    float sum[kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = ((2 * quad_lane + half) ^ quad) + pass * 8;
      const Element* q = shared.q + (threadIdx.x / 32 * 16 + quad) * kDim;
      const float4 upper = chunk(q, at), lower = chunk(q + 8 * kDim, at);
      const Operand a[2] = {split(upper.x, lower.x, upper.y, lower.y), split(upper.z, lower.z, upper.w, lower.w)};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float4 key = chunk(shared.k + (n * 8 + quad) * kDim, at);
        const Operand b = split(key.x, key.y, key.z, key.w);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          multiply_add(kSplit ? sum[n] : s[n], rest[n], a[e], b, b, 2 * e, 2 * e + 1);
        }
      }
    }
    if constexpr (kSplit) add<kTiles>(s, sum);
  }
  if constexpr (kSplit) add<kTiles>(s, rest);
}

// O += P V
__device__ __forceinline__ void multiply_weight_value(Output& output, const Scores& weights, const Shared& shared) {
  const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
  const auto& p = weights[0];
  auto& o = output[0];
  // Not unrolled: ptxas would hoist so many loads that it spills.
#pragma unroll 1
  for (int first = 0; first < kTiles; first += kHeld) {
    Operand a[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = kTiles > kHeld && first ? p[(k + kHeld) % kTiles][i] : p[k][i];
      a[k] = kSplit ? split(x[0], x[2], x[1], x[3]) : rounded(x[0], x[2], x[1], x[3]);
    }
#pragma unroll
    for (int pass = 0; pass < kDimV / kColumns; ++pass) {
      float sum[4][4] = {}, rest[4][4] = {};
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const Element* v = shared.v + ((first + k) * 8 + 2 * quad_lane) * kDimV;
        const float4 even = chunk(v, (quad ^ 2 * quad_lane) + pass * 8);
        const float4 odd = chunk(v + kDimV, (quad ^ (2 * quad_lane + 1)) + pass * 8);
        const Operand b0 = split(even.x, even.y, even.z, even.w), b1 = split(odd.x, odd.y, odd.z, odd.w);
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_add(kSplit ? sum[j] : o[pass * 4 + j], rest[j], a[k], b0, b1, j, j);
      }
      if constexpr (kSplit) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[pass * 4 + j][i] += sum[j][i] + rest[j][i];
        }
      }
    }
  }
}

struct Products {
  struct Query {};

  static __device__ __forceinline__ void load_query(Query&, const Shared&) {}
  static __device__ __forceinline__ void multiply_query_key(Scores& s, const Shared& shared, const Query&) {
    sm80::multiply_query_key(s, shared);
  }
  static __device__ __forceinline__ void multiply_weight_value(Output& o, const Scores& p, const Shared& shared) {
    sm80::multiply_weight_value(o, p, shared);
  }
  static __device__ __forceinline__ int column(int n, int i) {
    return n / 4 * kColumns + 4 * (threadIdx.x % 4 * 2 + i) + n % 4;
  }
  static __device__ __forceinline__ void narrow2(Element* tile, int row, int n, float x, float y) {
    tile[chunk_at<kChunksV>(row, column(n, 0) / kVector) * kVector + n % 4] = x;
    tile[chunk_at<kChunksV>(row, column(n, 1) / kVector) * kVector + n % 4] = y;
  }
  // Rounds once for all warps.
  template <int kRows, int kRowChunks>
  static __device__ __forceinline__ void landed(Element* tile) {
    if constexpr (!kSplit) round_rows<kRows, kRowChunks, kThreads>(tile);
  }
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads, 1) attention(const __grid_constant__ Params params) {
  attend<Products>(params);
}

}  // extern "C"

}  // namespace spattn::sm80
