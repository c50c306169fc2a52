// Sources of K and V rows: evenly spaced, at listed positions, or a copy in whole vectors.
#pragma once
#include "kernels.h"
#include "simd/element.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Evenly spaced rows of K or V in memory.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
  int64_t ahead;   // bytes from a row to the one that the products prefetch,
  int64_t width;   // this many bytes of it

  SPATTN_INLINE const char* row(int64_t key) const { return data + key * stride; }

  // In address order, for the hardware prefetcher: the products themselves jump back and forth.
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = data + (first + i) * stride + ahead;
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at);
    }
  }
  SPATTN_INLINE void prefetched() { width = 0; }
};

constexpr int64_t kSoon = 8;  // prefetch distance in rows

// Rows at listed positions to prefetch.
struct Soon {
  const char* data;
  const int64_t* position;
  int64_t stride, bytes;  // from position to position, of a row
};

// Rows of K or V at listed positions; products with them prefetch others, one for one.
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
};

// Whether the rows are whole vectors in memory.
template <class E> bool whole_vectors(const Head& head, int64_t width, int64_t ld) {
  return width == ld && head.feature == int64_t(sizeof(typename E::Storage));
}

template <class E> Soon read_soon(const Head& head, const int64_t* position, int64_t width) {
  return {head.data, position, head.position, width * int64_t(sizeof(typename E::Storage))};
}

// Calls visit(element type, rows) for the rows at `count` positions: in place, or a copy of `ld` values a row.
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
