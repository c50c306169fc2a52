// The two matrix products of a tile, S' = K Q' and O += P V. The path defines how to multiply elements: plain.h.
#pragma once
#include "forward/scratch.h"
#include "simd/native.h"
#include "simd/vec.h"
#include "softmax/logits.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/product.h"

namespace spattn {
namespace SPATTN_ISA {

// True if the score product prefetches to the L1 cache: the keys two blocks ahead, and V of the current block. Each
// iteration over a feature prefetches one cache line. This rate fits float32 with AVX-512, where a line holds 2
// kKeyRows features; other types and narrower vectors have too little time between loads.
template <class Path>
constexpr bool kPrefetches = Path::kTerms == 1 && 2 * kKeyRows * sizeof(typename Path::Element) == 64;

// Iterates over the features in the score product, and prefetches.
template <class Path> struct FeatureSteps {
  using Element = typename Path::Element;
  int64_t width;
  const Element *soon, *value;  // rows of K and V to prefetch
  int64_t ld_key, ld_value;

  template <int kTerms, class Visit> SPATTN_INLINE void each(const Visit& visit) const {
    Keys{0, width}.each<kTerms>([&](int64_t d) __attribute__((always_inline)) {
      if (kPrefetches<Path>) {
        constexpr int kLine = 2 * kKeyRows;
        const int64_t row = d % kKeyRows, line = d / kLine * kLine;
        __builtin_prefetch(d & kKeyRows ? value + row * ld_value + line : soon + row * ld_key + line);
      }
      visit(d);
    });
  }
};

// Computes S' for kKeyRows keys by N vectors of queries, -inf for masked pairs, and updates `tile_max`. With a score
// function that is not linear, score_tile() masks and updates instead. Not inlined, because the loop needs all
// registers.
template <class Path, int N, bool kMasked, class T = typename Path::T, class Element = typename Path::Element>
__attribute__((noinline)) void score_block(Operand<Element> keys, Operand<Element> values, int64_t head_dim,
                                           int64_t key, int64_t column, ForwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  const int64_t ld = s.width.query, at = key * ld + column;
  const Element* left = keys.data + key * keys.ld;
  Vec<T> sum[kKeyRows][N] = {};
  const FeatureSteps<Path> steps = {head_dim, left + 2 * kKeyRows * keys.ld, values.data + key * values.ld, keys.ld,
                                    values.ld};
  multiply<Path>(left, keys.ld, 1, {reinterpret_cast<const Element*>(s.query) + column, ld}, steps, sum);
  if (s.score && s.linear.possible) {
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] = s.linear(sum[i][j], key + i, column + j * L);
    }
  } else if (s.score) {
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows * N; ++i) store(s.scores + at + i / N * ld + i % N * L, sum[i / N][i % N]);
    return;
  }
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    Vec<T> largest = load<Vec<T>>(s.rows.tile_max + column + j * L);
    SPATTN_UNROLL
    for (int i = 0; i < kKeyRows; ++i) {
      if (kMasked) sum[i][j] = Logits<T>::masked(sum[i][j], s.mask.bit(key + i, column + j * L));
      largest = larger(sum[i][j], largest);
      store(s.scores + at + i * ld + j * L, sum[i][j]);
    }
    store(s.rows.tile_max + column + j * L, largest);
  }
}

// Applies the score function to the scores of the keys in `blocks`, masks them, and updates `tile_max`.
template <bool kMasked, class T> void score_tile(Keys blocks, ForwardScratch<T>& s) {
  const int64_t ld = s.width.query;
  T* const scores = s.scores + blocks.begin * ld;
  s.score.run_pairs([&](int64_t column, int64_t row, int64_t count, auto score) __attribute__((always_inline)) {
    Vec<T> largest = load<Vec<T>>(s.rows.tile_max + column);
    for (int64_t at = row; at < row + count; ++at) {
      Vec<T> found = score(at);
      if (kMasked) found = Logits<T>::masked(found, s.mask.bit(blocks.begin + at, column));
      largest = larger(found, largest);
      store(scores + at * ld + column, found);
    }
    store(s.rows.tile_max + column, largest);
  });
}

// Computes s.scores = S' and s.rows.tile_max, the maximum allowed score of each query, for the first `vectors` vectors
// of queries and the keys `blocks`, which are rounded to multiples of kKeyRows.
template <class Path, class T = typename Path::T>
void compute_scores(Operand<typename Path::Element> keys, Operand<typename Path::Element> values, Keys blocks,
                    int64_t head_dim, int64_t vectors, bool mask, ForwardScratch<T>& s) {
  constexpr int L = kLanes<T>;
  for (int64_t j = 0; j < vectors * L; j += L) store(s.rows.tile_max + j, splat(-kInfinity<T>));
  if (s.score) {
    s.score.template place<false>(s.position.key + blocks.begin, blocks.end - blocks.begin, s.position.query,
                                  vectors * L, s.scores + blocks.begin * s.width.query, s.width.query, 0);
    s.linear = s.score.linear(blocks.begin);
  }
  const auto mark = [&](int64_t key, int64_t column) {
    store(s.scores + key * s.width.query + column, splat(-kInfinity<T>));
  };
  s.mask.each_block(blocks, vectors, mask, mark, [&](auto some, int64_t key, int64_t column) {
    constexpr int N = decltype(some)::value;
    const auto run = mask ? score_block<Path, N, true> : score_block<Path, N, false>;
    run(keys, values, head_dim, key, column, s);
  });
  if (s.score && !s.linear.possible) mask ? score_tile<true>(blocks, s) : score_tile<false>(blocks, s);
}

// Iterates over the keys to which any of rows [row, row + count) attends. All other weights are 0.
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

// Computes O = rescale * O + P V for R rows by N vectors of features, or O = P V if `rescale` is null. Sums the terms
// of a tile before adding them to O, which keeps the rounding error of long key tile lists small.
template <class Path, int R, int N, class Some, class T = typename Path::T, class Element = typename Path::Element>
SPATTN_INLINE void output_block(const Element* weights, int64_t ld_weight, Operand<Element> values, const Some& keys,
                                const T* rescale, T* output, int64_t ld_output) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  multiply<Path>(weights, 1, ld_weight, values, keys, sum);
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

// Calls output_block() for the rows [row, row + R) and the N vectors of features from `column` on.
template <class Path, int R, int N>
SPATTN_INLINE void output_rows(Operand<typename Path::Element> values, Keys keys, const Mask& mask, int64_t row,
                               int64_t column, bool first, ForwardScratch<typename Path::T>& s) {
  const auto* weights = reinterpret_cast<const typename Path::Element*>(s.scores) + row;
  values.data += column;
  const auto* rescale = first ? nullptr : s.rows.rescale + row;
  auto* output = s.output + row * s.width.value + column;
  const int64_t ld = s.width.query, ld_output = s.width.value;
  if (mask) {
    output_block<Path, R, N>(weights, ld, values, AllowedKeys{keys, mask, row, R}, rescale, output, ld_output);
  } else {
    output_block<Path, R, N>(weights, ld, values, keys, rescale, output, ld_output);
  }
}

// Updates rows [0, cells) of O, and one more if `cells` is odd, in the N vectors of features from `column` on.
template <class Path, int N>
void output_columns(Operand<typename Path::Element> values, Keys keys, int64_t cells, const Mask& mask, int64_t column,
                    bool first, ForwardScratch<typename Path::T>& s) {
  static_assert(kOutputRows == 6, "the remainders below");
  int64_t row = 0;
  for (; cells - row > 4; row += 6) output_rows<Path, 6, N>(values, keys, mask, row, column, first, s);
  for (; cells - row > 0; row += 2) output_rows<Path, 2, N>(values, keys, mask, row, column, first, s);
}

// Computes O = rescale * O + P V, or O = P V for the first tile of an item.
template <class Path>
void accumulate_output(Operand<typename Path::Element> values, Keys keys, int64_t cells, const Mask& mask, bool first,
                       ForwardScratch<typename Path::T>& s) {
  constexpr int64_t L = kLanes<typename Path::T>;
  in_blocks<kOutputVectors>(s.width.value / L, [&](auto vectors, int64_t column) {
    output_columns<Path, decltype(vectors)::value>(values, keys, cells, mask, column * L, first, s);
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
