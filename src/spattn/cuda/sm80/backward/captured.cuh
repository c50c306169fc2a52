// Gradients of captured arrays: sums of the contributions of pairs, bitwise reproducible in any order of the CTAs.
//
// Each element has an exact accumulator. If all pairs of a row, column, diagonal or tile share an element, their
// contributions are first summed in a fixed order.
#pragma once

#include "common/warp.cuh"
#include "common/accumulator.cuh"
#include "sm80/scores.cuh"

namespace spattn::sm80_backward {

constexpr bool kCaptured = SPATTN_TABLES > 0;  // accumulates gradients of captured arrays, instead of dK, dV and dQ

#if SPATTN_TABLES
// Collects the contributions of a CTA's tiles of kRows queries and kColumns keys.
template <int kRows, int kColumns, int kThreads>
struct Collector {
  using Tile = Sum[kRows][kColumns + 1];  // contributions; 0 for pairs that are not allowed
  using Head = Score::Head<Sum>;

  const Captured& captured;
  double totals[Score::Uses::kCount > 0 ? Score::Uses::kCount : 1] = {};  // of this thread, by use

  __device__ explicit Collector(const Captured& captured) : captured(captured) {}

  __device__ __forceinline__ void add(int table, long long index, double x) const {
    const long long at = captured.first[table] + index - captured.begin;
    if (index >= 0 && at >= 0 && at < captured.count) {
      add_exactly(static_cast<unsigned long long*>(captured.words) + at * kWords, x);
    }
  }

  // Adds a tile, which all threads have written. `rows` and `columns` are positions in q and k, -1 for padding.
  template <class Use>
  __device__ __forceinline__ void collect(Use, const Tile& tile, const int* rows, const int* columns,
                                          const sm80::HeadScore<Sum>& score) {
    if constexpr (Use::kScope == ScoreScope::head) {
      double sum = 0;
      for (int cell = threadIdx.x; cell < kRows * kColumns; cell += kThreads)
        sum += tile[cell / kColumns][cell % kColumns];
      totals[Use::kNumber] += sum;
    } else if constexpr (Use::kScope == ScoreScope::query) {
      for (int r = threadIdx.x; r < kRows; r += kThreads) {
        double sum = 0;
        for (int c = 0; c < kColumns; ++c) sum += tile[r][c];
        if (sum != 0) add(Use::kTable, index<Use>(rows[r], 0, score), sum);
      }
    } else if constexpr (Use::kScope == ScoreScope::key) {
      for (int c = threadIdx.x; c < kColumns; c += kThreads) {
        double sum = 0;
        for (int r = 0; r < kRows; ++r) sum += tile[r][c];
        if (sum != 0) add(Use::kTable, index<Use>(0, columns[c], score), sum);
      }
    } else {
      const int step = Use::kScope == ScoreScope::diagonal ? common_step(rows, columns) : 0;
      if (step) collect_diagonals<Use>(tile, rows, columns, step, score);
      else collect_pairs<Use>(tile, rows, columns, score);
    }
  }

  // Adds the totals of uses with one element per head, after the last tile.
  __device__ __forceinline__ void finish(const sm80::HeadScore<Sum>& score) {
    Score::Uses::for_each([&](auto use) {
      if constexpr (decltype(use)::kScope == ScoreScope::head) {
        const double sum = warp_sum(totals[use.kNumber]);
        if (threadIdx.x % 32 == 0 && sum != 0) add(use.kTable, index<decltype(use)>(0, 0, score), sum);
      }
    });
  }

 private:
  template <class Use>
  static __device__ __forceinline__ long long index(int row, int column, const sm80::HeadScore<Sum>& score) {
    return Use::template index<Sum>(row + score.query_offset, column, score.head);
  }

  // Returns the distance between consecutive rows if it equals that between consecutive columns, else 0. All threads
  // must call it.
  static __device__ __forceinline__ int common_step(const int* rows, const int* columns) {
    const int step = columns[1] - columns[0];
    bool regular = rows[0] >= 0 && columns[0] >= 0 && columns[1] >= 0;
    for (int r = threadIdx.x; r < kRows; r += kThreads) regular &= rows[r] < 0 || rows[r] == rows[0] + r * step;
    for (int c = threadIdx.x; c < kColumns; c += kThreads) {
      regular &= columns[c] < 0 || columns[c] == columns[0] + c * step;
    }
    return __syncthreads_and(regular) ? step : 0;
  }

  template <class Use>
  __device__ __forceinline__ void collect_diagonals(const Tile& tile, const int* rows, const int* columns, int step,
                                                    const sm80::HeadScore<Sum>& score) const {
    for (int d = static_cast<int>(threadIdx.x) - kColumns + 1; d < kRows; d += kThreads) {
      const int row = max(d, 0), column = max(-d, 0);
      double sum = 0;
      for (int i = 0; row + i < kRows && column + i < kColumns; ++i) sum += tile[row + i][column + i];
      if (sum != 0) add(Use::kTable, index<Use>(rows[0] + row * step, columns[0] + column * step, score), sum);
    }
  }

  template <class Use>
  __device__ __forceinline__ void collect_pairs(const Tile& tile, const int* rows, const int* columns,
                                                const sm80::HeadScore<Sum>& score) const {
    for (int cell = threadIdx.x; cell < kRows * kColumns; cell += kThreads) {
      const int row = cell / kColumns, column = cell % kColumns;
      const Sum x = tile[row][column];
      if (x == 0) continue;
      const long long at = index<Use>(rows[row], columns[column], score);
      if constexpr (Use::kDirect) {
        if (at >= 0) static_cast<Sum*>(captured.direct[Use::kTable])[at] = x;
      } else {
        add(Use::kTable, at, x);
      }
    }
  }
};
#endif

}  // namespace spattn::sm80_backward
