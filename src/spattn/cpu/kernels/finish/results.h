// Writes results to the caller's arrays or to split-KV partials, and combines the partials.
#pragma once
#include <math.h>

#include "finish/sink.h"
#include "kernels.h"
#include "simd/element.h"
#include "tile/arena.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns a row of the partials: `width` values, slots * block_q rows per (batch, head).
template <class T> T* partial_row(const Call& call, int64_t batch, int64_t head, int64_t row, int64_t width) {
  const int64_t rows = call.plan.slots * call.plan.block_q;
  return reinterpret_cast<T*>(call.slots) + ((batch * call.heads_q + head) * rows + row) * width;
}

// Returns a row of the forward's partials: the normalized output, head_dim_v values, and its log-sum-exp as a double,
// because float32 cannot resolve the differences between partials if scores are large.
template <class T> T* slot_row(const Call& call, int64_t batch, int64_t head, int64_t row) {
  return partial_row<T>(call, batch, head, row, call.head_dim_v + sizeof(double) / sizeof(T));
}

template <class T> double slot_lse(const Call& call, const T* slot) {
  double lse;
  memcpy(&lse, slot + call.head_dim_v, sizeof lse);
  return lse;
}

// Writes a row of `out`, unless it was computed in place, and its log-sum-exp.
template <class E, class T = typename E::Compute>
void write_result(const Call& call, int64_t batch, int64_t head, int64_t position, const T* from, T row_lse) {
  const Head out(call.out, batch, head);
  char* const to = out.row(position);
  if (reinterpret_cast<const char*>(from) != to) write_row<E>(to, out.feature, call.head_dim_v, from);
  memcpy(Head(call.lse, batch, head).row(position), &row_lse, sizeof row_lse);
}

// Combines the partials of rows [begin, end) of the plan's merge_rows, weighted by exp(lse), in a fixed order, and adds
// the sink.
template <class E>
void merge(const Call& call, int64_t batch, int64_t head, int64_t begin, int64_t end, char* scratch) noexcept {
  using T = typename E::Compute;
  Arena arena(scratch);
  const int64_t width = call.head_dim_v;
  double* const sum = arena.array<double>(width);
  T* const row = arena.array<T>(width);
  const Plan& plan = call.plan;
  const Sink sink(call, head);
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
      if (lse == -kInfinity<double>) return;  // the partial has no allowed key
      const double weight = ::exp(lse - largest);
      for (int64_t j = 0; j < width; ++j) sum[j] += weight * double(source[j]);
      total += weight;
    });
    for (int64_t j = 0; j < width; ++j) row[j] = total == 0 ? T(0) : T(sum[j] / total);
    double lse = valid ? largest + ::log(total) : total;  // log(0) = -inf
    if (sink) sink.add_to(row, width, lse);
    write_result<E>(call, batch, head, plan.merge_rows[m], row, T(lse));
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
