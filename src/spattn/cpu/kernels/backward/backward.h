// One work item of the backward. With P = exp(scale * Q K' - lse) on the allowed pairs, recomputed tile by tile, and
// delta = rowsum(dO o O): dV = P' dO, dS = scale * P o (dO V' - delta), dQ = dS K, dK = dS' Q.
#pragma once
#include "backward/exact.h"
#include "backward/products.h"
#include "backward/queries.h"
#include "backward/scratch.h"
#include "backward/sums.h"
#include "kernels.h"

namespace spattn {
namespace SPATTN_ISA {

// One entry of the list: what its pairs add to s.dq, dK and dV.
template <class E>
void take_gradients(const Call& call, const Component& component, int64_t entry, const Head& keys, const Head& values,
                    int64_t cells, const Sums& sums, BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  const Plan& plan = call.plan;
  const Tile place = locate(plan.views[component.key_view + plan.key_view[entry]], plan.indices[entry]);
  const int64_t rows = round_up(place.cells(), kKeyRows);
  const KeyTile<T> tile = {key_rows<E>(keys, place, rows, call.head_dim, s.ld_key, s.key_position, s.keys),
                           key_rows<E>(values, place, rows, call.head_dim_v, s.ld_value, s.key_position, s.values),
                           rows, cells, Mask(plan, entry)};
  for (int64_t key = list_positions(place, s.key_position); key < rows; ++key) s.key_position[key] = kPadding;
  if (tile.mask) unpack<T>(tile.mask, cells, tile.rows, s);
  compute_weights(call, tile, weight_factor<T>(call.scale), s);
  add_key_gradients(tile, sums, s);
  add_query_gradients(tile, s);
}

// The end of an item: its rows of s.dq go to dQ or a slot, once the exact path has dealt with those that need it.
template <class E>
void write_query_gradients(const Call& call, int64_t batch, int64_t head, const Work& item, const Tile& place,
                           const Sums& sums, BackwardScratch<typename E::Compute>& s) {
  using T = typename E::Compute;
  for (int64_t cell = 0; cell < place.cells(); ++cell) {
    const int64_t position = s.query_position[cell];
    if (position == kPadding) continue;
    T* row = s.dq + cell * s.ld_key;
    if (s.idle[cell]) {
      clear(row, call.head_dim);
    } else if (s.exact[cell] || !all_finite(row, s.ld_key)) {
      report_nonfinite(call);
      exact_gradients(ExactRow<E>(call, batch, head, item, cell, s), batch, head, s.exact[cell] ? &sums : nullptr, s);
      for (int64_t d = 0; d < call.head_dim; ++d) row[d] = T(s.exact_dq[d]);
    }
    if (item.slot < 0) {
      write_row<E>(dq_row(call, batch, head, position), call.dq.stride[3], call.head_dim, row);
    } else {
      memcpy(dq_slot<T>(call, batch, head, item.slot * call.plan.block_q + cell), row,
             size_t(call.head_dim) * sizeof(T));
    }
  }
}

template <class E>
void backward(const Call& call, int64_t batch, int64_t head, const Work& item, const Sums& sums,
              char* scratch) noexcept {
  BackwardScratch<typename E::Compute> s(call, scratch);
  const Component& component = call.plan.components[item.component];
  const Head keys(call.k, batch, head / call.group), values(call.v, batch, head / call.group);
  const Tile place = locate(call.plan.views[component.query_view], item.query_tile);
  const int64_t cells = place.cells();
  gather_queries<E>(call, batch, head, item, place, s);
  clear(s.dq, s.ld_query * s.ld_key);
  for (int64_t e = item.begin; e < item.end; ++e) take_gradients<E>(call, component, e, keys, values, cells, sums, s);
  write_query_gradients<E>(call, batch, head, item, place, sums, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
