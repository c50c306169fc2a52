// Scratch structs that several kernels share.
#pragma once
#include "kernels.h"
#include "tile/arena.h"

namespace spattn {
namespace SPATTN_ISA {

// Leading dimensions of matrices in scratch: block_q, head_dim and head_dim_v, rounded up to multiples of kLanes.
template <class T> struct Widths {
  int64_t query, key, value;

  explicit Widths(const Call& call)
      : query(round_up(call.plan.block_q, kLanes<T>)), key(round_up(call.head_dim, kLanes<T>)),
        value(round_up(call.head_dim_v, kLanes<T>)) {}
};

// Positions of the cells of the current query and key tile.
struct Positions {
  int64_t *query, *key;  // (block_q rounded up to vectors), (block_kv)
  double* score;         // registers of PairScore, for the float64 fallback

  Positions(const Call& call, Arena& arena)
      : query(arena.array<int64_t>(round_up(call.plan.block_q, kLanes<float>))),
        key(arena.array<int64_t>(call.plan.block_kv)),
        score(arena.array<double>(call.score ? call.score->registers[kSingle] * kLanes<double> : 0)) {}
};

// Copies of K and V of a tile that the kernel cannot read in place.
template <class T> struct KeyStaging {
  T *keys, *values;  // (block_kv, width.key), (block_kv, width.value)

  KeyStaging(const Call& call, const Widths<T>& width, Arena& arena)
      : keys(arena.array<T>(call.plan.block_kv * width.key)), values(arena.array<T>(call.plan.block_kv * width.value)) {
  }
};

// The rows of an item that take the float64 fallback, and the accumulator of the fallback.
struct FallbackRowBuffer {
  int64_t rows;
  bool* chosen;  // (rows): whether a query cell takes the fallback
  double* sum;   // (width): a row of O or dQ

  FallbackRowBuffer(int64_t rows, int64_t width, Arena& arena)
      : rows(rows), chosen(arena.array<bool>(rows)), sum(arena.array<double>(width)) {}
};

}  // namespace SPATTN_ISA
}  // namespace spattn
