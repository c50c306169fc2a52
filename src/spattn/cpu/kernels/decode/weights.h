// Softmax of the decode kernel, with keys in the lanes.
#pragma once
#include "kernels.h"
#include "simd/blocking.h"
#include "simd/native.h"
#include "simd/reduce.h"
#include "softmax/softmax.h"
#include "tile/mask.h"

namespace spattn {
namespace SPATTN_ISA {

// Returns the query tile cell of a row; each head has `cells` rows.
inline int64_t cell_of(int64_t row, int64_t cells) { return row < cells ? row : row % cells; }

// Sets reached[row], for the first row of each register block, to the range of keys to which any row of the block
// attends.
template <class T>
void find_reached(const Mask& mask, int64_t cells, int64_t count, int64_t rows, Keys* reached) {
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    const Keys every = {0, count};
    if (!mask) {
      reached[row] = every;
      return;
    }
    Keys own = {count, 0};
    for (int64_t word = 0; word < mask.words; ++word) {
      uint64_t any = 0;
      for (int i = 0; i < R; ++i) any |= mask.bits[cell_of(row + i, cells) * mask.words + word];
      own.cover(word, any);
    }
    reached[row] = own.within(every);
  });
}

// Expands the mask bits from `key` on to lanes, in the form that Logits::masked() takes.
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
  if constexpr (kLanes<T> == 8) {  // one load broadcasts a byte
    return (BitsVec<T>)_mm256_set1_epi8(reinterpret_cast<const char*>(bits)[key / 8]) & lane;
  }
#endif
  return splat_bits<T>(Word<T>(bits[key / 64] >> (key % 64))) & lane;
}
#endif

// Rounds a key range outward to multiples of kLanes.
template <class T> Keys in_vectors(Keys keys) {
  return {keys.begin / kLanes<T> * kLanes<T>, round_up(keys.end, kLanes<T>)};
}

// Masks the scores, and writes the maximum of each row to tile_max.
template <class T>
void find_largest(const Mask& mask, int64_t cells, const Keys* reached, int64_t rows, T* matrix, int64_t ld,
                  const RowStatistics<T>& s) {
  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
    constexpr int R = decltype(some)::value;
    T* const scores = matrix + row * ld;
    const Keys keys = in_vectors<T>(reached[row]);
    const uint64_t* bits[R];
    for (int i = 0; mask && i < R; ++i) bits[i] = mask.bits + cell_of(row + i, cells) * mask.words;
    Vec<T> largest[R];
    for (int i = 0; i < R; ++i) largest[i] = splat(-kInfinity<T>);
    const auto read = [&](auto masked) {
      for (int64_t key = keys.begin; key < keys.end; key += kLanes<T>) {
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) {
          T* const at = scores + i * ld + key;
          Vec<T> score = load<Vec<T>>(at);
          if constexpr (decltype(masked)::value) store(at, score = Logits<T>::masked(score, lanes_of<T>(bits[i], key)));
          largest[i] = larger(score, largest[i]);
        }
      }
    };
    mask ? read(Count<1>{}) : read(Count<0>{});
    store(s.tile_max + row, across<Larger, T>(largest));
  });
}

// Replaces S by P, and updates row_sum; exponentiate() is its counterpart with queries in the lanes.
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

// Runs the online softmax of a tile: replaces S by P, and updates the row statistics.
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
