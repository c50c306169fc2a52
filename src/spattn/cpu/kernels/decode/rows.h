// Where rows of K and V are read: at even distances, at listed positions, or from a copy of whole vectors.
#pragma once
#include "decode/count.h"
#include "decode/reach.h"
#include "kernels.h"
#include "simd/element.h"
#include "tile/mask.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Rows of K or V in memory, evenly spaced.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
  int64_t ahead;   // bytes from a row to one that is read later, which the products prefetch meanwhile,
  int64_t width;   // this many bytes a row

  SPATTN_INLINE const char* row(int64_t key) const { return data + key * stride; }

  // In the order of addresses, as the processor's own prefetching likes it: the products themselves jump to and fro.
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = data + (first + i) * stride + ahead;
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at);
    }
  }
  SPATTN_INLINE void prefetched() { width = 0; }
  static constexpr bool kHalves = false;  // do all rows meet the same keys?
  static Keys reached(const Reach& cells) { return cells.all; }

  // visit(sum, key, row) for each key: which of two sums takes it in.
  template <class Visit> SPATTN_INLINE void each(Keys keys, const Visit& visit) const {
    for (int64_t key = keys.begin; key < keys.end; ++key) prefetch(key, 1), visit(Count<0>{}, key, row(key));
  }
};

constexpr int64_t kSoon = 8;  // rows from one that is computed with to one that is prefetched

// Rows at listed positions that are needed soon.
struct Soon {
  const char* data;
  const int64_t* position;
  int64_t stride, bytes;  // from position to position, of a row
};

// Rows of K or V in memory, anywhere; products with them prefetch others meanwhile, one for one.
struct ScatteredRows {
  const char* data;
  const int64_t* position;
  int64_t stride;  // bytes
  Soon soon;

  SPATTN_INLINE const char* row(int64_t key) const { return data + position[key] * stride; }
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = soon.data + soon.position[first + i] * soon.stride;
      for (int64_t at = 0; at < soon.bytes; at += 64) __builtin_prefetch(row + at);
    }
  }
  SPATTN_INLINE void prefetched() { soon.bytes = 0; }
  static constexpr bool kHalves = false;
  static Keys reached(const Reach& cells) { return cells.all; }
  template <class Visit> SPATTN_INLINE void each(Keys keys, const Visit& visit) const {
    for (int64_t key = keys.begin; key < keys.end; ++key) prefetch(key, 1), visit(Count<0>{}, key, row(key));
  }
};

// Are the rows whole vectors as they lie?
template <class E> bool whole_vectors(const Head& head, int64_t width, int64_t ld) {
  return width == ld && head.feature == int64_t(sizeof(typename E::Storage));
}

// Are rows of V whole vectors of what the kernels compute in?
template <class E> bool values_as_computed(const Call& call) {
  using T = typename E::Compute;
  return sizeof(typename E::Storage) == sizeof(T) &&
         whole_vectors<E>(Head(call.v, 0, 0), call.head_dim_v, round_up(call.head_dim_v, kLanes<T>));
}

template <class E> Soon read_soon(const Head& head, const int64_t* position, int64_t width) {
  return {head.data, position, head.position, width * int64_t(sizeof(typename E::Storage))};
}

// visit(element type, rows) of the rows at `count` positions: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_positions(const Head& head, const int64_t* position, int64_t count, int64_t width, int64_t ld,
                                   typename E::Compute* copy, Soon soon, const Visit& visit) {
  if (whole_vectors<E>(head, width, ld)) {
    visit(E{}, ScatteredRows{head.data, position, head.position, soon});
  } else {
    gather_positions<E>(head, position, count, count, width, ld, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
