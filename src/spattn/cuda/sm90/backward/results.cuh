// Epilogue of an item: stages tiles for the writer, or stores float32 partials; recomputes non-finite rows.
#pragma once

#include "sm90/forward/softmax.cuh"
#include "sm90/backward/fallback_row.cuh"
#include "sm90/backward/query_sums.cuh"

namespace spattn::sm90_backward {

struct Results {
  const Warpgroup& own;

  // Returns a bitmask whose bit r is set if row r of this warp's 16 has a non-finite sum.
  template <int kCount>
  __device__ __forceinline__ uint32_t nonfinite_rows(const float (&sums)[kCount]) const {
    float probe[2];
    probe_rows(sums, probe);
    uint32_t rows = 0;
    if (__any_sync(0xffffffff, !(probe[0] + probe[1] == 0.0f))) {
      for (int h = 0; h < 2; ++h) {
        const uint32_t lanes = __ballot_sync(0xffffffff, !(probe[h] == 0.0f));
        for (int r = 0; r < 8; ++r) rows |= uint32_t((lanes >> (4 * r) & 15) != 0) << (8 * h + r);
      }
    }
    return rows;
  }

  // Stages rows, narrowed, in this warpgroup's rows of a result tile, for the writer to store.
  template <int kCount>
  __device__ __forceinline__ void stage_tile(const float (&o)[kCount], int result) {
    const uint8_t* tile = own.shared.result(own.rows.stage, result);
#pragma unroll
    for (int i = 0; i < kCount / 4; i += 2) {
      store_matrices(own.matrix_address(tile, i % 8) + i / 8 * kBlock * kRowBytes, narrow2(o[4 * i], o[4 * i + 1]),
                     narrow2(o[4 * i + 2], o[4 * i + 3]), narrow2(o[4 * i + 4], o[4 * i + 5]),
                     narrow2(o[4 * i + 6], o[4 * i + 7]));
    }
  }

  // Returns the row of the item to which accumulators 2 h and 2 h + 1 of every four belong.
  __device__ __forceinline__ int row_of(int h) const {
    return own.number * kSubtile + own.thread / 32 * 16 + 8 * h + own.thread % 32 / 4;
  }

  // Returns the address of workspace row `row` of the task's head.
  __device__ __forceinline__ float* partial_of(float* partial, int row, int features) const {
    return partial + partial_row(own.p, own.assigned().task, row) * features;
  }

  // Returns the range of partials to add to a row of an in-kernel reduction.
  __device__ __forceinline__ int2 rest_of(int row) const {
    const int* found = own.p.rest_indptr + (-2 - own.assigned().work.slot) * kBlock + row;
    return make_int2(found[0], found[1]);
  }

  template <int kCount>
  __device__ __forceinline__ void add_rest(float (&o)[kCount], float* partial, int features) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 rest = rest_of(row_of(h));
#pragma unroll 1
      for (int s = rest.x; s < rest.y; ++s) {
        const float* source = partial_of(partial, own.p.rest_sources[s], features);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
          const int column = 8 * i + own.thread % 4 * 2;
          const float2 x = column < features ? __ldcs(reinterpret_cast<const float2*>(source + column)) : float2{};
          o[4 * i + 2 * h] += x.x, o[4 * i + 2 * h + 1] += x.y;
        }
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store_partial(const float (&o)[kCount], float* partial, int features) {
    const int lane = own.thread % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* target = partial_of(partial, own.assigned().work.slot * kBlock + row_of(h), features);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        if (column < features) {
          *reinterpret_cast<float2*>(target + column) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
        }
      }
    }
  }

  // Overwrites one feature of a staged row or partial.
  __device__ __forceinline__ void overwrite(int row, int d, double value, int result, float* partial, int features) {
    const int slot = own.assigned().work.slot;
    if (slot >= 0) {
      if (d < features) partial_of(partial, slot * kBlock + row, features)[d] = float(value);
    } else {
      const int2 rest = slot < -1 && d < features ? rest_of(row) : make_int2(0, 0);
      for (int s = rest.x; s < rest.y; ++s) value += partial_of(partial, own.p.rest_sources[s], features)[d];
      const int chunk = d % 64 / 8 ^ row % 8;
      uint8_t* at =
          own.shared.result(own.rows.stage, result) + (d / 64 * kBlock + row) * kRowBytes + chunk * 16 + d % 8 * 2;
      narrow(float(value), *reinterpret_cast<Element*>(at));
    }
  }

  __device__ __forceinline__ void write_fallback_rows(uint32_t rest) {
    const int lane = own.thread % 32;
    __syncwarp();
#pragma unroll 1
    for (; rest; rest &= rest - 1) {
      const FallbackRow exact = {own.p, own.assigned(), own.number * kSubtile + own.thread / 32 * 16 + __ffs(rest) - 1};
      int64_t position;
      if (!exact.position(position)) continue;
      const FallbackSums sums = exact.sums(position);
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const int d = lane + 32 * i;
        if (kScores) overwrite(exact.row, d, sums.scores[i], 0, own.p.partial[0], own.p.head_dim);
        if (kValues && i < kDimV / 32)
          overwrite(exact.row, d, sums.values[i], kScores, own.p.partial[1], own.p.head_dim_v);
      }
    }
  }

  // Multiplies sums of weights by the factor that dropout gives these.
  template <class Args = ScoreArgs>
  __device__ __forceinline__ void scale_kept(float (&sums)[kValueSums]) const {
    if constexpr (Score::kDrops) {
      const float factor = kept_factor<Args>(own.p);
#pragma unroll
      for (float& sum : sums) sum *= factor;
    }
  }

  // Hands a task's results to the writer, or stores them in the workspace.
  __device__ __forceinline__ void finish(float (&scores)[kScoreSums], float (&values)[kValueSums],
                                         QueryProducts& queries) {
    const Params& p = own.p;
    uint32_t exact = 0;
    if constexpr (kScores) {
#pragma unroll
      for (int i = 0; i < kScoreSums; ++i) scores[i] *= p.scale;
      exact |= nonfinite_rows(scores);
    }
    if constexpr (kValues) {
      scale_kept(values);
      exact |= nonfinite_rows(values);
    }
    // Wait for all readers of the memory that stages the results: this warpgroup or, with dQ, both.
    if constexpr (kQueries) queries.end(own);
    else named_sync(kOwn + own.number, 128);
    if (own.assigned().work.slot >= 0) {
      if constexpr (kScores) store_partial(scores, p.partial[0], p.head_dim);
      if constexpr (kValues) store_partial(values, p.partial[1], p.head_dim_v);
    } else {
      if (own.assigned().work.slot < -1) {
        if constexpr (kScores) add_rest(scores, p.partial[0], p.head_dim);
        if constexpr (kValues) add_rest(values, p.partial[1], p.head_dim_v);
      }
      if constexpr (kScores) stage_tile(scores, 0);
      if constexpr (kValues) stage_tile(values, kScores);
    }
    if (exact) write_fallback_rows(exact);
    fence_async_proxy();
    barrier_arrive(shared_address(&own.shared.done[own.tasks.stage]));
    barrier_arrive(shared_address(&own.shared.assigned_empty[own.tasks.stage]));
  }
};

}  // namespace spattn::sm90_backward
