// Float64 fallback: recomputes one row, column by column.
//
// A tile multiplies masked weights (0) by every value, and 0 * NaN and 0 * inf are NaN. One warp recomputes a row with
// a non-finite result from its allowed pairs only, in the plan's order.
#pragma once

#include "common/element.cuh"
#include "common/warp.cuh"
#include "sm90/backward/config.cuh"

namespace spattn::sm90_backward {

// Sums of a row: lane l holds features l, l + 32, ... of dK or dQ (scaled), and of dV.
struct FallbackSums {
  double scores[kDim / 32], values[kDim / 32];
};

struct FallbackRow {
  const Params& p;
  const Assignment& assigned;
  const int row;

  __device__ __forceinline__ const Element* token(const void* base, const Strides& stride, int head,
                                                  int64_t position) const {
    return static_cast<const Element*>(base) + assigned.task.batch * stride.batch + head * stride.head +
           position * stride.token;
  }

  __device__ static double dot(const Element* a, const Element* b, int count) {
    double sum = 0;
    for (int d = 0; d < count; ++d) sum += double(widen(a[d])) * double(widen(b[d]));
    return sum;
  }

  // Finds the position of this row; returns false for padding.
  __device__ __forceinline__ bool position(int64_t& found) const {
    const int* at = assigned.work.subtile[row / kSubtile];
    return cell_position(p.row_views[assigned.work.view], at[0], at[1], at[2], row % kSubtile, found);
  }

  // Returns the position of column `column`; -1 if the pattern does not allow the pair of this row and that column.
  __device__ __forceinline__ int64_t allowed(const Entry& entry, int column) const {
    if (!mask_allows(p.masks, entry.masks[row / kSubtile], row % kSubtile, column)) return -1;
    int64_t found;
    const View& view = p.column_views[assigned.work.columns + entry.view];
    return cell_position(view, entry.x, entry.y, entry.z, column, found) ? found : -1;
  }

  __device__ FallbackSums sums(int64_t own) const {
    const Task& task = assigned.task;
    const int lane = threadIdx.x % 32;
    FallbackSums sum = {};
    const int entries = assigned.work.end - assigned.work.begin;
#pragma unroll 1
    for (int n = 0; n < assigned.work.heads * entries * 2; ++n) {
      const Entry entry = p.entries[assigned.work.begin + n / 2 % entries];
      const int head = task.head_q + (kByKeys ? entry.head + n / 2 / entries : 0);
      const int64_t other = allowed(entry, n % 2 * 32 + lane);
      const uint32_t pairs = __ballot_sync(~0u, other >= 0);
      double weight = 0, gradient = 0;
      if (other >= 0) {
        const int64_t query = kByKeys ? other : own, key = kByKeys ? own : other;
        const Statistic statistic = p.statistics[(int64_t(task.batch) * p.heads_q + head) * p.q_len + query];
        const double product =
            dot(token(p.q, p.q_stride, head, query), token(p.k, p.k_stride, task.head_kv, key), p.head_dim);
        const double upstream =
            dot(token(p.dout, p.dout_stride, head, query), token(p.v, p.v_stride, task.head_kv, key), p.head_dim_v);
        if constexpr (kScored) {
          const auto opened = Score::open<double>(*p.score, p.q_offset, task.batch, head);
          const double score = p.sign * product * p.scale_log2 * kLn2<double>;
          const int at = int(query) + p.q_offset;
          weight = exp(Score::value(score, at, int(key), opened) - statistic.lse * kLn2<double>);
          const double slope = Score::derivative(score, at, int(key), opened);
          const double kept = opened.dropout.of(at, int(key));
          gradient = weight == 0 ? 0 : weight * slope * (upstream * kept - statistic.delta) * p.scale;
          weight *= kept;
        } else {
          weight = exp((p.sign * product * p.scale_log2 - statistic.lse) * kLn2<double>);
          gradient = weight * (upstream - statistic.delta) * p.scale;
        }
      }
      for (uint32_t rest = pairs; rest; rest &= rest - 1) {
        const int from = __ffs(rest) - 1;
        const double w = __shfl_sync(~0u, weight, from), g = __shfl_sync(~0u, gradient, from);
        const int64_t at = __shfl_sync(~0u, other, from);
        const Element* scored = kByKeys ? token(p.q, p.q_stride, head, at) : token(p.k, p.k_stride, task.head_kv, at);
        const Element* valued = kByKeys ? token(p.dout, p.dout_stride, head, at) : nullptr;
        for (int i = 0; i < kDim / 32; ++i) {
          const int d = lane + 32 * i;
          if (kScores && d < p.head_dim) sum.scores[i] += g * double(widen(scored[d]));
          if (kValues && d < p.head_dim_v) sum.values[i] += w * double(widen(valued[d]));
        }
      }
    }
    return sum;
  }
};

}  // namespace spattn::sm90_backward
