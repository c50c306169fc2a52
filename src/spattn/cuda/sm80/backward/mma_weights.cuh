// P and dS of the allowed pairs of an iteration.
#pragma once
#include "sm80/scores.cuh"
#include "sm80/backward/mma_steps.cuh"

namespace spattn::sm80_backward {

// Bitmask of allowed columns for each row of a thread.
using Allowed = unsigned long long[kAtoms][2];

// Finds the allowed pairs of an iteration, for rows from row `first` of the sub-tile on; returns true if any pair must
// be masked. Bits of padding queries are undefined: padding rows are not written, and `real` clears padding columns. In
// a full tile, padding columns are zeros, which need no mask unless a score function maps them to other values.
__device__ __forceinline__ bool find_allowed(Allowed& allowed, const Pass& pass, const Shared& shared, int place,
                                             int first) {
  const unsigned* words = shared.real[place];
  const unsigned long long real = kColumns == 64 ? words[0] | (unsigned long long)words[1] << 32 : words[0];
  const Step& step = shared.step[place];
  const bool masked = step.mask != kFull;
#pragma unroll
  for (int number = 0; number < 2 * kAtoms; ++number) {
    const int row = min(first + own_row(number / 2, number % 2), pass.subtile_rows - 1);
    const long long word = static_cast<long long>(step.mask) * pass.subtile_rows + row;
    // Branch-free, so that the loads are issued early and the products hide their latency.
    allowed[number / 2][number % 2] = masked ? real & pass.bits[word] >> step.first : real;
  }
  return kScored || masked;
}

// Replaces S by P after dropout, and D by dS. `own` and `columns` hold lse and delta of queries that are rows or
// columns. Both results are 0 for masked pairs, whatever the columns hold and the score function returns.
__device__ __forceinline__ void weigh(Scores& s, Scores& d, float scale, const float2 (&own)[kAtoms][2],
                                      const float2* columns, const Allowed& allowed, bool masked,
                                      const sm80::HeadScore<float>& score, const Shared& shared, int place) {
  constexpr float kLog2E = 1.442695040888963407f;
  const float scale_log2 = kScored ? kLog2E : scale * kLog2E;
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + threadIdx.x % 4 * 2 + i % 2;
        const float2 query = kByKeys ? columns[column] : own[atom][i / 2];
        const int row_at = shared.row_position[own_row(atom, i / 2)], column_at = shared.position[place][column];
        const int query_at = kByKeys ? column_at : row_at, key_at = kByKeys ? row_at : column_at;
        const float product = s[atom][n][i], x = score(product, query_at, key_at);
        s[atom][n][i] = sm80::Softmax<float>::weight(x, scale_log2, kLog2E * query.x);
        const float kept = score.kept(query_at, key_at);
        if constexpr (kScores) {
          const float difference = score.difference(d[atom][n][i], kept, query.y);
          d[atom][n][i] = score.gradient(s[atom][n][i], difference, product, query_at, key_at);
        }
        s[atom][n][i] *= kept;
      }
    }
    if (!masked) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const sm80::Mask mask{allowed[atom][half]};
      mask.apply(s[atom], half, 0.f);
      if constexpr (kScores) mask.apply(d[atom], half, 0.f);
    }
  }
}

#if SPATTN_TABLES
using Collected = Collector<kRows, kColumns, kThreads>;

// Collects the contributions of an iteration's allowed pairs to gradients of captured arrays. `s` and `d` hold the
// products S and D; `own` holds lse and delta of the rows.
__device__ __forceinline__ void collect(Collected& collected, const Scores& s, Scores& d,
                                        const float2 (&own)[kAtoms][2], const Allowed& allowed,
                                        const sm80::HeadScore<float>& score, Shared& shared, int place) {
  constexpr float kLog2E = 1.442695040888963407f;
  const auto each = [&](auto visit) {  // visit(atom, n, i, row, column) for this thread's accumulators
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(atom, n, i, own_row(atom, i / 2), 8 * n + threadIdx.x % 4 * 2 + i % 2);
      }
    }
  };
  each([&](int atom, int n, int i, int row, int column) {
    const int query = shared.row_position[row], key = shared.position[place][column];
    const bool present = query >= 0 && sm80::Mask{allowed[atom][i / 2]}.allows(column);
    const float2 statistics = own[atom][i / 2];
    const float x = score(s[atom][n][i], query, key);
    const float weight = present ? sm80::Softmax<float>::weight(x, kLog2E, kLog2E * statistics.x) : 0.f;
    const float difference = score.difference(d[atom][n][i], score.kept(query, key), statistics.y);
    d[atom][n][i] = weight == 0.f ? 0.f : weight * difference;
  });
  Score::Uses::for_each([&](auto use) {
    each([&](int atom, int n, int i, int row, int column) {
      shared.contributions[row][column] = score.contribution(use, s[atom][n][i], shared.row_position[row],
                                                             shared.position[place][column], d[atom][n][i]);
    });
    __syncthreads();
    collected.collect(use, shared.contributions, shared.row_position, shared.position[place], score);
    __syncthreads();
  });
}
#endif

}  // namespace spattn::sm80_backward
