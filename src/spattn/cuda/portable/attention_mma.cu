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
// macros    SPATTN_DTYPE, SPATTN_HEAD_DIM, SPATTN_HEAD_DIM_V (padded), SPATTN_BLOCK_Q, SPATTN_BLOCK_KV, SPATTN_KEYS,
//           SPATTN_ATOMS, SPATTN_ALIGNED (16-byte loads are possible)
#include "portable/mma_attention.cuh"

namespace spattn::portable {

// Up to 32 registers of Q fragments are kept; beyond that Q is read from shared memory again for every tile.
constexpr bool kKeepQuery = kAtoms * kDim <= 128;

using QueryFragments = unsigned[kKeepQuery ? kDim / 16 : 1][kAtoms][4];

__device__ __forceinline__ void load_fragments(unsigned (&a)[kAtoms][4], const Shared& shared, int k16) {
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
  const unsigned base = shared_address(shared.k + chunk_at<kChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * kVector);
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) s[atom][n][0] = s[atom][n][1] = s[atom][n][2] = s[atom][n][3] = 0.f;
  }
#pragma unroll
  for (int k16 = 0; k16 < kDim / 16; ++k16) {
    auto& a = q[kKeepQuery ? k16 : 0];
    if constexpr (!kKeepQuery) load_fragments(a, shared, k16);
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
__device__ __forceinline__ void multiply_weight_value(Output& o, const Scores& p, const Shared& shared) {
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
        narrow(pair[0], pair[1], *reinterpret_cast<Element2*>(&a[atom][i]));
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

struct Products {
  using Query = QueryFragments;

  static __device__ __forceinline__ void load_query(Query& q, const Shared& shared) {
    if constexpr (kKeepQuery) {
#pragma unroll
      for (int k16 = 0; k16 < kDim / 16; ++k16) load_fragments(q[k16], shared, k16);
    }
  }
  static __device__ __forceinline__ void multiply_query_key(Scores& s, const Shared& shared, Query& q) {
    portable::multiply_query_key(s, shared, q);
  }
  static __device__ __forceinline__ void multiply_weight_value(Output& o, const Scores& p, const Shared& shared) {
    portable::multiply_weight_value(o, p, shared);
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

}  // namespace spattn::portable
