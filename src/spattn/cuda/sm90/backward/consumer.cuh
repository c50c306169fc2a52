// Consumer warpgroups: 64 rows each, up to five products per pair of tiles.
//
// With rows R1 of q or k, R2 of dout or v, and columns C1 and C2 of the other two: S = R1 C1', P = 2^(scale S - lse),
// dS = P o (R2 C2' - delta), then dK (or dQ) += dS C1 and, in the dK/dV kernel, dV += P C2. In that kernel, S and dS
// are transposed.
#pragma once

#include "sm90/backward/dropout.cuh"
#include "sm90/backward/results.cuh"
#include "sm90/backward/scores.cuh"
#include "sm90/backward/table_sums.cuh"

namespace spattn::sm90_backward {

constexpr bool kBehind =
    kScores && !kQueries &&
    kScoreSums + kValues * kValueSums <= 96;          // dS C1 overlaps the next softmax, if registers suffice
static_assert(kStages >= 2 + (kBehind || kQueries));  // a stage is held while the next one loads

// Chunks of 16 columns of P C2 multiplied before dS is known. In fused mode, the other chunks keep the tensor cores
// busy while the writer receives dQ.
constexpr int kChunks = kStep / 16, kChunksBefore = kQueries ? kChunks / 2 : kChunks;

struct Consumer {
  const Params& p;
  Shared& shared;
  Warpgroup own{p, shared};
  QueryProducts queries;
  Scores modification;  // of the item
  TableSums<std::conditional_t<kTableSums, Score::Uses, ScoreUses<>>> table_sums;
  WeightDrops drops;

  __device__ __forceinline__ void wait_stage() {
    barrier_wait(shared_address(&shared.full[own.ring.stage]), own.ring.parity);
  }

  __device__ __forceinline__ void release(int stage) { own.arrive(shared.empty[stage]); }

  // Starts s = R1 C1' (kOperand = 0), or d += R2 C2' (1), for the columns in a stage.
  template <int kOperand>
  __device__ __forceinline__ void multiply(float (&d)[kProducts], uint32_t stage) {
    const uint32_t start = shared_address(shared.operand(own.rows.stage, kOperand)) + own.number * kSubtile * kRowBytes;
    const uint64_t a = operand_descriptor(uniform(start), 16, 1024);
    const uint64_t b = operand_descriptor(uniform(shared_address(shared.ring[stage])), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < (kOperand ? kDimV : kDim) / 16; ++chunk) {
      const int panel = chunk / 4, within = chunk % 4 * 32;
      ScoreProduct::shared(d, a + (panel * kBlock * kRowBytes + within) / 16,
                           b + (panel * kStep * kRowBytes + within) / 16, chunk);
    }
    wgmma_commit();
  }

  // Starts sums += weights times chunks [kBegin, kEnd) of the columns in a stage.
  template <int kBegin, int kEnd, int kCount>
  __device__ __forceinline__ void accumulate(float (&sums)[kCount], const uint32_t (&weights)[kWeights],
                                             uint32_t stage) {
    using SumProduct = Product<(kCount % 64 ? 64 : 128)>;
    const uint64_t b = operand_descriptor(uniform(shared_address(shared.ring[stage])), kStep * kRowBytes, 1024);
    pin(sums);
    wgmma_fence();
#pragma unroll
    for (int chunk = kBegin; chunk < kEnd; ++chunk) {
#pragma unroll
      for (int block = 0; block < kCount / SumProduct::kCount; ++block) {
        SumProduct::registers(sums + block * SumProduct::kCount, weights + 4 * chunk,
                              b + (chunk * 16 + block * SumProduct::kCount / 32 * kStep) * kRowBytes / 16);
      }
    }
    wgmma_commit();
  }

  // Loads the mask words of a stage, early, so that the product hides their latency. Returns false if no pair of this
  // warpgroup's rows is allowed.
  __device__ __forceinline__ bool load_mask(uint32_t stage, StepMask<kTiles>& mask) {
    mask.partial = false;
    bool any = false;
    int number[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      // The lane that releases the stage reads; the reduction broadcasts.
      number[t] = static_cast<int>(uniform(own.thread % 32 == 0 ? shared.masks[stage][t][own.number] : 0));
      mask.partial |= number[t] != kFullTile;
      any |= number[t] != kNoTile;
    }
    if constexpr (kModified) {
#pragma unroll
      for (uint32_t& word : mask.word) word = ~0u;
    }
    if (mask.partial && any) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mask.word[t] = mask_word(p.masks, number[t], own.thread);
    }
    return any;
  }

  // Statistics (lse or delta) are read in kParts parts, kStatistics at a time: one for each query among the thread's
  // accumulators. Queries are the columns in the dK/dV kernel, else the two rows.
  static constexpr int kParts = kByKeys ? (kScored ? 4 : 2) : 1, kPart = kProducts / kParts;
  static constexpr int kStatistics = kByKeys ? kPart / 2 : 2;

  // Returns the index of the statistic that belongs to accumulator i of a part.
  __device__ __forceinline__ static constexpr int of(int i) { return kByKeys ? i / 4 * 2 + i % 2 : i / 2 % 2; }

  // Reads the statistics of one part, with all loads in flight together; registers do not suffice for more.
  __device__ __forceinline__ void read_statistics(float (&found)[kStatistics], float Statistic::* which, uint32_t stage,
                                                  int part) const {
    const int lane = own.thread % 32;
    const int first = kByKeys ? stage * kStep + part * kStep / kParts + lane % 4 * 2
                              : own.rows.stage * kBlock + own.number * kSubtile + own.thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < kStatistics; ++n) {
      found[n] = shared.statistics[first + (kByKeys ? n / 2 * 8 + n % 2 : 8 * n)].*which;
    }
  }

  // Computes P: replaces dot products by weights, and narrows them. With a score function, s then becomes weights times
  // the function's derivatives. `lse` holds the statistics of the first part.
  template <class Pairs>
  __device__ __forceinline__ void weigh(float (&s)[kProducts], uint32_t (&weights)[kWeights],
                                        const StepMask<kTiles>& mask, const Pairs& pairs, float (&lse)[kStatistics],
                                        uint32_t stage) {
    if constexpr (kModified) {
      if constexpr (Score::kPositions && Score::kRelative) {
        if (pairs.is_simple()) return weigh_pairs<true>(s, weights, mask, pairs, lse, stage);
      }
      return weigh_pairs<false>(s, weights, mask, pairs, lse, stage);
    }
    if (p.sign != 1.0f) {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) s[i] *= p.sign;
    }
    if (mask.partial) mask.apply(s);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part) read_statistics(lse, &Statistic::lse, stage, part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        float& at = s[part * kPart + i];
        at = exp2_flushed(at * p.scale_log2 - lse[of(i)]);
      }
    }
    if constexpr (kValues) narrow_kept(s, weights);
  }

  // Narrows weights; dropped ones become 0.
  __device__ __forceinline__ void narrow_kept(const float (&s)[kProducts], uint32_t (&weights)[kWeights]) const {
#pragma unroll
    for (int n = 0; n < kProducts; n += 8) {
      float kept[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) kept[i] = s[n + i];
      drops.drop(kept, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[n / 2 + i] = narrow2(kept[2 * i], kept[2 * i + 1]);
    }
  }

  template <bool kSimple, class Pairs>
  __device__ __forceinline__ void weigh_pairs(float (&s)[kProducts], uint32_t (&weights)[kWeights],
                                              const StepMask<kTiles>& mask, const Pairs& pairs,
                                              float (&lse)[kStatistics], uint32_t stage) {
#pragma unroll
    for (int n = 0; n < kProducts; n += 8) {
      float kept[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int part = (n + i) / kPart, at = (n + i) % kPart;
        if (part && at == 0) read_statistics(lse, &Statistic::lse, stage, part);
        const auto pair = pairs.template weigh<kSimple>(p, mask, n + i, s[n + i], lse[of(at)]);
        kept[i] = pair.weight, s[n + i] = pair.gradient;
      }
      drops.drop(kept, n);
#pragma unroll
      for (int i = 0; i < 4 && kValues; ++i) weights[n / 2 + i] = narrow2(kept[2 * i], kept[2 * i + 1]);
    }
  }

  // Computes dS = s o (d - delta), unscaled and narrowed. `delta` holds the statistics of the first part.
  __device__ __forceinline__ void differentiate(const float (&s)[kProducts], float (&d)[kProducts],
                                                uint32_t (&gradients)[kWeights], float (&delta)[kStatistics],
                                                uint32_t stage) {
    drops.drop(d, 0);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part) read_statistics(delta, &Statistic::delta, stage, part);
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        const int n = part * kPart + i;
        d[n] = s[n] * drops.difference(d[n], delta[of(i)]);
      }
    }
    narrow_all(d, gradients);
  }

  __device__ __forceinline__ static void narrow_all(const float (&x)[kProducts], uint32_t (&narrowed)[kWeights]) {
#pragma unroll
    for (int i = 0; i < kWeights; ++i) narrowed[i] = narrow2(x[2 * i], x[2 * i + 1]);
  }

  // Ping-pong: the warpgroups start iterations in turns, so that one's softmax overlaps the other's products.
  __device__ __forceinline__ void take_turn() const {
    if (kTurns) named_sync(kTurn + own.number, 128 * kWarpgroups);
  }

  __device__ __forceinline__ void pass_turn() const {
    if (kTurns) named_arrive(kTurn + (own.number + 1) % kWarpgroups, 128 * kWarpgroups);
  }

  // State carried to the next iteration.
  struct Carried {
    int left;                      // iterations left in the item
    StepMask<kTiles> mask;         // of the next iteration
    uint32_t gradients[kWeights];  // dS
    int held;                      // stage of the columns that dS multiplies
  };

  // Waits for the next stage. Returns false if no pair of this warpgroup's rows is allowed in it, or the item is done.
  __device__ __forceinline__ bool open(Carried& carried) {
    if (carried.left == 0) return false;
    wait_stage();
    return load_mask(own.ring.stage, carried.mask);
  }

  // Runs an iteration in which this warpgroup has no pair: dS is zero, but it still computes its half of dQ.
  __device__ __forceinline__ bool idle_step(Carried& carried) {
    take_turn();
    pass_turn();
    for (int operand = 0; operand < 2; ++operand) {
      wait_stage();
      release(own.ring.stage);
      own.ring.advance();
    }
    float q[kQueryProducts];
    if constexpr (kQueries) {
      if (carried.left == 1) own.arrive(shared.rows_empty[own.rows.stage][1]);
      clear(carried.gradients);
      queries.write(own, carried.gradients);
      queries.multiply(own, q);
    }
    --carried.left;
    const bool any = open(carried);
    if constexpr (kQueries) end_queries(q, carried);
    return any;
  }

  // Completes dQ of an iteration; kPending products may stay in flight.
  template <int kPending = 0>
  __device__ __forceinline__ void end_queries(float (&q)[kQueryProducts], const Carried& carried) {
    wgmma_wait<kPending>();
    pin(q);
    if (carried.left == 0) own.arrive(shared.rows_empty[own.rows.stage][0]);
    queries.hand_over(own, q);
  }

  // Sums dS for the gradients of captured arrays, while products are in flight. In shared memory dS is complete: both
  // warpgroups have synchronized to multiply it.
  template <class Modified = Scores>
  __device__ __forceinline__ void add_to_tables(uint32_t stage) {
    if constexpr (kTableSums) {
      const Modified& item = modification;
      const int step = (item.row[1] - item.row[0]) / 8, row = own.thread / 32 * 16 + own.thread % 32 / 4;
      const TileOrigin tile = {item.row[0] - row * step, int(shared.positions[stage][0].cells.first), step};
      const uint8_t* gradients = shared.queries.gradients[queries.steps % 2] + own.number * kSubtile * kRowBytes;
      table_sums.add_tile({p.words, p.first}, gradients, own.thread, tile, item.head);
    }
  }

  // Runs an iteration; returns true if this warpgroup has a pair in the next one. Products are asynchronous and
  // complete in order. With kBehind, the product dS C1 (top of this file) is left to the next iteration, whose softmax
  // it overlaps. kFirst: no product of an earlier iteration is pending.
  template <bool kFirst>
  __device__ __forceinline__ bool step(float (&scores)[kScoreSums], float (&values)[kValueSums], Carried& carried) {
    constexpr int kBefore = kBehind && !kFirst;  // pending products of the previous iteration
    constexpr int kOwned = kScores && !kBehind;  // dS C1 of this iteration
    const uint32_t first = own.ring.stage;
    own.ring.advance();
    float s[kProducts], d[kProducts], q[kQueryProducts], lse[kStatistics], delta[kStatistics];
    uint32_t weights[kWeights];
    take_turn();
    multiply<0>(s, first);
    wait_stage();
    const uint32_t second = own.ring.stage;
    own.ring.advance();
    if constexpr (kScores) multiply<1>(d, second);
    if constexpr (kBefore) accumulate<0, kChunks>(scores, carried.gradients, carried.held);
    pass_turn();
    read_statistics(lse, &Statistic::lse, second, 0);
    const Scores::Pairs pairs = modification.locate(own, first, carried.mask);
    drops.find_kept(own, first);
    wgmma_wait<kScores + kBefore>();
    pin(s);
    weigh(s, weights, carried.mask, pairs, lse, second);
    if constexpr (kValues) accumulate<0, kChunksBefore>(values, weights, second);
    if constexpr (kScores) {
      read_statistics(delta, &Statistic::delta, second, 0);
      wgmma_wait<kBefore + kValues>();
      pin(d);
      if (kQueries && carried.left == 1) own.arrive(shared.rows_empty[own.rows.stage][1]);
      if constexpr (kBefore) {
        wgmma_wait<kValues>();
        pin(scores);
        release(carried.held);
      }
      differentiate(s, d, carried.gradients, delta, second);
      carried.held = first;
      if constexpr (kQueries) {
        queries.write(own, carried.gradients);
        queries.multiply(own, q);
        accumulate<kChunksBefore, kChunks>(values, weights, second);
      }
      if constexpr (kOwned) accumulate<0, kChunks>(scores, carried.gradients, first);
      add_to_tables(first);
    }
    --carried.left;
    bool any = false;
    if constexpr (kQueries) {
      any = open(carried);  // while the last products are in flight
      end_queries<kOwned + 1>(q, carried);
    }
    wgmma_wait<kOwned>();
    if constexpr (kValues) pin(values);
    release(second);
    if constexpr (!kBehind) {
      wgmma_wait<0>();
      if constexpr (kScores) pin(scores);
      release(first);
    }
    // Not earlier: with two stages, the next iteration waits for the stage just released.
    if constexpr (!kQueries) any = open(carried);
    return any;
  }

  // Completes the product that the last iteration left pending.
  __device__ __forceinline__ void drain(float (&scores)[kScoreSums], const Carried& carried) {
    if constexpr (kBehind) {
      accumulate<0, kChunks>(scores, carried.gradients, carried.held);
      wgmma_wait<0>();
      pin(scores);
      release(carried.held);
    }
  }

  // Runs all iterations of an item. No product stays pending while an iteration is skipped: it would hold a stage.
  __device__ __forceinline__ void run_steps(int count, float (&scores)[kScoreSums], float (&values)[kValueSums]) {
    Carried carried;
    carried.left = count;
    bool any = open(carried);
    while (carried.left > 0) {
      if (!any) {
        any = idle_step(carried);
        continue;
      }
      any = step<true>(scores, values, carried);
      while (any) any = step<false>(scores, values, carried);
      drain(scores, carried);
    }
  }

  template <class Number, int kCount>
  __device__ __forceinline__ static void clear(Number (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = 0;
  }

  __device__ void run() {
    drops.open(p);
    if (own.number == kWarpgroups - 1) pass_turn();
    for (;; own.tasks.advance(), own.rows.advance()) {
      barrier_wait(shared_address(&shared.assigned_full[own.tasks.stage]), own.tasks.parity);
      const Work& work = own.assigned().work;
      if (work.heads == 0) break;
      barrier_wait(shared_address(&shared.rows_full[own.rows.stage]), own.rows.parity);
      if constexpr (kQueries) queries.begin(own);
      modification.open(own);
      float scores[kScoreSums], values[kValueSums];
      clear(scores);
      clear(values);
      run_steps(work.heads * ((work.end - work.begin + kTiles - 1) / kTiles), scores, values);
      if constexpr (kTableSums) table_sums.flush_all({p.words, p.first}, own.thread);
      Results{own}.finish(scores, values, queries);
    }
  }
};

}  // namespace spattn::sm90_backward
