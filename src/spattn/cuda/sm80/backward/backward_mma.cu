// Formula    dV = P' dO, dK = scale dS' Q (dK/dV kernel: rows are keys), or dQ = scale dS K (dQ kernel: rows are
//            queries), with P = exp(scale Q K' - lse) on the plan's pairs and dS = P o (dO V' - delta).
// Grid       one CTA per head and SPATTN_ROWS rows of a sub-tile of a work item.
// Target     compute capability 8.0 and later: mma.sync m16n8k16, ldmatrix, cp.async.
// Types      float16, bfloat16; accumulation, statistics and workspace in float32.
// Warps      SPATTN_ROWS / (16 SPATTN_ATOMS), 16 SPATTN_ATOMS rows each for the whole item; all load.
// Shared     rows of two operands, and SPATTN_STAGES stages of SPATTN_COLUMNS columns of the two others: 98 KiB at
//            head_dim 128 with two stages of 64, 66 KiB with one; 49 KiB at 64 in dK/dV with two stages of 32.
// Registers  230 to 255 per thread; no spills on sm_80, a few words outside the products on sm_90
//            (tests/cuda/test_compile.py).
// Test       tests/cuda/sm80/test_mma_backward.py
// Source     Dao et al., FlashAttention (arXiv:2205.14135), appendix B; sub-tiles: schedule/subtiles.py.
//
// Macros     SPATTN_DTYPE, SPATTN_BY_KEYS, SPATTN_SCORES and SPATTN_VALUES (the results), SPATTN_HEAD_DIM,
//            SPATTN_HEAD_DIM_V (padded), SPATTN_ROWS, SPATTN_ATOMS, SPATTN_COLUMNS, SPATTN_STAGES, SPATTN_ALIGNED
//            (16-byte loads)
#include "sm80/mma_products.cuh"
#include "sm80/backward/mma_backward.cuh"

namespace spattn::sm80_backward {

struct Products {
  static constexpr bool kRounds = false;

  template <int kFeatures>
  static __device__ __forceinline__ void multiply(Scores& s, const Element* rows, const Element* columns) {
    constexpr int kRowChunks = kFeatures / kVector;
    const unsigned base = sm80::columns_address<kRowChunks>(columns);
#pragma unroll
    for (int k16 = 0; k16 < kFeatures / 16; ++k16) {
      unsigned a[kAtoms][4];
      sm80::load_fragments<kAtoms, kRowChunks>(a, rows, k16);
      sm80::multiply_transposed<kAtoms, kColumns / 8, kRowChunks>(s, a, base, k16);
    }
  }

  template <int kFeatures>
  static __device__ __forceinline__ void add(Sums<kFeatures>& sums, const Scores& weights, const Element* columns) {
    sm80::accumulate(sums, weights, columns);
  }

  static __device__ __forceinline__ int column(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i; }
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ Params params) {
  if (is_skipped(params)) return;
  extern __shared__ __align__(128) unsigned char memory[];
  Block<Products> block{params, *reinterpret_cast<Shared*>(memory)};
  block.run();
}

}  // extern "C"

}  // namespace spattn::sm80_backward
