// The warpgroups that compute: 64 rows each, five products of a pair of tiles or those of them that a pass needs.
//
// With rows R and columns C: S = R1 C1', dP = R2 C2', P = 2^(scale S - lse), dS = P o (dP - delta), and then
// dK (or dQ) += dS C1 and, by keys, dV += P C2. By keys, S and dP are those of the formula transposed.
#pragma once

#include "hopper/softmax.cuh"
#include "hopper_backward/config.cuh"
#include "hopper_backward/exact_row.cuh"

namespace spattn::hopper_backward {

constexpr int kSums = kDim / 2;          // accumulators of a result
constexpr int kProducts = kStep / 2;     // of a product of a step
constexpr int kWeights = kProducts / 2;  // the same as pairs of elements
constexpr bool kBehind =
    kScores && !kQueries && kSums * (kScores + kValues) <= 64;  // else there are no registers for it
using QueryProduct = Product<kQueries ? kDim / 2 : 64>;         // dQ of a step: half of the features
constexpr int kQueryProducts = QueryProduct::kCount;
constexpr int kScoreSums = kScores ? kSums : 4, kValueSums = kValues ? kSums : 4;  // 4: not used

struct Consumer {
  const Params& p;
  Shared& shared;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  const int thread = threadIdx.x % 128;
  RingPosition<kStages> ring;
  RingPosition<kBlocks> rows;
  uint32_t steps = 0;  // that have added to dQ
  int held = 0;        // stage whose columns the last product of the step before reads

  __device__ __forceinline__ void wait_stage() { barrier_wait(shared_address(&shared.full[ring.stage]), ring.parity); }

  __device__ __forceinline__ void release(int stage) {
    if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[stage]));
  }

  // d = rows columns' of operand kOperand and the columns in a stage; asynchronous.
  template <int kOperand>
  __device__ __forceinline__ void multiply(float (&d)[kProducts], uint32_t stage) {
    const uint32_t own = shared_address(shared.rows[rows.stage][kOperand]) + warpgroup * kSlab * kRowBytes;
    const uint64_t a = operand_descriptor(uniform(own), 16, 1024);
    const uint64_t b = operand_descriptor(uniform(shared_address(shared.ring[stage])), 16, 1024);
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kDim / 16; ++chunk) {
      const int panel = chunk / 4, within = chunk % 4 * 32;
      ScoreProduct::shared(d, a + (panel * kBlock * kRowBytes + within) / 16,
                           b + (panel * kStep * kRowBytes + within) / 16, chunk != 0);
    }
    wgmma_commit();
  }

  // sums += weights times the columns in a stage; asynchronous.
  template <int kCount>
  __device__ __forceinline__ void accumulate(float (&sums)[kCount], const uint32_t (&weights)[kWeights],
                                             uint32_t stage) {
    const uint64_t b = operand_descriptor(uniform(shared_address(shared.ring[stage])), kStep * kRowBytes, 1024);
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
#pragma unroll
      for (int block = 0; block < kCount / SumProduct::kCount; ++block) {
        SumProduct::registers(sums + block * SumProduct::kCount, weights + 4 * chunk,
                              b + (chunk * 16 + block * 2 * kStep) * kRowBytes / 16);
      }
    }
    wgmma_commit();
  }

  // The mask words of the step in a stage, issued early so that their latency hides behind the product. False where
  // no pair of this warpgroup's rows is allowed.
  __device__ __forceinline__ bool load_mask(uint32_t stage, StepMask<kTiles>& mask) {
    mask.partial = false;
    bool any = false;
    int number[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      // One lane reads what the same lane releases; the reduction tells the others.
      number[t] = static_cast<int>(uniform(thread % 32 == 0 ? shared.masks[stage][t][warpgroup] : 0));
      mask.partial |= number[t] != kFullTile;
      any |= number[t] != kNoTile;
    }
    if (kQueries) any = true;  // both warpgroups multiply the dS of both
    if (mask.partial && any) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mask.word[t] = mask_word(p.masks, number[t], thread);
    }
    return any;
  }

  // What the queries of two neighbouring accumulators' columns (by keys) or of a thread's two rows bring along: the
  // statistics of accumulators i, i + 1 are found at [i / 2 % 2] (rows) or for [b = 0, 1] (columns).
  struct RowStatistics {
    float lse[2], delta[2];
  };

  __device__ __forceinline__ RowStatistics row_statistics() const {
    RowStatistics found = {};
    if (kByKeys) return found;
    const Statistic* own =
        shared.statistics + rows.stage * kBlock + warpgroup * kSlab + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) found.lse[h] = own[8 * h].lse, found.delta[h] = own[8 * h].delta;
    return found;
  }

  __device__ __forceinline__ const Statistic& column_statistic(uint32_t stage, int i, int b) const {
    return shared.statistics[stage * kStep + 8 * (i / 4) + thread % 4 * 2 + b];
  }

  // dQ of the step: half of the features from the dS of all 128 keys, which the step before last has left room for.
  __device__ __forceinline__ void multiply_queries(float (&q)[kQueryProducts], const uint32_t (&gradients)[kWeights]) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    const uint32_t tile = shared_address(shared.queries.gradients[steps % 2]);
#pragma unroll
    for (int i = 0; i < kStep / 8; i += 2) {
      store_matrices(tile + (warpgroup * kSlab + row) * kRowBytes + ((i + lane / 16) ^ (row % 8)) * 16,
                     gradients[2 * i], gradients[2 * i + 1], gradients[2 * i + 2], gradients[2 * i + 3]);
    }
    fence_async_proxy();
    named_sync(kBoth, 128 * kWarpgroups);
    const uint32_t keys =
        shared_address(shared.rows[rows.stage][0]) + (kDim == 64 ? warpgroup * 64 : warpgroup * kBlock * kRowBytes);
    const uint64_t a = operand_descriptor(uniform(tile), 16, 1024), b = operand_descriptor(uniform(keys), 16, 1024);
    pin(q);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kBlock / 16; ++chunk) {
      QueryProduct::template shared<1>(q, a + chunk * 16 * kRowBytes / 16, b + chunk * 16 * kRowBytes / 16, chunk != 0);
    }
    wgmma_commit();
  }

  // Hands dQ of the step to the writer: float4 number i of thread t lies at 128 i + t.
  __device__ __forceinline__ void stage_queries(const float (&q)[kQueryProducts]) {
    if (steps) barrier_wait(shared_address(&shared.queries.empty[(steps - 1) % kWriters]), (steps - 1) / kWriters % 2);
    float4* target = reinterpret_cast<float4*>(shared.queries.sums) + warpgroup * kQueryProducts / 4 * 128 + thread;
#pragma unroll
    for (int i = 0; i < kQueryProducts / 4; ++i) {
      target[128 * i] = make_float4(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
    }
    fence_async_proxy();
    barrier_arrive(shared_address(&shared.queries.full[steps % kWriters]));
  }

  // The weights policy: logits to weights. `stage` holds the statistics of columns.
  __device__ __forceinline__ void weigh(float (&s)[kProducts], const StepMask<kTiles>& mask, const RowStatistics& row,
                                        uint32_t stage) {
    if (p.sign != 1.0f) {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) s[i] *= p.sign;
    }
    if (mask.partial) {
      apply_mask<0>(s, mask.word[0]);
      if constexpr (kTiles == 2) apply_mask<32>(s, mask.word[1]);
    }
#pragma unroll
    for (int i = 0; i < kProducts; i += 4) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float column = kByKeys ? column_statistic(stage, i, b).lse : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = i + 2 * h + b;
          s[at] = exp2_flushed(s[at] * p.scale_log2 - (kByKeys ? column : row.lse[h]));
        }
      }
    }
  }

  // d = s o (d - delta): the gradients of the logits, unscaled.
  __device__ __forceinline__ void differentiate(const float (&s)[kProducts], float (&d)[kProducts],
                                                const RowStatistics& row, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kProducts; i += 4) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float column = kByKeys ? column_statistic(stage, i, b).delta : 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = i + 2 * h + b;
          d[at] = s[at] * (d[at] - (kByKeys ? column : row.delta[h]));
        }
      }
    }
  }

  __device__ __forceinline__ static void narrow_all(const float (&x)[kProducts], uint32_t (&narrowed)[kWeights]) {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) narrowed[i] = narrow2(x[2 * i], x[2 * i + 1]);
  }

  // Looks at the step in the next stage: false where this warpgroup's rows have no pair in it.
  __device__ __forceinline__ bool open(StepMask<kTiles>& mask) {
    wait_stage();
    return load_mask(ring.stage, mask);
  }

  // The warpgroups start steps in turns, so that one's softmax hides behind the other's products.
  __device__ __forceinline__ void take_turn() const {
    if (kTurns) named_sync(kTurn + warpgroup, 128 * kWarpgroups);
  }

  __device__ __forceinline__ void pass_turn() const {
    if (kTurns) named_arrive(kTurn + (warpgroup + 1) % kWarpgroups, 128 * kWarpgroups);
  }

  __device__ __forceinline__ void skip_step() {
    take_turn();
    pass_turn();
    for (int operand = 0; operand < 2; ++operand) {
      wait_stage();
      release(ring.stage);
      ring.advance();
    }
  }

  // The columns of one step. Products are asynchronous and complete in order. Where kBehind, the last one of a step,
  // dS C1, runs beside the softmax of the next: `gradients` are those of the step before, whose columns `held` has.
  template <bool kFirst>
  __device__ __forceinline__ void step(float (&scores)[kScoreSums], float (&values)[kValueSums],
                                       uint32_t (&gradients)[kWeights], const RowStatistics& row,
                                       const StepMask<kTiles>& mask) {
    constexpr int kBefore = kBehind && !kFirst;  // products of the step before
    const uint32_t first = ring.stage;
    ring.advance();
    float s[kProducts], d[kProducts];
    take_turn();
    multiply<0>(s, first);
    wait_stage();
    const uint32_t second = ring.stage;
    ring.advance();
    if constexpr (kScores) multiply<1>(d, second);
    if constexpr (kBefore) accumulate(scores, gradients, held);
    pass_turn();
    wgmma_wait<kScores + kBefore>();
    pin(s);
    weigh(s, mask, row, second);
    if constexpr (kValues) {
      uint32_t weights[kWeights];
      narrow_all(s, weights);
      accumulate(values, weights, second);
    }
    if constexpr (kScores) {
      wgmma_wait<kBefore + kValues>();
      pin(d);
      differentiate(s, d, row, second);
      wgmma_wait<kValues>();
      if constexpr (kBefore) {
        pin(scores);
        release(held);
      }
      narrow_all(d, gradients);
      held = first;
      float q[kQueryProducts];
      if constexpr (kQueries) multiply_queries(q, gradients);
      if constexpr (!kBehind) accumulate(scores, gradients, first);
      if constexpr (kQueries) {
        wgmma_wait<1>();
        pin(q);
        stage_queries(q);
        ++steps;
      }
    }
    wgmma_wait<kScores && !kBehind>();
    if constexpr (kValues) pin(values);
    release(second);
    if constexpr (!kBehind) {
      wgmma_wait<0>();
      if constexpr (kScores) pin(scores);
      release(first);
    }
  }

  // Ends the product that the last step has left.
  __device__ __forceinline__ void drain(float (&scores)[kScoreSums], const uint32_t (&gradients)[kWeights]) {
    if constexpr (kBehind) {
      accumulate(scores, gradients, held);
      wgmma_wait<0>();
      pin(scores);
      release(held);
    }
  }

  // All steps of an item. Nothing is left behind while steps without a pair are skipped, since it holds a stage.
  __device__ __forceinline__ void run_steps(int left, float (&scores)[kScoreSums], float (&values)[kValueSums]) {
    const RowStatistics row = row_statistics();
    uint32_t gradients[kWeights];
    StepMask<kTiles> mask;
    bool any = open(mask);
    while (left > 0) {
      if (!any) {
        skip_step();
        if (--left > 0) any = open(mask);
        continue;
      }
      step<true>(scores, values, gradients, row, mask);
      while (--left > 0 && (any = open(mask))) step<false>(scores, values, gradients, row, mask);
      drain(scores, gradients);
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void clear(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
  }

  // Bit r of the result: row 16 w + r of this warp has a sum that is not finite.
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

  // Rows as elements into this warpgroup's own rows of an operand's tile, for the writer to store.
  template <int kCount>
  __device__ __forceinline__ void stage_tile(const float (&o)[kCount], int operand) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    const uint32_t tile = shared_address(shared.rows[rows.stage][operand]) + (warpgroup * kSlab + row) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kCount / 4; i += 2) {
      const int chunk = i % 8 + lane / 16;
      store_matrices(tile + i / 8 * kBlock * kRowBytes + (chunk ^ (row % 8)) * 16, narrow2(o[4 * i], o[4 * i + 1]),
                     narrow2(o[4 * i + 2], o[4 * i + 3]), narrow2(o[4 * i + 4], o[4 * i + 5]),
                     narrow2(o[4 * i + 6], o[4 * i + 7]));
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store_partial(const Assignment& assigned, const float (&o)[kCount], float* partial,
                                                int features) {
    const int lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warpgroup * kSlab + thread / 32 * 16 + 8 * h + lane / 4;
      float* target = partial + partial_row(p, assigned, row) * features;
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        if (column < features) {
          *reinterpret_cast<float2*>(target + column) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
        }
      }
    }
  }

  // Overwrites one feature of a staged or stored row.
  __device__ __forceinline__ void overwrite(const Assignment& assigned, int row, int d, double value, int operand,
                                            float* partial, int features) {
    if (assigned.work.slot >= 0) {
      if (d < features) partial[partial_row(p, assigned, row) * features + d] = float(value);
    } else {
      const int chunk = d % 64 / 8 ^ row % 8;
      uint8_t* at = shared.rows[rows.stage][operand] + (d / 64 * kBlock + row) * kRowBytes + chunk * 16 + d % 8 * 2;
      narrow(float(value), *reinterpret_cast<Element*>(at));
    }
  }

  __device__ __forceinline__ void write_exact_rows(const Assignment& assigned, uint32_t rest) {
    const int lane = thread % 32;
    __syncwarp();
#pragma unroll 1
    for (; rest; rest &= rest - 1) {
      const ExactRow exact = {p, assigned, warpgroup * kSlab + thread / 32 * 16 + __ffs(rest) - 1};
      int64_t position;
      if (!exact.position(position)) continue;
      const ExactSums sums = exact.sums(position);
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) {
        const int d = lane + 32 * i;
        if (kScores) overwrite(assigned, exact.row, d, sums.scores[i], 0, p.partial[0], p.head_dim);
        if (kValues) overwrite(assigned, exact.row, d, sums.values[i], kScores, p.partial[1], p.head_dim_v);
      }
    }
  }

  // Hands the sums of the task at `rows` to the writer or to the workspace.
  __device__ __forceinline__ void finish(float (&scores)[kScoreSums], float (&values)[kValueSums]) {
    const Assignment& assigned = shared.assigned[rows.stage];
    uint32_t exact = 0;
    if constexpr (kScores) {
#pragma unroll
      for (int i = 0; i < kScoreSums; ++i) scores[i] *= p.scale;
      exact |= nonfinite_rows(scores);
    }
    if constexpr (kValues) exact |= nonfinite_rows(values);
    // All who read these rows are done with them: this warpgroup's warps or, for dQ, those of both.
    if constexpr (kQueries) named_sync(kBoth, 128 * kWarpgroups);
    else named_sync(kOwn + warpgroup, 128);
    if (assigned.work.slot >= 0) {
      if constexpr (kScores) store_partial(assigned, scores, p.partial[0], p.head_dim);
      if constexpr (kValues) store_partial(assigned, values, p.partial[1], p.head_dim_v);
    } else {
      if constexpr (kScores) stage_tile(scores, 0);
      if constexpr (kValues) stage_tile(values, kScores);
    }
    if (exact) write_exact_rows(assigned, exact);
    fence_async_proxy();
    barrier_arrive(shared_address(&shared.done[rows.stage]));
  }

  __device__ void run() {
    if (warpgroup == kWarpgroups - 1) pass_turn();
    for (;; rows.advance()) {
      barrier_wait(shared_address(&shared.rows_full[rows.stage]), rows.parity);
      const Work& work = shared.assigned[rows.stage].work;
      int left = work.heads * ((work.end - work.begin + kTiles - 1) / kTiles);
      if (work.heads == 0) break;
      float scores[kScoreSums], values[kValueSums];
      clear(scores);
      clear(values);
      run_steps(left, scores, values);
      finish(scores, values);
    }
  }
};

}  // namespace spattn::hopper_backward
