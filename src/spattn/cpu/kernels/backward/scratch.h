// Scratch of the backward.
#pragma once
#include "kernels.h"
#include "softmax/dropout.h"
#include "softmax/score.h"
#include "tile/arena.h"
#include "tile/mask.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Factor of dO, and so of dP and dS: the scale, or 1 if dS is with respect to the results of a score function.
template <class T> T gradient_scale(const Call& call) { return call.score ? T(1) : T(call.scale); }

// Row data of an item, shared by all backward kernels.
template <class T> struct GradientRows {
  Positions position;
  FallbackRowBuffer exact;
  T *lse2, *lse2_low;  // lse * log2(e) as high + low; high is +inf for rows that the tile kernel skips
  T* delta;            // rowsum(dO o O), multiplied by gradient_scale() if dO is
  bool* idle;          // whether a row has no gradient
  int64_t ld;          // leading dimension of dq, a multiple of kLanes
  T* dq;               // (width.query, ld)

  GradientRows(const Call& call, const Widths<T>& width, Arena& arena)
      : position(call, arena), exact(width.query, call.head_dim, arena), lse2(arena.array<T>(width.query)),
        lse2_low(arena.array<T>(width.query)), delta(arena.array<T>(width.query)), idle(arena.array<bool>(width.query)),
        ld(width.key), dq(arena.array<T>(width.query * width.key)) {}
};

// Q, dO and O of an item, (rows, width) and (rows, width_value), zero-padded.
template <class U> struct QueryRows {
  int64_t width, width_value;
  U *query, *dout, *out;

  QueryRows(int64_t rows, int64_t width, int64_t width_value, Arena& arena)
      : width(width), width_value(width_value), query(arena.array<U>(rows * width)),
        dout(arena.array<U>(rows * width_value)), out(arena.array<U>(rows * width_value)) {}
};

// dS' is stored like P', one row per key, which is the packed left operand of both dK += dS' Q and dQ += dS K.
template <class T> struct BackwardScratch {
  Widths<T> width;
  GradientRows<T> rows;
  QueryRows<T> raw;
  LaneMask<T> mask;
  KeyStaging<T> staging;
  T* query;      // (head_dim, width.query): sign(scale) * Q'
  T* dout;       // (head_dim_v, width.query): gradient_scale() * dO'
  T* weights;    // (block_kv, width.query): P'
  T* gradients;  // (block_kv, width.query): dS'
  Score<T> score;
  Dropout<T> dropout;

  BackwardScratch(const Call& call, Arena& arena)
      : width(call), rows(call, width, arena), raw(width.query, width.key, width.value, arena),
        mask(call, width.query, arena), staging(call, width, arena), query(arena.array<T>(call.head_dim * width.query)),
        dout(arena.array<T>(call.head_dim_v * width.query)), weights(arena.array<T>(call.plan.block_kv * width.query)),
        gradients(arena.array<T>(call.plan.block_kv * width.query)),
        score(call, call.plan.block_kv, width.query, 1, arena), dropout(call, width.query, call.plan.block_kv, arena) {}
};

}  // namespace SPATTN_ISA
}  // namespace spattn
