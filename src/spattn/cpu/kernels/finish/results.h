// Output of results: the caller's arrays, or split-KV partials that are combined later.
#pragma once
#include <math.h>

#include "simd/element.h"
#include "kernels.h"
#include "tile/arena.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// A row of the partials: the workspace has slots * block_q rows of `width` values for each (batch, head).
template <class T> T* partial_row(const Call& call, int64_t batch, int64_t head, int64_t row, int64_t width) {
  const int64_t rows = call.plan.slots * call.plan.block_q;
  return reinterpret_cast<T*>(call.slots) + ((batch * call.heads_q + head) * rows + row) * width;
}

// The normalized output of a query, head_dim_v values, and its log-sum-exp as a double, because partials of a row with
// large scores may differ by less than float32 resolves.
template <class T> T* slot_row(const Call& call, int64_t batch, int64_t head, int64_t row) {
  return partial_row<T>(call, batch, head, row, call.head_dim_v + sizeof(double) / sizeof(T));
}

template <class T> double slot_lse(const Call& call, const T* slot) {
  double lse;
  memcpy(&lse, slot + call.head_dim_v, sizeof lse);
  return lse;
}

// Writes a row of `out`, which may have been computed in place, and its log-sum-exp.
template <class E, class T = typename E::Compute>
void write_result(const Call& call, int64_t batch, int64_t head, int64_t position, const T* from, T row_lse) {
  const Head out(call.out, batch, head);
  char* const to = out.row(position);
  if (reinterpret_cast<const char*>(from) != to) write_row<E>(to, out.feature, call.head_dim_v, from);
  memcpy(Head(call.lse, batch, head).row(position), &row_lse, sizeof row_lse);
}

// Combines the partials `sources`, in order, through their log-sum-exps into out and lse.
template <class E>
void merge_row(const Call& call, int64_t batch, int64_t head, int64_t position, const int32_t* sources, int64_t count,
               double* sum, typename E::Compute* row) {
  using T = typename E::Compute;
  const int64_t width = call.head_dim_v;
  double largest = -kInfinity<double>, total = 0;
  bool valid = true;
  for (int64_t i = 0; i < count; ++i) {
    const double lse = slot_lse(call, slot_row<T>(call, batch, head, sources[i]));
    valid = valid && lse == lse;
    largest = lse > largest ? lse : largest;
  }
  for (int64_t j = 0; j < width; ++j) sum[j] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const T* source = slot_row<T>(call, batch, head, sources[i]);
    const double source_lse = slot_lse(call, source);
    if (source_lse == -kInfinity<double>) continue;  // attends to nothing
    const double weight = ::exp(source_lse - largest);
    for (int64_t j = 0; j < width; ++j) sum[j] += weight * double(source[j]);
    total += weight;
  }
  for (int64_t j = 0; j < width; ++j) row[j] = total == 0 ? T(0) : T(sum[j] / total);
  const double lse = valid ? largest + ::log(total) : total;  // log(0) = -inf
  write_result<E>(call, batch, head, position, row, T(lse));
}

template <class E>
void merge(const Call& call, int64_t batch, int64_t head, int64_t begin, int64_t end, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  double* const sum = arena.array<double>(call.head_dim_v);
  T* const row = arena.array<T>(call.head_dim_v);
  const Plan& plan = call.plan;
  for (int64_t m = begin; m < end; ++m) {
    merge_row<E>(call, batch, head, plan.merge_rows[m], plan.merge_sources + plan.merge_indptr[m],
                 plan.merge_indptr[m + 1] - plan.merge_indptr[m], sum, row);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
