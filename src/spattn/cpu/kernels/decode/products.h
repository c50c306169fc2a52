// The two products of few query rows, S = Q K' and O += P V, with features and keys in the lanes: see few_queries.h.
#pragma once
#include "simd/element.h"
#include "kernels.h"
#include "simd/native.h"
#include "tile/operand.h"
#include "tile/scratch.h"
#include "tile/tile.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// How far to prefetch ahead, in bytes, where tiles follow each other: K and V together stay in a first-level cache.
constexpr int64_t kAhead = 8192;

// Rows of K or V in memory.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
  int64_t ahead;   // bytes from a row to one that is read later, which the products prefetch meanwhile,
  int64_t width;   // this many bytes a row

  // In the order of addresses, as the processor's own prefetching likes it: the products themselves jump to and fro.
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = data + (first + i) * stride + ahead;
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at);
    }
  }
};

// visit(element type, rows) of the keys of a tile, `count` of them: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_rows(const Head& head, const Tile& tile, const Tile& next, int64_t count, int64_t width,
                              int64_t ld, Scratch<typename E::Compute>& s, typename E::Compute* copy, Visit visit) {
  if (tile.even() && tile.cells() == count && width == ld && head.feature == int64_t(sizeof(typename E::Storage))) {
    const int64_t stride = tile.stride[2] * head.position, onwards = (next.start - tile.start) * head.position;
    const int64_t ahead = onwards == count * stride && onwards > kAhead ? kAhead : onwards;
    visit(E{}, Rows{head.data + tile.start * head.position, stride, ahead,
                    ahead && next.even() ? width * int64_t(sizeof(typename E::Storage)) : 0});
  } else {
    gather_rows<E>(head, tile, count, width, ld, s.key_position, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

// How many rows are computed at once: their accumulators, for several keys or features, fill the registers.
template <int N> struct Count { static constexpr int value = N; };
template <class T> constexpr int kPanelRows = kLanes<T> < 4 ? kLanes<T> : 4;

// run(Count<R>, first) for panels of R rows, then for what is left in halves of R.
template <int R, class Run> SPATTN_INLINE void in_panels(int64_t rows, Run run, int64_t first = 0) {
  for (; rows - first >= R; first += R) run(Count<R>{}, first);
  if constexpr (R > 1) in_panels<R / 2>(rows, run, first);
}

struct Add {
  template <class V> static SPATTN_INLINE V combine(V a, V b) { return a + b; }
};
struct Larger {
  template <class V> static SPATTN_INLINE V combine(V a, V b) { return larger(a, b); }
};

// Lane i of the result combines the lanes of v[i], by halves: of the vectors kFirst, kFirst + kStep, ...
template <class Operation, class T, int kFirst = 0, int kStep = 1>
SPATTN_INLINE Vec<T> across(const Vec<T> (&v)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  if constexpr (kStep == L) {
    return v[kFirst];
  } else {
    using All = typename MakeLanes<L>::type;
    const Vec<T> even = across<Operation, T, kFirst, 2 * kStep>(v);
    const Vec<T> odd = across<Operation, T, kFirst + kStep, 2 * kStep>(v);
    return Operation::combine(zip_low<L>(even, odd, All{}), zip_high<L>(even, odd, All{}));
  }
}

// R rows of S for `count` keys, a multiple of kLanes. A vector's worth of dot products is finished together.
template <class Stored, int R, class T>
void few_scores(const Rows& keys, int64_t count, const T* query, int64_t depth, T* scores, int64_t ld_scores) {
  constexpr int L = kLanes<T>, kKeys = L / R, kAtOnce = kKeys < 4 ? kKeys : 4;
  constexpr int64_t kSize = sizeof(typename Stored::Storage);
  for (int64_t key = 0; key < count; key += kKeys) {
    const char* row = keys.data + key * keys.stride;
    Vec<T> sum[L] = {};
    SPATTN_UNROLL
    for (int first = 0; first < kKeys; first += kAtOnce) {
      keys.prefetch(key + first, kAtOnce);
      for (int64_t d = 0; d < depth; d += L) {
        Vec<T> left[R];
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) left[i] = load<Vec<T>>(query + i * depth + d);
        SPATTN_UNROLL
        for (int j = first; j < first + kAtOnce; ++j) {
          const Vec<T> right = load_elements<Stored>(row + j * keys.stride + d * kSize);
          SPATTN_UNROLL
          for (int i = 0; i < R; ++i) sum[i * kKeys + j] += left[i] * right;
        }
      }
    }
    const Vec<T> total = across<Add, T>(sum);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      memcpy(scores + i * ld_scores + key, reinterpret_cast<const char*>(&total) + i * kKeys * sizeof(T),
             kKeys * sizeof(T));
    }
  }
}

// N vectors of R rows of O, from `column` of V on: O = rescale * O + P V, or P V for the first tile of an item.
template <class Stored, int R, int N, class T>
void few_output(const Rows& values, int64_t column, int64_t keys, const T* weights, int64_t ld_weight,
                const T* rescale, T* output, int64_t ld) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const char* row = values.data + key * values.stride + column * int64_t(sizeof(typename Stored::Storage));
    values.prefetch(key, 1);
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      const char* at = row + j * L * int(sizeof(typename Stored::Storage));
      right[j] = load_elements<Stored>(at);
    }
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(weights[i * ld_weight + key]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      T* out = output + i * ld + j * L;
      if (rescale) sum[i][j] += load<Vec<T>>(out) * rescale[i];
      store(out, sum[i][j]);
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
