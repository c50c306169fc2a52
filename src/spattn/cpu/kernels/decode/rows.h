// Sources that supply the rows of K and V to the decode products: evenly spaced, at listed positions, or copied.
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
  int64_t ahead;   // prefetch distance in bytes
  int64_t width;   // bytes to prefetch per row

  SPATTN_INLINE const char* row(int64_t key) const { return data + key * stride; }

  // Prefetches in address order, which the hardware prefetcher follows. The products interleave the loads of rows.
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = data + (first + i) * stride + ahead;
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at);
    }
  }
  SPATTN_INLINE void prefetched() { width = 0; }
};

constexpr int64_t kSoon = 8;  // prefetch distance in rows

// Rows at listed positions, to prefetch.
struct Soon {
  const char* data;
  const int64_t* position;
  int64_t stride, bytes;  // stride of positions and length of a row, in bytes
};

// Rows of K or V at listed positions. When the products load row i, they prefetch row i of `soon`.
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

// True if each row is contiguous and needs no padding to the vector length.
template <class E> bool whole_vectors(const Head& head, int64_t width, int64_t ld) {
  return width == ld && head.feature == int64_t(sizeof(typename E::Storage));
}

template <class E> Soon read_soon(const Head& head, const int64_t* position, int64_t width) {
  return {head.data, position, head.position, width * int64_t(sizeof(typename E::Storage))};
}

// Calls visit(element type, source) with the rows at `count` positions, in place or copied to `copy`, (count, ld).
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
