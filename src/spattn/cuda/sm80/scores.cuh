// Scores, masks and softmax weights between the two products of every kernel, forward and backward.
//
//   HeadScore  x = f(scale · q·k, query position, key position), with f of common/score.cuh
//   Mask       sets the score of a masked pair to −inf, or its weight to 0, whatever f returns for it
//   Softmax    weight exp(x − reference): the running maximum in the forward, lse in the backward
//
// Without a score function, x is the product itself and the exponent includes the scale: one FFMA, one MUFU per weight.
//
// A thread of a tensor-core kernel holds rows g and g + 8 of a 16-row atom, g = lane / 4, and columns
// 8 n + 2 (lane % 4) + {0, 1}: mma.m16n8's accumulator layout. The four lanes of a quad share a row.
#pragma once
#include "common/element.cuh"
#include "common/fallback_softmax.cuh"
#include "common/score.cuh"
#include "common/sink.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80 {

// Score function of a query head of a batch entry.
template <typename T>
struct HeadScore {
  T scale = 0;
  int query_offset = 0;
  Score::Head<T> head;

  __device__ HeadScore(const ScoreParams& params, int batch, int head_q) {
    if constexpr (kScored) {
      scale = static_cast<T>(params.scale), query_offset = params.query_offset;
      head = Score::open<T>(*params.args, query_offset, batch, head_q);
    }
  }
  // Returns the score x for a product q · k.
  __device__ __forceinline__ T operator()(T product, int query, int key) const {
    if constexpr (!kScored) return product;
    return Score::value(product * scale, query + query_offset, key, head);
  }
  // Returns the factor of a pair's weight after the softmax: 0 if dropout drops it.
  __device__ __forceinline__ T kept(int query, int key) const {
    if constexpr (!Score::kDrops) return 1;
    return head.dropout.of(query + query_offset, key);
  }
  // Returns dP - delta, given dP without dropout and kept().
  static __device__ __forceinline__ T difference(T upstream, T kept, T delta) {
    return (Score::kDrops ? upstream * kept : upstream) - delta;
  }
  // Returns dS = P (dP - delta) f', given P and dP - delta; 0 if P is 0: where f masks a pair, f' is arbitrary.
  __device__ __forceinline__ T gradient(T weight, T difference, T product, int query, int key) const {
    if constexpr (!kScored) return weight * difference;
    if (weight == 0) return 0;
    return weight * difference * Score::derivative(product * scale, query + query_offset, key, head);
  }
  // Returns a pair's contribution to the gradient of a captured array; `gradient` is that of x, 0 for a masked pair.
  template <class Use>
  __device__ __forceinline__ T contribution(Use, T product, int query, int key, T gradient) const {
    return Use::template contribution<T>(product * scale, query + query_offset, key, head, gradient);
  }
};

// Allowed columns of a row, at most 64.
struct Mask {
  unsigned long long bits;

  __device__ __forceinline__ bool allows(int column) const { return bits >> column & 1; }

  // Sets columns that are not allowed to `masked`, in row g (`half` = 0) or g + 8 (1) of an atom.
  template <int kAtoms8>
  __device__ __forceinline__ void apply(float (&s)[kAtoms8][4], int half, float masked) const {
    const int shift = 2 * (threadIdx.x % 4);
    const unsigned words[2] = {static_cast<unsigned>(bits) >> shift, static_cast<unsigned>(bits >> 32) >> shift};
#pragma unroll
    for (int n = 0; n < kAtoms8; ++n) {
      const unsigned word = words[n / 4];
      if (!(word & (1u << (8 * (n % 4))))) s[n][2 * half] = masked;
      if (!(word & (2u << (8 * (n % 4))))) s[n][2 * half + 1] = masked;
    }
  }
};

// Online softmax of a row.
template <typename T>
struct Softmax {
  T row_max = -infinity<T>();  // maximum of x · scale_log2, rounded once
  T row_sum = 0;               // over this lane's columns

  static __device__ __forceinline__ T weight(T x, T scale_log2, T reference) {
    return power_of_two(fma(x, scale_log2, -reference));
  }

  // Replaces this lane's scores of a row by weights relative to the new running maximum; returns the factor that
  // rescales earlier sums. All terms use the same rounded row_max, so its rounding cancels. A row without keys keeps
  // the maximum −inf but subtracts 0: its terms are exp2(−inf) = 0, not NaN.
  //
  //   pairs(visit)  calls visit(x, y) for all pairs of the lane's columns
  //   largest(x)    returns the maximum over the lanes that share the row
  template <typename Pairs, typename Largest>
  __device__ __forceinline__ T update(T scale_log2, Pairs pairs, Largest largest) {
    T next = -infinity<T>(), sum = 0;
    pairs([&](T& x, T& y) { next = fmax(next, fmax(x, y)); });
    next = fmax(row_max, largest(next) * scale_log2);
    const T reference = next == -infinity<T>() ? T(0) : next;
    const T rescale = power_of_two(row_max - reference);
    pairs([&](T& x, T& y) {
      sum += x = weight(x, scale_log2, reference);
      sum += y = weight(y, scale_log2, reference);
    });
    row_sum = row_sum * rescale + sum;
    row_max = next;
    return rescale;
  }

  // These functions require row_sum over all columns.
  __device__ __forceinline__ T inverse() const { return row_sum == 0 ? T(0) : 1 / row_sum; }
  __device__ __forceinline__ T lse() const {
    const T natural = (row_max + logarithm_of_two(row_sum)) * T(0.693147180559945309417);
    return row_sum == 0 ? -infinity<T>() : natural;
  }
  __device__ __forceinline__ bool in_range() const { return is_finite(row_sum) && within_reach(row_max); }
};

}  // namespace spattn::sm80
