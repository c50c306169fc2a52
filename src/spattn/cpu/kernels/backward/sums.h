// Sums gradients: dQ over the items of a row, dK and dV over the units of a key-value head.
#pragma once
#include "finish/results.h"
#include "simd/element.h"
#include "kernels.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> SPATTN_INLINE void add(T* to, const T* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Sums the dQ partials of rows [begin, end) of the plan's merge_rows, in a fixed order.
template <class E>
void merge_dq(const Call& call, int64_t batch, int64_t head, int64_t begin, int64_t end, char* scratch) noexcept {
  using T = typename E::Compute;
  T* sum = reinterpret_cast<T*>(scratch);
  const Plan& plan = call.plan;
  const Head dq(call.dq, batch, head);
  for (int64_t m = begin; m < end; ++m) {
    clear(sum, call.head_dim);
    for (int64_t source = plan.merge_indptr[m]; source < plan.merge_indptr[m + 1]; ++source) {
      add(sum, partial_row<T>(call, batch, head, plan.merge_sources[source], call.head_dim), call.head_dim);
    }
    write_row<E>(dq.row(plan.merge_rows[m]), dq.feature, call.head_dim, sum);
  }
}

// Sums rows [begin, end) of dK and dV of a key-value head over its units, in a fixed order.
template <class E>
void add_units(const Call& call, int64_t batch, int64_t head_kv, const Sums* units, int64_t count, int64_t begin,
               int64_t end, char* scratch) noexcept {
  using T = typename E::Compute;
  T *dk = reinterpret_cast<T*>(scratch), *dv = dk + call.head_dim;
  const Head keys(call.dk, batch, head_kv), values(call.dv, batch, head_kv);
  for (int64_t key = begin; key < end; ++key) {
    clear(dk, call.head_dim + call.head_dim_v);
    for (const Sums* unit = units; unit < units + count; ++unit) {
      if (key < unit->begin || key >= unit->end) continue;
      add(dk, reinterpret_cast<const T*>(unit->dk) + (key - unit->begin) * unit->ld_dk, call.head_dim);
      add(dv, reinterpret_cast<const T*>(unit->dv) + (key - unit->begin) * unit->ld_dv, call.head_dim_v);
    }
    write_row<E>(keys.row(key), keys.feature, call.head_dim, dk);
    write_row<E>(values.row(key), values.feature, call.head_dim_v, dv);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
