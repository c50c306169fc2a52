// Formula    dV = P' dO, dK = scale dS' Q (dK/dV kernel: rows are keys), or dQ = scale dS K (dQ kernel: rows are
//            queries), with P = exp(scale Q K' - lse) on the plan's pairs and dS = P o (dO V' - delta); operands are
//            rounded to TF32.
// Grid       one CTA per head and SPATTN_ROWS rows of a sub-tile of a work item.
// Target     compute capability 8.0 and later: mma.sync m16n8k8 tf32, cp.async.
// Types      float32; accumulation, statistics and workspace in float32.
// Warps      SPATTN_ROWS / 16, 16 rows each for the whole item; all load.
// Shared     rows of two operands, and SPATTN_STAGES stages of SPATTN_COLUMNS columns of the two others: 98 KiB at
//            head_dim 128 with one stage of 32, 66 KiB at 64 with one of 64.
// Registers  179 to 255 per thread; no spills except a few words in dK/dV at head_dim 128 (tests/cuda/test_compile.py).
// Test       tests/cuda/sm80/test_mma_backward.py
// Source     Dao et al., FlashAttention (arXiv:2205.14135), appendix B; sub-tiles: schedule/subtiles.py.
//
// Macros     those of backward_mma.cu; SPATTN_ATOMS is 1.
#include "sm80/backward/mma_backward.cuh"

namespace spattn::sm80_backward {

static_assert(kAtoms == 1 && kDim % 32 == 0 && kDimV % 32 == 0, "tile shape");

// A product may permute its K index if both operands agree. As in sm80/forward/attention_tf32.cu, every fragment is a
// whole 16-byte chunk. For R C', lane t of a quad reads chunks 2 t and 2 t + 1 of 32 features of rows and columns. For
// P C, k = t and t + 4 are columns 2 t and 2 t + 1, as in P's accumulator layout; quad g reads chunk g of 32 features,
// and element j of the chunk is column g of tile j.
struct Products {
  static constexpr bool kRounds = true;

  template <int kFeatures>
  static __device__ __forceinline__ void multiply(Scores& scores, const Element* rows, const Element* columns) {
    const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
    auto& s = scores[0];
#pragma unroll 4
    for (int number = 0; number < kFeatures / 16; ++number) {
      const int at = ((2 * quad_lane + number % 2) ^ quad) + number / 2 * 8;
      const Element* row = rows + (threadIdx.x / 32 * 16 + quad) * kFeatures;
      const float4 upper = sm80::chunk(row, at), lower = sm80::chunk(row + 8 * kFeatures, at);
      const unsigned a[2][4] = {{bits(upper.x), bits(lower.x), bits(upper.y), bits(lower.y)},
                                {bits(upper.z), bits(lower.z), bits(upper.w), bits(lower.w)}};
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float4 b = sm80::chunk(columns + (n * 8 + quad) * kFeatures, at);
        sm80::multiply_add_tf32(s[n], a[0], bits(b.x), bits(b.y));
        sm80::multiply_add_tf32(s[n], a[1], bits(b.z), bits(b.w));
      }
    }
  }

  template <int kFeatures>
  static __device__ __forceinline__ void add(Sums<kFeatures>& sums, const Scores& weights, const Element* columns) {
    const int lane = threadIdx.x % 32, quad = lane / 4, quad_lane = lane % 4;
#pragma unroll
    for (int k = 0; k < kColumns / 8; ++k) {
      const float (&w)[4] = weights[0][k];
      const unsigned a[4] = {sm80::round_to_tf32(w[0]), sm80::round_to_tf32(w[2]), sm80::round_to_tf32(w[1]),
                             sm80::round_to_tf32(w[3])};
      const Element* column = columns + (k * 8 + 2 * quad_lane) * kFeatures;
#pragma unroll
      for (int pass = 0; pass < kFeatures / 32; ++pass) {
        const float4 even = sm80::chunk(column, (quad ^ 2 * quad_lane) + pass * 8);
        const float4 odd = sm80::chunk(column + kFeatures, (quad ^ (2 * quad_lane + 1)) + pass * 8);
        float (*sum)[4] = sums[0] + pass * 4;
        sm80::multiply_add_tf32(sum[0], a, bits(even.x), bits(odd.x));
        sm80::multiply_add_tf32(sum[1], a, bits(even.y), bits(odd.y));
        sm80::multiply_add_tf32(sum[2], a, bits(even.z), bits(odd.z));
        sm80::multiply_add_tf32(sum[3], a, bits(even.w), bits(odd.w));
      }
    }
  }

  static __device__ __forceinline__ int column(int n, int i) {
    return n / 4 * 32 + 4 * (threadIdx.x % 4 * 2 + i) + n % 4;
  }

 private:
  static __device__ __forceinline__ unsigned bits(float x) { return __float_as_uint(x); }
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads, 2) backward(const __grid_constant__ Params params) {
  if (is_skipped(params)) return;
  extern __shared__ __align__(128) unsigned char memory[];
  Block<Products> block{params, *reinterpret_cast<Shared*>(memory)};
  block.run();
}

}  // extern "C"

}  // namespace spattn::sm80_backward
