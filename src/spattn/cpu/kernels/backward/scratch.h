// A thread's working memory for one item of the backward: the forward's, and what only gradients need.
#pragma once
#include "kernels.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// `query` holds Q' times the sign of the scale, `scores` P' and `keys`, `values` the rows of a key tile that cannot be
// read in place. Like P', dS' has one row per key and the queries side by side: it is the left operand of both
// dK += dS' Q and dQ += dS K as it lies.
template <class T> struct BackwardScratch : Scratch<T> {
  T* score_gradients;  // (block_kv, ld_query): dS'
  T* dout;             // (head_dim_v, ld_query): scale * dO'
  T* query_rows;       // (ld_query, ld_key): Q
  T* dout_rows;        // (ld_query, ld_value): dO
  T* out_rows;         // (ld_query, ld_value): O
  T* dq;               // (ld_query, ld_key)
  T *lse2, *lse2_low;  // (ld_query): log-sum-exp to base 2, in two parts; +inf for rows that are left out
  T* delta;            // (ld_query): scale * rowsum(dO o O)
  double* exact_dq;    // (head_dim)
  bool* idle;          // (ld_query): rows without a gradient

  BackwardScratch(const Call& call, char* memory) : Scratch<T>(call, memory) {
    const int64_t ld_query = this->ld_query;
    this->carve(memory, score_gradients, call.plan.block_kv * ld_query);
    this->carve(memory, dout, call.head_dim_v * ld_query);
    this->carve(memory, query_rows, ld_query * this->ld_key);
    this->carve(memory, dout_rows, ld_query * this->ld_value);
    this->carve(memory, out_rows, ld_query * this->ld_value);
    this->carve(memory, dq, ld_query * this->ld_key);
    this->carve(memory, lse2, ld_query);
    this->carve(memory, lse2_low, ld_query);
    this->carve(memory, delta, ld_query);
    this->carve(memory, exact_dq, call.head_dim);
    this->carve(memory, idle, ld_query);
  }
};

template <class T> size_t backward_scratch_bytes(const Call& call) noexcept {
  alignas(64) char none[1];
  return BackwardScratch<T>(call, none).bytes;
}

}  // namespace SPATTN_ISA
}  // namespace spattn
