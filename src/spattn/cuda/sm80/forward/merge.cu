// Combines split-KV partials: out = Σ_s exp(lse_s − lse) out_s, lse = log Σ_s exp(lse_s), over the sources s in the
// plan's order, so that results are deterministic. The sink is one more term of lse. With neither a source nor a sink,
// out = 0 and lse = −inf.
//
// grid      one warp per (row, batch, head), 4 warps per CTA; a flat list in x
// target    sm_80 and later
// dtypes    out: float16, bfloat16, float32 (workspace float32), float64 (workspace float64)
// shared    none
// test      tests/cuda/sm80/test_mma_forward.py
// benchmark benchmarks/peers/peers_cuda.py
// source    the log-sum-exp identity of split softmax: Rabe & Staats, arXiv:2112.05682, §2
//
// macros    SPATTN_DTYPE
#include "common/element.cuh"
#include "common/sink.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80 {

constexpr int kWarps = 4;

// Returns log Σ exp(lse_s), in natural units; −inf without sources or if all lse are −inf.
__device__ inline Sum merge_lse(const Params& params, long long first, int begin, int end) {
  const Sum* partial_lse = static_cast<const Sum*>(params.partial_lse);
  Sum row_max = -infinity<Sum>();
  for (int s = begin; s < end; ++s) row_max = fmax(row_max, partial_lse[first + params.merge_sources[s]]);
  const Sum reference = row_max == -infinity<Sum>() ? Sum(0) : row_max;
  Sum row_sum = 0;
  for (int s = begin; s < end; ++s) row_sum += exp(partial_lse[first + params.merge_sources[s]] - reference);
  return row_sum == 0 ? -infinity<Sum>() : reference + log(row_sum);
}

extern "C" {

__constant__ int launch_shape[3] = {32 * kWarps, 0, sizeof(Params)};

__global__ void __launch_bounds__(32 * kWarps, 1) merge(const __grid_constant__ Params params) {
  const long long number = (params.first_block + blockIdx.x) * kWarps + threadIdx.x / 32;
  if (number >= params.merges.numbers) return;
  const Task task = find_task(params.merges, number);
  const int lane = threadIdx.x % 32, row = params.merge_rows[task.number];
  const int begin = params.merge_indptr[task.number], end = params.merge_indptr[task.number + 1];
  const long long first = static_cast<long long>(task.batch_head) * params.slots * params.block_q;
  Sum row_lse = merge_lse(params, first, begin, end);
  if constexpr (kSinks) add_sink(static_cast<const Sum*>(params.sinks)[task.batch_head % params.heads_q], row_lse);
  const Sum reference = row_lse == -infinity<Sum>() ? Sum(0) : row_lse;
  Element* out = head_of<Element>(params.out, task.batch_head / params.heads_q, task.batch_head % params.heads_q) +
                 row * params.out.row;
  const Sum *partial = static_cast<const Sum*>(params.partial), *lse = static_cast<const Sum*>(params.partial_lse);
  for (int column = lane; column < params.head_dim_v; column += 32) {
    Sum sum = 0;
    for (int s = begin; s < end; ++s) {
      const long long source = first + params.merge_sources[s];
      sum += exp(lse[source] - reference) * partial[source * params.head_dim_v + column];
    }
    narrow(sum, out[column]);
  }
  if (lane != 0 || params.lse == nullptr) return;
  static_cast<Sum*>(params.lse)[static_cast<long long>(task.batch_head) * params.q_len + row] = row_lse;
}

}  // extern "C"

}  // namespace spattn::sm80
