// The online softmax of one tile, in base 2, one query per vector lane.
#pragma once
#include <math.h>

#include "simd/element.h"
#include "simd/exp2.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The reference point of a row moves only when the maximum outgrows it by this many bits: weights then stay below 2^8,
// which costs no accuracy, and O is almost never rescaled after the first tiles.
constexpr int kSlack = 8;

// Scores and row_max are sign(scale) * q.k; |scale| * log2(e) multiplies their difference, which is small and nearly
// exact, so that large logits lose nothing. A scale that is or rounds to 0 makes all scores 0 instead: the factor can
// always meet -inf.
template <class T> struct Scale {
  T sign, factor;
  double natural;  // natural logarithms per unit of a score

  explicit Scale(double scale) : sign(scale < 0 ? T(-1) : T(1)), natural(scale < 0 ? -scale : scale) {
    factor = T(natural * 1.4426950408889634074);  // log2(e)
    if (factor == T(0)) sign = T(0), factor = T(1);
  }
};

template <class T> void reset_softmax(int64_t vectors, Scratch<T>& s) {
  for (int64_t i = 0; i < vectors * kLanes<T>; ++i) {
    s.row_max[i] = -kInfinity<T>;
    s.origin[i] = T(0);
    s.row_sum[i] = s.weight_sum[i] = T(0);
  }
}

// The sum of N terms, N a power of 2, by halves.
template <int N, class V> SPATTN_INLINE V add_up(const V* terms) {
  if constexpr (N == 1) {
    return terms[0];
  } else {
    return add_up<N / 2>(terms) + add_up<N / 2>(terms + N / 2);
  }
}

// With a fused multiply-add, factor * score - origin where `origin` is factor * row_max rounded: its error is the same
// for all keys of a row, and natural_lse() takes it back. Without one, the difference comes first: see Scale.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

// Where the exponents of a row start: at 0 as long as nothing is allowed, for exp2(-inf - 0) = 0. From 2^28 on (2^57
// for double) a product's rounding error could leave the range of exp2: NaN, so that the exact path takes the row.
template <class T> SPATTN_INLINE Vec<T> origin_of(Vec<T> row_max, T factor) {
  constexpr T kFar = sizeof(T) == 4 ? T(0x1p28) : T(0x1p57);
  Vec<T> origin = row_max;
  if (kFused) {
    origin = row_max * factor;
    origin = origin * origin < kFar * kFar ? origin : splat(T(__builtin_nan("")));
  }
  return row_max == -kInfinity<T> ? Vec<T>{} : origin;
}

template <class T> SPATTN_INLINE Vec<T> exponent(Vec<T> score, Vec<T> origin, T factor) {
  return kFused ? score * factor - origin : (score - origin) * factor;
}

// The natural logarithm of a normal number, within 2 ulp, and something for others; without a branch or a call, so that
// loops over rows are vectorised. x = 2^n m with m between sqrt(1/2) and sqrt(2), and log(m) = 2 artanh((m - 1) / (m + 1)).
SPATTN_INLINE double logarithm(double x) {
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  const uint64_t above = bit_cast<uint64_t>(x) - kRootHalf;
  const double n = double(int64_t(above) >> 52);
  const double m = bit_cast<double>((above & 0xfffffffffffff) + kRootHalf);
  const double s = (m - 1) / (m + 1), square = s * s;
  double sum = 1.0 / 21;
  SPATTN_UNROLL
  for (int i = 19; i > 1; i -= 2) sum = sum * square + 1.0 / i;
  return n * 0.69314718055994530942 + 2 * (s + s * square * sum);
}

// The log-sum-exp of a row whose weights add up to `sum`.
template <class T> double natural_lse(T row_max, T origin, T sum, const Scale<T>& scale) {
  const double error = kFused ? double(origin) - double(row_max) * double(scale.factor) : 0;
  return double(row_max) * scale.natural + error * 0.69314718055994530942 + logarithm(double(sum));
}

// Updates row_max and leaves in s.rescale the factors by which O has to be multiplied, in s.origin what exponent()
// needs. All of it before the first weight, so that the chains of dependent instructions of several vectors overlap.
// The factor is the difference of the origins that the weights before and after were computed with, hence exactly 1
// where the origin stays: from row_max it would be off by the origin's rounding error, again with every tile, and so it
// would by a path's own coarser exp2.
template <class T> void move_origin(int64_t vectors, T factor, Scratch<T>& s) {
  using V = Vec<T>;
  for (int64_t column = 0; column < vectors * kLanes<T>; column += kLanes<T>) {
    const V before = load<V>(s.row_max + column), tile_max = load<V>(s.tile_max + column);
    const V row_max = (tile_max - before) * factor > T(kSlack) ? tile_max : before;  // -inf - -inf: NaN, not greater
    const V origin = origin_of<T>(row_max, factor);
    const V moved = load<V>(s.origin + column) - origin;
    store(s.rescale + column, exp2<T>(before == -kInfinity<T> ? before : kFused ? moved : moved * factor));
    store(s.row_max + column, row_max);
    store(s.origin + column, origin);
  }
}

// s.scores: S' of the keys [begin, end) becomes P' = exp2(factor * (S' - row_max)), as elements of the path. Updates
// row_max and row_sum.
template <class Path>
void exponentiate(int64_t begin, int64_t end, int64_t vectors, typename Path::T factor, Scratch<typename Path::T>& s) {
  using T = typename Path::T;
  using V = Vec<T>;
  constexpr int kTerms = Path::kTerms, kSums = kKeyRows / kTerms;
  const int64_t ld = s.ld_query;
  move_origin<T>(vectors, factor, s);
  for (int64_t column = 0; column < vectors * kLanes<T>; column += kLanes<T>) {
    const V origin = load<V>(s.origin + column), rescale = load<V>(s.rescale + column);
    const T* scores = s.scores + begin * ld + column;
    auto* weights = reinterpret_cast<typename Path::Element*>(s.scores) + begin / kTerms * ld + column;  // never ahead
    V sum[kSums] = {}, rounded[kSums] = {};  // several short sums round less than a long one
    for (int64_t key = begin; key < end; key += kKeyRows, scores += kKeyRows * ld, weights += kKeyRows / kTerms * ld) {
      SPATTN_UNROLL
      for (int i = 0; i < kSums; ++i) {
        V weight[kTerms];
        SPATTN_UNROLL
        for (int t = 0; t < kTerms; ++t) {
          weight[t] = Path::exp2(exponent<T>(load<V>(scores + (i * kTerms + t) * ld), origin, factor));
          sum[i] += weight[t];
        }
        store(weights + i * ld, Path::join(weight, rounded[i]));
      }
    }
    store(s.row_sum + column, load<V>(s.row_sum + column) * rescale + add_up<kSums>(sum));
    if (kTerms > 1) store(s.weight_sum + column, load<V>(s.weight_sum + column) * rescale + add_up<kSums>(rounded));
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
