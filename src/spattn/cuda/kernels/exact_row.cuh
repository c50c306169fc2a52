// One row, key by key, for rows that the tile kernels could not finish with finite numbers, or whose logits are too large
// for them.
//
// Tile kernels multiply the values of keys that a row may not see by a probability of zero. When such a value is NaN or
// infinite the product is NaN (0 · NaN), so the row is computed again here from its allowed keys alone. A NaN at an
// allowed key stays a NaN. Nothing is paid while all values are finite.
#pragma once
#include "element.cuh"
#include "exact_softmax.cuh"
#include "params.cuh"

namespace spattn {

// Where a row's result goes: the output, or the workspace when others write the same row.
struct RowTarget {
  bool partial;
  long long index;  // of a row of the workspace, or of lse
  int position;
};

template <int kBlockQ>
__device__ inline RowTarget row_target(const Params& params, const Work& work, int batch_head, int cell, int position) {
  if (work.slot < 0) return {false, static_cast<long long>(batch_head) * params.q_len + position, position};
  return {true, (static_cast<long long>(batch_head) * params.slots + work.slot) * kBlockQ + cell, position};
}

// Calls visit(position) for every key that query cell `cell` of a work item may attend to, in order.
template <int kBlockQ, int kBlockKV, typename Visit>
__device__ inline void for_allowed_keys(const Params& params, const Work& work, int cell, Visit visit) {
  const int first_view = params.components[work.component].key_view;
  for (int entry = work.begin; entry < work.end; ++entry) {
    const View& view = params.views[first_view + params.key_view[entry]];
    const int tile = params.indices[entry], mask = params.mask[entry];
    for (int word = 0; word < kBlockKV / 64; ++word) {
      unsigned long long bits = ~0ull;
      if (mask >= 0) bits = params.masks[(static_cast<long long>(mask) * kBlockQ + cell) * (kBlockKV / 64) + word];
      for (; bits; bits &= bits - 1) visit(position_of(view, tile, word * 64 + __ffsll(bits) - 1));
    }
  }
}

template <int kBlockQ, int kBlockKV, int kDimV>
__device__ __noinline__ void exact_row(const Params& params, const Work& work, int batch_head, int cell, int position) {
  const int lane = threadIdx.x % 32;
  const int batch = batch_head / params.heads_q, head = batch_head % params.heads_q;
  const Element* q = head_of<const Element>(params.q, batch, head) + position * params.q.row;
  const Element* k = head_of<const Element>(params.k, batch, head / params.heads_per_kv);
  const Element* v = head_of<const Element>(params.v, batch, head / params.heads_per_kv);
  constexpr int kColumns = (kDimV + 31) / 32;
  ExactSoftmax softmax{params.scale_log2};
  double sums[kColumns] = {};
  for_allowed_keys<kBlockQ, kBlockKV>(params, work, cell, [&](int key) {
    double dot = 0;
    for (int i = lane; i < params.head_dim; i += 32) {
      const double factor = params.query_factor * double(widen(q[i * params.q.column]));
      dot += factor * double(widen(k[key * params.k.row + i * params.k.column]));
    }
    for (int other = 16; other; other /= 2) dot += __shfl_xor_sync(~0u, dot, other);
    const auto weight = softmax.add(dot);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column >= params.head_dim_v) continue;
      const double value = widen(v[key * params.v.row + column * params.v.column]);
      sums[i] = sums[i] * weight.before + weight.own * value;
    }
  });

  const RowTarget target = row_target<kBlockQ>(params, work, batch_head, cell, position);
  Element* out = head_of<Element>(params.out, batch, head) + position * params.out.row;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = lane + 32 * i;
    if (column >= params.head_dim_v) continue;
    const Sum value = static_cast<Sum>(softmax.normalised(sums[i]));
    if (target.partial) {
      static_cast<Sum*>(params.partial)[target.index * params.head_dim_v + column] = value;
    } else {
      narrow(value, out[column]);
    }
  }
  Sum* lse = static_cast<Sum*>(target.partial ? params.partial_lse : params.lse);
  if (lane == 0) lse[target.index] = static_cast<Sum>(softmax.lse());
}

}  // namespace spattn
