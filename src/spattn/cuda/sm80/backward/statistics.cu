// Formula    lse, or +inf for empty rows; delta = rowsum(dout o out) - dlse.
// Grid       one warp per query row, flat.
// Target     compute capability 8.0 and later.
// Types      any; sums in float32, float64 for float64.
// Test       tests/cuda/sm80/test_mma_backward.py      Bound  memory: reads dout and out once.

#include "common/element.cuh"
#include "common/warp.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80_backward {

constexpr int kThreads = 256;

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(Params)};

extern "C" __global__ void __launch_bounds__(kThreads) statistics(const __grid_constant__ Params p) {
  const long long row = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, query = row % p.q_len, head = row / p.q_len % p.heads_q,
            batch = row / p.q_len / p.heads_q;
  if (row >= p.rows || is_skipped(p)) return;
  const Element *dout = token<const Element>(p.dout, batch, head, query),
                *out = token<const Element>(p.out, batch, head, query);
  Sum sum = 0;
  for (int d = lane; d < p.head_dim_v; d += 32) {
    sum = fma(Sum(widen(dout[d * p.dout.column])), Sum(widen(out[d * p.out.column])), sum);
  }
  sum = warp_sum(sum);
  if (lane) return;
  const Sum lse = *token<const Sum>(p.lse, batch, head, query);
  const bool nothing = lse == -infinity<Sum>();
  const Sum dlse = p.dlse.data == nullptr ? Sum(0) : *token<const Sum>(p.dlse, batch, head, query);
  Sum* target = static_cast<Sum*>(p.statistics) + 2 * row;
  target[0] = nothing ? infinity<Sum>() : lse;
  target[1] = nothing ? Sum(0) : sum - dlse;
}

}  // namespace spattn::sm80_backward
