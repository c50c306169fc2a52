// Float64 fallback: recomputes one row, key by key.
//
// Used for rows with a non-finite result, or with scores too large for the tile kernels. Tile kernels multiply values
// of masked keys by a zero weight, and 0 · NaN and 0 · inf are NaN; the fallback reads only allowed keys. A NaN at an
// allowed key stays NaN. Costs nothing while all values are finite.
#pragma once
#include "common/element.cuh"
#include "sm80/scores.cuh"

namespace spattn::sm80 {

// Destination of a row: the output, or the workspace for a split-KV partial.
struct RowTarget {
  bool partial;
  long long index;  // workspace row, or index into lse
  int position;
};

template <int kBlockQ>
__device__ inline RowTarget row_target(const Params& params, const Work& work, int batch_head, int cell, int position) {
  if (work.slot < 0) return {false, static_cast<long long>(batch_head) * params.q_len + position, position};
  return {true, (static_cast<long long>(batch_head) * params.slots + work.slot) * kBlockQ + cell, position};
}

// Stores a row's lse in the workspace or, if requested, the output.
template <typename Sum>
__device__ __forceinline__ void store_lse(const Params& params, const RowTarget& target, Sum lse) {
  Sum* to = static_cast<Sum*>(target.partial ? params.partial_lse : params.lse);
  if (to != nullptr) to[target.index] = lse;
}

// Returns the sink to add to the rows of a work item. Returns -inf without sinks, and for split-KV partials, since
// merge.cu adds the sink to their combination.
template <typename Sum>
__device__ __forceinline__ Sum sink_of(const Params& params, const Work& work, int batch_head) {
  if (!kSinks || work.slot >= 0) return -infinity<Sum>();
  return static_cast<const Sum*>(params.sinks)[batch_head % params.heads_q];
}

// Returns the position of candidate `n` among a work item's keys, -1 if query cell `cell` may not attend to it.
template <int kBlockQ, int kBlockKV>
__device__ inline int allowed_key(const Params& params, const Work& work, int cell, int n) {
  const int entry = work.begin + n / kBlockKV, key = n % kBlockKV, mask = params.mask[entry];
  if (mask >= 0) {
    const long long words = (static_cast<long long>(mask) * kBlockQ + cell) * (kBlockKV / 64);
    if (!(params.masks[words + key / 64] >> key % 64 & 1)) return -1;
  }
  const View& view = params.views[params.components[work.component].key_view + params.key_view[entry]];
  return position_of(view, params.indices[entry], key);
}

template <int kBlockQ, int kBlockKV, int kDimV>
__device__ __noinline__ void fallback_row(const Params& params, const Work& work, int batch_head, int cell,
                                          int position) {
  const int lane = threadIdx.x % 32;
  const int batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
  const Element* q = head_of<const Element>(params.q, batch, head) + position * params.q.row;
  const Element* k = head_of<const Element>(params.k, batch, head / params.group);
  const Element* v = head_of<const Element>(params.v, batch, head / params.group);
  constexpr int kColumns = (kDimV + 31) / 32;
  const HeadScore<double> score(params.score, batch, head);
  const int query = kScored ? position : 0;
  const auto dot = [&](int key) {
    double sum = 0;
    for (int i = 0; i < params.head_dim; ++i) {
      sum += double(widen(q[i * params.q.column])) * double(widen(k[key * params.k.row + i * params.k.column]));
    }
    return score(params.sign * sum, query, key);
  };
  const auto value = [&](int key, int column) {
    if (column >= params.head_dim_v) return 0.0;
    return score.kept(query, key) * double(widen(v[key * params.v.row + column * params.v.column]));
  };
  auto row = fallback_attention<kColumns>((work.end - work.begin) * kBlockKV, params.scale_log2,
                                          [&](int n) { return allowed_key<kBlockQ, kBlockKV>(params, work, cell, n); },
                                          dot, value);

  const double factor = add_sink(double(sink_of<Sum>(params, work, batch_head)), row.lse);
  const RowTarget target = row_target<kBlockQ>(params, work, batch_head, cell, position);
  Element* out = head_of<Element>(params.out, batch, head) + position * params.out.row;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = lane + 32 * i;
    if (column >= params.head_dim_v) continue;
    const Sum result = static_cast<Sum>(row.out[i] * factor);
    if (target.partial) {
      static_cast<Sum*>(params.partial)[target.index * params.head_dim_v + column] = result;
    } else {
      narrow(result, out[column]);
    }
  }
  if (lane == 0) store_lse(params, target, static_cast<Sum>(row.lse));
}

}  // namespace spattn::sm80
