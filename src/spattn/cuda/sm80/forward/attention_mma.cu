// out[i] = Σ_j softmax_j(scale · q[i]·k[j]) v[j] over the keys j that the plan allows for query i; lse[i] alongside.
//
// grid      one CTA per SPATTN_ROWS rows of a (work item, batch, head), heads slowest; a flat list in x
// target    sm_80 and later: mma.sync m16n8k16, ldmatrix, cp.async
// dtypes    float16, bfloat16; accumulation, softmax statistics and the workspace are float32
// warps     SPATTN_ROWS / (16 · SPATTN_ATOMS), 16 · SPATTN_ATOMS query rows each for the whole item; all load
// shared    Q + one K + one V tile of 64 keys (65 KiB at 128 queries, head_dim 128; 97 KiB at 64 queries, head_dim 256)
// registers 240 to 255 per thread at 32 rows per warp; no spills (tests/cuda/test_compile.py checks) except of the row
//           sums at head_dim 128 on sm_90
// test      tests/cuda/sm80/test_mma_forward.py
// benchmark benchmarks/peers/peers_cuda.py
// source    online softmax: Milakov & Gimelshein, arXiv:1805.02867; two-barrier overlap of loads and products, and P in
//           registers: FlashAttention-2, Dao, arXiv:2307.08691
//
// macros    SPATTN_DTYPE, SPATTN_HEAD_DIM, SPATTN_HEAD_DIM_V (padded), SPATTN_BLOCK_Q, SPATTN_BLOCK_KV, SPATTN_ROWS,
//           SPATTN_KEYS, SPATTN_ATOMS, SPATTN_ALIGNED (16-byte loads are possible)
#include "sm80/forward/mma_attention.cuh"
#include "sm80/mma_products.cuh"

namespace spattn::sm80 {

// Keeps the fragments of Q in 32 registers if they fit; otherwise reloads them from shared memory for every tile.
constexpr bool kKeepQuery = kAtoms * kDim <= 128;

using QueryFragments = unsigned[kKeepQuery ? kDim / 16 : 1][kAtoms][4];

// S = Q Kᵀ
__device__ __forceinline__ void multiply_query_key(Scores& s, const Shared& shared, QueryFragments& q) {
  const unsigned columns = columns_address<kChunks>(shared.k);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) s[atom][n][0] = s[atom][n][1] = s[atom][n][2] = s[atom][n][3] = 0.f;
  }
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    auto& a = q[kKeepQuery ? k16 : 0];
    if constexpr (!kKeepQuery) load_fragments<kAtoms, kChunks>(a, shared.q, k16);
    multiply_transposed<kAtoms, kKeys / 8, kChunks>(s, a, columns, k16);
  }
}

struct Products {
  using Query = QueryFragments;

  static __device__ __forceinline__ void load_query(Query& q, const Shared& shared) {
    if constexpr (kKeepQuery) {
#pragma unroll
      for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragments<kAtoms, kChunks>(q[k16], shared.q, k16);
    }
  }
  static __device__ __forceinline__ void multiply_query_key(Scores& s, const Shared& shared, Query& q) {
    sm80::multiply_query_key(s, shared, q);
  }
  static __device__ __forceinline__ void multiply_weight_value(Output& o, const Scores& p, const Shared& shared) {
    accumulate(o, p, shared.v);
  }
  static __device__ __forceinline__ int column(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i; }
  static __device__ __forceinline__ void narrow2(Element* tile, int row, int n, float x, float y) {
    Element* pair = tile + chunk_at<kChunksV>(row, n) * kVector + threadIdx.x % 4 * 2;
    narrow(x, y, *reinterpret_cast<Element2*>(pair));
  }
  template <int kRows, int kRowChunks>
  static __device__ __forceinline__ void landed(Element*) {}
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads, 1) attention(const __grid_constant__ Params params) {
  attend<Products>(params);
}

}  // extern "C"

}  // namespace spattn::sm80
