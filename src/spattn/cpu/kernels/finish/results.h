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

// Combines the partials of the rows [begin, end) of the plan's merge_rows, in order, through their log-sum-exps.
template <class E>
void merge(const Call& call, int64_t batch, int64_t head, int64_t begin, int64_t end, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  const int64_t width = call.head_dim_v;
  double* const sum = arena.array<double>(width);
  T* const row = arena.array<T>(width);
  const Plan& plan = call.plan;
  for (int64_t m = begin; m < end; ++m) {
    const auto each_source = [&](const auto& visit) {
      for (int64_t i = plan.merge_indptr[m]; i < plan.merge_indptr[m + 1]; ++i) {
        const T* source = slot_row<T>(call, batch, head, plan.merge_sources[i]);
        visit(source, slot_lse(call, source));
      }
    };
    double largest = -kInfinity<double>, total = 0;
    bool valid = true;
    each_source([&](const T*, double lse) {
      valid = valid && lse == lse;
      largest = lse > largest ? lse : largest;
    });
    clear(sum, width);
    each_source([&](const T* source, double lse) {
      if (lse == -kInfinity<double>) return;  // attends to nothing
      const double weight = ::exp(lse - largest);
      for (int64_t j = 0; j < width; ++j) sum[j] += weight * double(source[j]);
      total += weight;
    });
    for (int64_t j = 0; j < width; ++j) row[j] = total == 0 ? T(0) : T(sum[j] / total);
    const double lse = valid ? largest + ::log(total) : total;  // log(0) = -inf
    write_result<E>(call, batch, head, plan.merge_rows[m], row, T(lse));
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
