// Softmax of few rows with keys in the lanes: scores to weights.
#pragma once
#include "decode/reach.h"
#include "kernels.h"
#include "simd/native.h"
#include "simd/reduce.h"
#include "softmax/softmax.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// The lanes whose mask bits from bit `key` on are set, in the form that Logits::masked() takes.
#if defined(__AVX512F__)
template <class T> SPATTN_INLINE auto lanes_of(const uint64_t* bits, int64_t key) {
  const uint64_t first = bits[key / 64] >> (key % 64);
  if constexpr (kLanes<T> == 16) {
    return __mmask16(first);
  } else {
    return __mmask8(first);
  }
}
#else
template <class T> SPATTN_INLINE BitsVec<T> lanes_of(const uint64_t* bits, int64_t key) {
  BitsVec<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = Word<T>(1) << i;
#if defined(__AVX2__)
  if constexpr (kLanes<T> == 8) {  // a byte, which a load can broadcast
    return (BitsVec<T>)_mm256_set1_epi8(reinterpret_cast<const char*>(bits)[key / 8]) & lane;
  }
#endif
  return splat_bits<T>(Word<T>(bits[key / 64] >> (key % 64))) & lane;
}
#endif

// Masks the scores of R rows, and takes the maximum per lane.
template <int R, class T>
SPATTN_INLINE void mask_scores(const uint64_t* const (&bits)[R], Keys keys, T* scores, int64_t ld,
                               Vec<T> (&largest)[R]) {
  for (int64_t key = keys.begin; key < keys.end; key += kLanes<T>) {
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      T* const at = scores + i * ld + key;
      const Vec<T> score = Logits<T>::masked(load<Vec<T>>(at), lanes_of<T>(bits[i], key));
      store(at, score);
      largest[i] = larger(score, largest[i]);
    }
  }
}

// The range rounded out to whole vectors.
template <class T> Keys in_vectors(Keys keys) {
  return {keys.begin / kLanes<T> * kLanes<T>, round_up(keys.end, kLanes<T>)};
}

// Writes the maximum score of each row over its range of keys to tile_max; a head has `cells` rows.
template <class T>
void find_largest(const Mask& mask, int64_t cells, const Keys* reached, int64_t rows, T* matrix, int64_t ld,
                  const RowStatistics<T>& s) {
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    T* const scores = matrix + row * ld;
    const Keys keys = in_vectors<T>(reached[row]);
    Vec<T> largest[R];
    for (int i = 0; i < R; ++i) largest[i] = splat(-kInfinity<T>);
    if (mask) {
      const uint64_t* bits[R];
      for (int i = 0; i < R; ++i) bits[i] = mask.bits + cell_of(row + i, cells) * mask.words;
      mask_scores(bits, keys, scores, ld, largest);
    } else {
      for (int64_t key = keys.begin; key < keys.end; key += kLanes<T>) {
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) largest[i] = larger(load<Vec<T>>(scores + i * ld + key), largest[i]);
      }
    }
    store(s.tile_max + row, across<Larger, T>(largest));
  });
}

// Turns S into P, as exponentiate() does, and adds its sums, given the offsets of exponents.
template <class T>
void weigh_scores(const Keys* reached, int64_t rows, Logits<T> logits, T* matrix, int64_t ld,
                  const RowStatistics<T>& s) {
  constexpr int L = kLanes<T>;
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    T* const scores = matrix + row * ld;
    const Keys keys = in_vectors<T>(reached[row]);
    Vec<T> reference[R], sum[R] = {};
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) reference[i] = splat(s.reference[row + i]);
    for (int64_t key = keys.begin; key < keys.end; key += L) {
      SPATTN_UNROLL
      for (int i = 0; i < R; ++i) {
        T* const at = scores + i * ld + key;
        store(at, weigh<T>(logits.exponent(load<Vec<T>>(at), reference[i]), sum[i]));
      }
    }
    const Vec<T> before = load<Vec<T>>(s.row_sum + row) * load<Vec<T>>(s.rescale + row);
    const Vec<T> after = across<Add, T>(sum) + before;
    memcpy(s.row_sum + row, &after, R * sizeof(T));
  });
}

// The whole softmax: keys of a row in the lanes, row statistics as in move_reference().
template <class T>
void weigh_rows(const Mask& mask, int64_t cells, const Keys* reached, int64_t rows, Logits<T> logits, T* matrix,
                int64_t ld, const RowStatistics<T>& s) {
  const int64_t vectors = (rows + kLanes<T> - 1) / kLanes<T>;
  find_largest(mask, cells, reached, rows, matrix, ld, s);
  s.move_reference(vectors, logits);
  weigh_scores(reached, rows, logits, matrix, ld, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
