// The two matrix products of a tile, on register-blocked micro-kernels: S' = K Q' and O += P V. The path defines how
// elements multiply: plain.h.
#pragma once
#include "forward/scratch.h"
#include "simd/native.h"
#include "simd/vec.h"
#include "softmax/logits.h"
#include "tile/mask.h"
#include "tile/operand.h"

namespace spattn {
namespace SPATTN_ISA {

// Whether the score product prefetches to the L1 cache: the keys two blocks ahead, and the values of the current block.
// One cache line of each row per 2 kKeyRows features fits float32 with AVX-512; other types and narrower vectors have
// too little time between loads.
template <class Path>
constexpr bool kPrefetches = Path::kTerms == 1 && 2 * kKeyRows * sizeof(typename Path::Element) == 64;

// kKeyRows rows of S' by N vectors of queries. Masked pairs become -inf; updates the maximum in `tile_max`. Never
// inlined: the loop needs all registers.
template <class Path, int N, bool kMasked>
__attribute__((noinline)) void score_block(Operand<typename Path::Element> keys, Operand<typename Path::Element> values,
                                           int64_t depth, int64_t key, int64_t column,
                                           ForwardScratch<typename Path::T>& s) {
  using T = typename Path::T;
  using Element = typename Path::Element;
  constexpr int L = kLanes<T>;
  constexpr int64_t kBits = LaneMask<T>::kBits;
  const Element *left = keys.data + key * keys.ld, *query = reinterpret_cast<const Element*>(s.query) + column;
  const int64_t ld_key = keys.ld, ld_query = s.width.query;
  const Element *soon = left + 2 * kKeyRows * ld_key, *value = values.data + key * values.ld;
  Vec<T> sum[kKeyRows][N] = {};
  for (int64_t d = 0; d < depth; ++d) {
    if (kPrefetches<Path>) {
      constexpr int kLine = 2 * kKeyRows;
      const int64_t row = d % kKeyRows, line = d / kLine * kLine;
      __builtin_prefetch(d & kKeyRows ? value + row * values.ld + line : soon + row * ld_key + line);
    }
    typename Path::Vector right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) right[j] = load<typename Path::Vector>(query + d * ld_query + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      const typename Path::Vector scalar = Path::splat(left[i * ld_key + d]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = Path::multiply_add(sum[i][j], scalar, right[j]);
    }
  }
  const Word<T>* allowed = s.mask.words(key, column);
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    Vec<T> largest = load<Vec<T>>(s.rows.tile_max + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      Vec<T> score = sum[i][j];
      if (kMasked) {
        const BitsVec<T> bit = load<BitsVec<T>>(allowed + j * L) & splat_bits<T>(Word<T>(1) << (key % kBits + i));
        score = Logits<T>::masked(score, bit);
      }
      largest = larger(score, largest);
      store(s.scores + (key + i) * ld_query + column + j * L, score);
    }
    store(s.rows.tile_max + column + j * L, largest);
  }
}

// Computes s.scores = S' and s.rows.tile_max, the largest allowed score of each query, for the first `vectors` vectors
// of queries and whole blocks of keys. Without a mask every pair is allowed. If not `final`, a score function and
// mask_scores() follow.
template <class Path>
void compute_scores(Operand<typename Path::Element> keys, Operand<typename Path::Element> values, Keys blocks,
                    int64_t head_dim, int64_t vectors, bool mask, bool final, ForwardScratch<typename Path::T>& s) {
  using T = typename Path::T;
  constexpr int L = kLanes<T>;
  const int64_t depth = (head_dim + Path::kTerms - 1) / Path::kTerms;
  for (int64_t j = 0; j < vectors * L; j += L) store(s.rows.tile_max + j, splat(-kInfinity<T>));
  const auto mark = [&](int64_t key, int64_t column) {
    store(s.scores + key * s.width.query + column, splat(-kInfinity<T>));
  };
  s.mask.each_block(blocks, vectors, mask, mark, [&](auto some, int64_t key, int64_t column) {
    constexpr int N = decltype(some)::value;
    if (mask && final) {
      score_block<Path, N, true>(keys, values, depth, key, column, s);
    } else {
      score_block<Path, N, false>(keys, values, depth, key, column, s);
    }
  });
}

// Masks S' of whole blocks of keys and computes s.rows.tile_max, after a score function.
template <class T> void mask_scores(Keys blocks, int64_t vectors, bool mask, ForwardScratch<T>& s) {
  for (int64_t column = 0; column < vectors * kLanes<T>; column += kLanes<T>) {
    Vec<T> largest = splat(-kInfinity<T>);
    for (int64_t key = blocks.begin; key < blocks.end; ++key) {
      T* const at = s.scores + key * s.width.query + column;
      if (mask) {
        const Word<T> bit = Word<T>(1) << key % LaneMask<T>::kBits;
        const BitsVec<T> allowed = load<BitsVec<T>>(s.mask.words(key, column)) & splat_bits<T>(bit);
        store(at, Logits<T>::masked(load<Vec<T>>(at), allowed));
      }
      largest = larger(load<Vec<T>>(at), largest);
    }
    store(s.rows.tile_max + column, largest);
  }
}

// The keys that any of the `count` rows from `row` on attends to; the other weights are 0.
struct AllowedKeys {
  Keys keys;
  const Mask& mask;
  int64_t row, count;

  template <int kTerms, class Visit> SPATTN_INLINE void each(const Visit& visit) const {
    static_assert(kTerms <= 2, "terms are neighbouring keys");
    for (int64_t word = keys.begin / 64; word * 64 < keys.end; ++word) {
      uint64_t bits = mask.merged(row, count, word) & keys.in_word(word);
      if (kTerms == 2) bits = (bits | bits >> 1) & 0x5555555555555555;
      for (; bits; bits &= bits - 1) visit((word * 64 + __builtin_ctzll(bits)) / kTerms);
    }
  }
};

// R rows of O by N vectors: O = rescale * O + P V, or P V for the first tile of an item. The products of a tile are
// summed before they are added to O, which keeps the rounding error of long lists small.
template <class Path, int R, int N, class Some, class T = typename Path::T, class Element = typename Path::Element>
SPATTN_INLINE void output_block(const Element* weights, int64_t ld_weight, Operand<Element> values, const Some& keys,
                                const T* rescale, T* output, int64_t ld_output) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  keys.template each<Path::kTerms>([&](int64_t key) __attribute__((always_inline)) {
    typename Path::Vector right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) right[j] = load<typename Path::Vector>(values.data + key * values.ld + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const typename Path::Vector left = Path::splat(weights[key * ld_weight + i]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = Path::multiply_add(sum[i][j], left, right[j]);
    }
  });
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      T* out = output + i * ld_output + j * L;
      if (rescale) sum[i][j] += load<Vec<T>>(out) * rescale[i];
      store(out, sum[i][j]);
    }
  }
}

// Rows [row, row + R) of the N vectors of O from `column` on.
template <class Path, int R, int N>
SPATTN_INLINE void output_rows(Operand<typename Path::Element> values, Keys keys, const Mask& mask, int64_t row,
                               int64_t column, bool first, ForwardScratch<typename Path::T>& s) {
  const auto* weights = reinterpret_cast<const typename Path::Element*>(s.scores) + row;
  values.data += column;
  const auto* rescale = first ? nullptr : s.rows.rescale + row;
  auto* output = s.output.row(row) + column;
  const int64_t ld = s.width.query, ld_output = s.output.ld;
  if (mask) {
    output_block<Path, R, N>(weights, ld, values, AllowedKeys{keys, mask, row, R}, rescale, output, ld_output);
  } else {
    output_block<Path, R, N>(weights, ld, values, keys, rescale, output, ld_output);
  }
}

// N vectors of O, for the query cells [0, cells) and up to one more.
template <class Path, int N>
void output_columns(Operand<typename Path::Element> values, Keys keys, int64_t cells, const Mask& mask, int64_t column,
                    bool first, ForwardScratch<typename Path::T>& s) {
  static_assert(kOutputRows == 6, "the remainders below");
  int64_t row = 0;
  for (; cells - row > 4; row += 6) output_rows<Path, 6, N>(values, keys, mask, row, column, first, s);
  for (; cells - row > 0; row += 2) output_rows<Path, 2, N>(values, keys, mask, row, column, first, s);
}

// O = rescale * O + P V, or P V for the first tile.
template <class Path>
void accumulate_output(Operand<typename Path::Element> values, Keys keys, int64_t cells, const Mask& mask, bool first,
                       ForwardScratch<typename Path::T>& s) {
  constexpr int L = kLanes<typename Path::T>, W = kOutputVectors;
  int64_t column = 0;
  for (; s.output.ld - column >= W * L; column += W * L) {
    output_columns<Path, W>(values, keys, cells, mask, column, first, s);
  }
  for (; s.output.ld - column >= 2 * L; column += 2 * L) {
    output_columns<Path, 2>(values, keys, cells, mask, column, first, s);
  }
  if (column < s.output.ld) output_columns<Path, 1>(values, keys, cells, mask, column, first, s);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
