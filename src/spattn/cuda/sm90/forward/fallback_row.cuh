// Float64 fallback: recomputes one row, key by key.
//
// A tile multiplies masked weights (0) by every value, and 0 * NaN and 0 * inf are NaN. One warp recomputes a row with
// a non-finite result, or with scores too large for float32, from its allowed keys only, in the plan's order.
#pragma once

#include "common/element.cuh"
#include "common/fallback_softmax.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/mask.cuh"

namespace spattn::sm90 {

// Computes attention of row `row` (position `query`) of a task; lane l gets features l, l + 32, ... of the result.
__device__ inline void fallback_row(const Params& p, const Assignment& assigned, int row, int64_t query,
                                    float (&result)[kDimV / 32], float& lse) {
  const Work& work = assigned.work;
  const Problem& own = problem_of(p, assigned);
  const int batch = assigned.batch, head_kv = assigned.head / own.group;
  const Input* q = static_cast<const Input*>(own.q) + batch * own.q_stride.batch + assigned.head * own.q_stride.head +
                   query * own.q_stride.token;
  const Input* k = static_cast<const Input*>(own.k) + batch * own.k_stride.batch + head_kv * own.k_stride.head;
  const Input* v = static_cast<const Input*>(own.v) + batch * own.v_stride.batch + head_kv * own.v_stride.head;
  const auto key = [&](int n) -> long long {
    const int e = work.begin + n / kBlockKV, column = n % kBlockKV;
    int64_t position;
    if (!mask_allows(p.masks, mask_block(p.entry_masks[e], row / 64), row % 64, column)) return -1;
    const Entry entry = p.entries[e];
    const View& view = p.key_views[work.key_view + entry.view];
    if constexpr (kGathers) return key_rows(p, view, entry)[column];
    if (!cell_position(view, entry.x, entry.y, entry.z, column, position)) return -1;
    return view.offset > 0 ? position + own.moved : position;
  };
  const float2 scales = head_scales(p, assigned);
  Score::Head<double> opened;
  if constexpr (kScored) opened = Score::open<double>(*own.score, query_offset(own), batch, assigned.head);
  const auto dot = [&](int64_t position) {
    double sum = 0;
    for (int d = 0; d < own.head_dim; ++d) {
      sum += double(widen(q[d])) * double(widen(k[position * own.k_stride.token + d]));
    }
    if constexpr (kFloat8) sum *= scales.x;
    if constexpr (!kScored) return own.sign * sum;
    return Score::value(own.sign * sum * own.scale_log2 * kLn2<double>, int(query) + query_offset(own), int(position),
                        opened);
  };
  const auto value = [&](int64_t position, int d) {
    if (d >= own.head_dim_v) return 0.0;
    const double kept = opened.dropout.of(int(query) + query_offset(own), int(position));
    return kept * double(widen(v[position * own.v_stride.token + d])) * (kFloat8 ? double(scales.y) : 1.0);
  };
  const double scale_log2 = kScored ? 1 / kLn2<double> : own.scale_log2;
  const auto exact = fallback_attention<kDimV / 32>((work.end - work.begin) * kBlockKV, scale_log2, key, dot, value);
  for (int i = 0; i < kDimV / 32; ++i) result[i] = float(exact.out[i]);
  lse = float(exact.lse);
}

}  // namespace spattn::sm90
