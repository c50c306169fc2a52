#include "portable/mma_products.cuh"
#include "portable_backward/mma_backward.cuh"

namespace spattn::portable_backward {

struct Products {
  template <int kFeatures>
  static __device__ __forceinline__ void multiply(Scores& s, const Element* rows, const Element* columns) {
    constexpr int kRowChunks = kFeatures / kVector;
    const unsigned base = portable::columns_address<kRowChunks>(columns);
#pragma unroll
    for (int k16 = 0; k16 < kFeatures / 16; ++k16) {
      unsigned a[kAtoms][4];
      portable::load_fragments<kAtoms, kRowChunks>(a, rows, k16);
      portable::multiply_transposed<kAtoms, kColumns / 8, kRowChunks>(s, a, base, k16);
    }
  }
  template <int kFeatures>
  static __device__ __forceinline__ void add(Sums<kFeatures>& sums, const Scores& weights, const Element* columns) {
    portable::accumulate(sums, weights, columns);
  }
  static __device__ __forceinline__ int column(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i; }
};

extern "C" {

__constant__ int launch_shape[3] = {kThreads, sizeof(Shared), sizeof(Params)};

__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Block<Products> block{params, *reinterpret_cast<Shared*>(memory)};
  block.run();
}

}  // extern "C"

}  // namespace spattn::portable_backward
