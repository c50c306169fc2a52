// Formula    target = sum_s partial_s: gradient rows with partials from several work items, or from none.
// Grid       (batch, head) x 8 rows per CTA, flat; one warp per row.
// Target     compute capability 8.0 and later.
// Types      any; workspace in float32, float64 for float64.
// Order      that of the sources, in every launch: results are bitwise reproducible.
// Test       tests/cuda/sm80/test_mma_backward.py      Bound  memory: reads each workspace row once.

#include "common/element.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80_backward {

constexpr int kThreads = 256;

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(Rows)};

extern "C" __global__ void __launch_bounds__(kThreads) sum(const __grid_constant__ Rows p) {
  const int4 head = p.heads[blockIdx.x / p.head_blocks];
  const int merge = head.x + blockIdx.x % p.head_blocks * (kThreads / 32) + threadIdx.x / 32;
  if (merge >= head.y) return;
  const long long place = static_cast<long long>(head.z) * p.heads_count + head.w;
  const Sum* partial = static_cast<const Sum*>(p.partial) + place * p.partial_rows * p.features;
  Element* target = token<Element>(p.target, head.z, head.w, p.rows[merge]);
  for (int d = threadIdx.x % 32; d < p.features; d += 32) {
    Sum total = 0;
    for (int s = p.indptr[merge]; s < p.indptr[merge + 1]; ++s) {
      total += partial[static_cast<long long>(p.sources[s]) * p.features + d];
    }
    narrow(total, target[d * p.target.column]);
  }
}

}  // namespace spattn::sm80_backward
