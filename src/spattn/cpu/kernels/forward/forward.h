// One work item: O = softmax(scale * Q K' + mask) V for the rows of a query tile over a piece of its key tile list.
#pragma once
#include <math.h>

#include "tile/prefetch.h"
#include "finish/exact.h"
#include "kernels.h"
#include "tile/mask.h"
#include "finish/results.h"
#include "tile/operand.h"
#include "forward/paired.h"
#include "forward/plain.h"
#include "forward/products.h"
#include "tile/scratch.h"
#include "softmax/softmax.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// One entry of the list: O, row_max and row_sum take in the keys of one tile.
template <class Path>
void take_tile(const Call& call, int64_t pair, const Component& component, int64_t entry, const Head& keys,
               const Head& values, int64_t cells, bool first, typename Path::T factor,
               TileScratch<typename Path::T>& s) {
  using T = typename Path::T;
  const Plan& plan = call.plan;
  const int64_t view = component.key_view + plan.key_view[entry];
  const Tile tile = locate(plan.views[view], plan.indices[entry]);
  const Mask mask(plan, entry);
  const int64_t vectors = (cells + kLanes<T> - 1) / kLanes<T>;
  const int64_t key_cells = tile.cells(), rows = round_up(key_cells, kKeyRows);
  s.fresh = true;
  if (!Path::keys_in_place(keys, tile, rows, call) || !Path::values_in_place(values, tile, call, s)) {
    s.enter(pair, view, plan.indices[entry], plan.block_kv);
  }
  const auto k = Path::key_operand(keys, tile, rows, call, s);
  const auto v = Path::value_operand(values, tile, call, s);
  const Keys reached = mask ? unpack(mask, cells, key_cells, s) : Keys{0, key_cells};
  const int64_t begin = reached.begin / kKeyRows * kKeyRows, end = round_up(reached.end, kKeyRows);
  compute_scores<Path>(k, v, begin, end, call.head_dim, vectors, bool(mask), s);
  exponentiate<Path>(begin, end, vectors, factor, s);
  accumulate_output<Path>(v, reached, cells, mask, first, s);
}

// Multiplies a row of O, a whole number of vectors, by `factor`; is every value of it finite? Adding 0 makes -0 a 0: a
// sum that underflows keeps or loses its sign by the signs of terms that weigh nothing.
template <class T> bool scale_row(T* row, int64_t width, T factor) {
  IntVec<T> strange = {};
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const Vec<T> x = load<Vec<T>>(row + j) * factor + Vec<T>{};
    store(row + j, x);
    strange |= x - x != Vec<T>{};  // infinity - infinity is NaN
  }
  return !any(strange);
}

// Divides the rows of O, leaves those that came out non-finite, and s.exact, to the exact path, and writes the results
// of an item.
template <class E, class T>
void finish_item(const Call& call, int64_t batch, int64_t head, const Work& item, int64_t cells, const Scale<T>& scale,
                 const T* normaliser, Scratch<T>& s) {
  for (int64_t i = 0; i < cells; ++i) s.lse[i] = natural_lse(s.row_max[i], s.origin[i], s.row_sum[i], scale);
  for (int64_t cell = 0; cell < cells; ++cell) {
    const int64_t position = s.query_position[cell];
    if (position == kPadding) continue;
    const T sum = s.row_sum[cell];
    T* row = s.output + cell * s.ld_value;
    double lse = s.lse[cell];
    const bool nothing = sum == T(0) && s.row_max[cell] == -kInfinity<T>;  // is allowed, or is above -inf
    if (nothing && !s.exact[cell]) {
      lse = -kInfinity<double>;  // the sum's logarithm, also where a scale of 0 makes 0 * row_max undefined
      clear(row, call.head_dim_v);
    } else if (s.exact[cell] || sum == T(0) || !scale_row(row, s.ld_value, T(1) / normaliser[cell])) {
      report_nonfinite(call);
      lse = ExactRow<E>(call, batch, head, item, cell, s).compute(row);
    }
    if (item.slot < 0) {
      write_result<E>(call, batch, head, position, row, T(lse));
    } else {
      T* slot = slot_row<T>(call, batch, head, item.slot * call.plan.block_q + cell);
      memcpy(slot, row, size_t(call.head_dim_v) * sizeof(T));
      memcpy(slot + call.head_dim_v, &lse, sizeof lse);
    }
  }
}

template <class Path>
void forward(const Call& call, int64_t batch, int64_t head, const Work& item, char* scratch) noexcept {
  using T = typename Path::T;
  TileScratch<T> s(call, scratch);
  const Plan& plan = call.plan;
  const Component& component = plan.components[item.component];
  const int64_t head_kv = head / call.group, pair = batch * (call.heads_q / call.group) + head_kv;
  const Head queries(call.q, batch, head), keys(call.k, batch, head_kv), values(call.v, batch, head_kv);
  const int64_t cells = list_positions(locate(plan.views[component.query_view], item.query_tile), s.query_position);

  const Scale<T> scale(call.scale);
  Path::pack_query(queries, cells, scale.sign, call, s);
  reset_softmax((cells + kLanes<T> - 1) / kLanes<T>, s);
  leave_marked(call, batch, head, item, cells, s);
  Ahead ahead(call, item, Head(call.out, batch, head), queries, keys, values, sizeof(typename Path::E::Storage),
              !kPrefetches<Path>);
  for (int64_t e = item.begin; e < item.end; ++e) {
    ahead.run(item.end - item.begin);
    take_tile<Path>(call, pair, component, e, keys, values, cells, e == item.begin, scale.factor, s);
  }
  finish_item<typename Path::E>(call, batch, head, item, cells, scale, Path::normaliser(s), s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
