// Consumer warpgroups: products on the tensor cores, with online softmax in between.
#pragma once

#include "sm90/isa/barrier.cuh"
#include "sm90/forward/checked_softmax.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/dropout.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/scores.cuh"
#include "sm90/forward/softmax.cuh"
#include "sm90/isa/wgmma.cuh"

namespace spattn::sm90 {

struct Consumer {
  const Params& p;
  Shared& shared;
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
  const int thread = threadIdx.x % 128;
  RingPosition<kStages> ring;
  RingPosition<kQueries> query;
  std::conditional_t<kFloat8, CheckedSoftmax, Softmax> softmax;
  int problem = 0;  // index of the problem of the next softmax
  Scores scores;    // modifies the scores of the next softmax
  WeightDrops drops;

  // The row group of this warpgroup's rows.
  __device__ __forceinline__ int row_group() const { return kShares ? 0 : warpgroup; }

  // Stages of an iteration's keys or values.
  template <int kCount>
  struct Slices {
    uint32_t stage[kCount];
  };
  using KeySlices = Slices<kKeySlices>;
  using ValueSlices = Slices<kValueSlices>;

  // Waits for the next `kCount` stages. Gathered rows need a proxy fence, which waits for all loads in flight: call
  // this function before loading mask words.
  template <int kCount>
  __device__ __forceinline__ void wait_stages() const {
    RingPosition<kStages> next = ring;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      barrier_wait(shared_address(&shared.full[next.stage]), next.parity);
      next.advance();
    }
    if constexpr (kGathers) fence_async_proxy();
  }

  template <int kCount>
  __device__ __forceinline__ Slices<kCount> next_slices() const {
    RingPosition<kStages> next = ring;
    Slices<kCount> found;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      found.stage[i] = next.stage;
      next.advance();
    }
    return found;
  }

  template <int kCount>
  __device__ __forceinline__ void advance_slices() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ring.advance();
  }

  // Returns the shared-memory addresses of the next stages, or of this warpgroup's rows of a query tile.
  template <int kCount>
  __device__ __forceinline__ Slices<kCount> next_addresses() const {
    Slices<kCount> found = next_slices<kCount>();
#pragma unroll
    for (uint32_t& stage : found.stage) stage = uniform(shared_address(shared.ring[stage]));
    return found;
  }

  __device__ __forceinline__ uint32_t rows_address(uint32_t query_stage) const {
    return uniform(shared_address(shared.query[query_stage]) + row_group() * 64 * kRowBytes);
  }

  __device__ __forceinline__ void release(uint32_t stage) {
    if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[stage]));
  }

  // Releases the stages of an iteration's keys but the first, or all stages of its values.
  template <int kFirst = 0, int kCount>
  __device__ __forceinline__ void release(const Slices<kCount>& slices) {
#pragma unroll
    for (int i = kFirst; i < kCount; ++i) release(slices.stage[i]);
  }

  // Starts s = q k^T for the query rows and the keys at these addresses.
  __device__ __forceinline__ void multiply_keys(float (&s)[kStepKV / 2], uint32_t rows, const KeySlices& keys) {
    const uint64_t a = operand_descriptor(rows, 16, 1024);
    uint64_t b[kKeySlices];
#pragma unroll
    for (int i = 0; i < kKeySlices; ++i) b[i] = operand_descriptor(keys.stage[i], 16, 1024);
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProducts * kPanels * 4; ++i) {
      const TermProduct terms = term_product(i / (kPanels * 4));
      const int chunk = i % (kPanels * 4), panel = chunk / 4, within = chunk % 4 * 32;
      const int slice_panel = terms.b * kSlicePanels + panel % kSlicePanels;
      QueryKeyProduct::shared(s, a + ((terms.a * kPanels + panel) * kBlockQ * kRowBytes + within) / 16,
                              b[panel / kSlicePanels] + (slice_panel * kStepKV * kRowBytes + within) / 16, i != 0);
    }
    wgmma_commit();
  }

  // The weights of an iteration: words of each term.
  using Weights = uint32_t[kTerms][kStepKV * sizeof(Term) / 8];

  // Starts o += weights v, or o = weights v if kSeparate, or in the `first` iteration of a task if kOverwrites.
  __device__ __forceinline__ void multiply_values(float (&o)[kDimV / 2], const Weights& weights,
                                                  const ValueSlices& values, bool first) {
    uint64_t b[kValueSlices];
#pragma unroll
    for (int i = 0; i < kValueSlices; ++i) b[i] = operand_descriptor(values.stage[i], kStepKV * kRowBytes, 1024);
    pin(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProducts * kStepKV / 16; ++i) {
      const TermProduct terms = term_product(i / (kStepKV / 16));
      const int chunk = i % (kStepKV / 16);
#pragma unroll
      for (int block = 0; block < kDimV / 2 / ValueProduct::kCount; ++block) {
        const int panel = block * ValueProduct::kCount / 32, slice_panel = panel % kSlicePanels;
        ValueProduct::registers(
            o + block * ValueProduct::kCount, weights[terms.a] + 4 * chunk,
            b[panel / kSlicePanels] + (chunk * 16 + (terms.b * kSlicePanels + slice_panel) * kStepKV) * kRowBytes / 16,
            i > 0 || !(kSeparate || (kOverwrites && first)));
      }
    }
    wgmma_commit();
  }

  template <int kCount>
  __device__ __forceinline__ static void clear(float (&o)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] = 0.0f;
  }

  // Mask indices of a stage, read by lane 0, which also releases the stage.
  struct MaskNumbers {
    int of[kTiles];
  };

  __device__ __forceinline__ MaskNumbers read_numbers(uint32_t stage) const {
    MaskNumbers found;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) found.of[t] = thread % 32 == 0 ? shared.masks[stage][t] : 0;
    return found;
  }

  // Loads the mask words of an iteration, early, so that the product hides their latency.
  __device__ __forceinline__ StepMask<kTiles> load_mask(const MaskNumbers& numbers) {
    StepMask<kTiles> mask;
    mask.partial = false;
    int number[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      number[t] = static_cast<int>(uniform(numbers.of[t]));
      mask.partial |= number[t] != kFullTile;
    }
    if (mask.partial) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mask.word[t] = mask_word(p.masks, mask_block(number[t], row_group()), thread);
    }
    return mask;
  }

  // Computes the weights of an iteration, whose keys are in `stage`. Releases the stage if the scores are modified; with
  // dropout, the CTA's first stage only after its words have been read: the producer fills its next stage before any
  // values have been released (config.cuh).
  template <bool kFirst = false>
  __device__ __forceinline__ bool weigh(float (&s)[kStepKV / 2], const StepMask<kTiles>& mask, uint32_t stage,
                                        float (&rescale)[2]) {
    const Problem& own = problem_of(p, problem);
    scores.apply(s, p, own, shared, stage);
    constexpr bool kLate = kFirst && Score::kDrops;
    if constexpr (kModified && !kLate) release(stage);
    if (mask.partial) mask.apply(s);
    const bool moved = softmax.update(s, scores.scale_log2(own), rescale);
    drops.apply(s, shared);
    if constexpr (kLate) release(stage);
    return moved;
  }

  // Converts weights to terms.
  __device__ __forceinline__ static void split_weights(const float (&s)[kStepKV / 2], Weights& weights) {
#pragma unroll
    for (int i = 0; i < kStepKV / 4; ++i) {
      uint32_t terms[kTerms];
      split2(s[2 * i], s[2 * i + 1], terms);
#pragma unroll
      for (int t = 0; t < kTerms; ++t) weights[t][i] = terms[t];
    }
  }

  // Ends the PV product of an iteration: adds it to the output if kSeparate.
  __device__ __forceinline__ static void add_product(float (&o)[kDimV / 2], float (&product)[kDimV / 2]) {
    if constexpr (kSeparate) {
      pin(product);
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) o[i] += product[i];
    } else {
      pin(o);
    }
  }

  // Converts the normalised output to elements in this warpgroup's rows of the query tile, for the writer to store.
  __device__ __forceinline__ void stage_tile(const float (&o)[kDimV / 2]) {
    if constexpr (sizeof(Element) == 4) return stage_floats(o);
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    const uint32_t tile = shared_address(shared.query[query.stage]) + (row_group() * 64 + row) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kDimV / 8; i += 2) {
      const int chunk = i % 8 + lane / 16;
      store_matrices(tile + i / 8 * kBlockQ * kRowBytes + (chunk ^ (row % 8)) * 16, narrow2(o[4 * i], o[4 * i + 1]),
                     narrow2(o[4 * i + 2], o[4 * i + 3]), narrow2(o[4 * i + 4], o[4 * i + 5]),
                     narrow2(o[4 * i + 6], o[4 * i + 7]));
    }
    fence_async_proxy();
  }

  // The same for float32, whose rows take twice as many panels.
  __device__ __forceinline__ void stage_floats(const float (&o)[kDimV / 2]) {
    const int lane = thread % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_group() * 64 + thread / 32 * 16 + 8 * h + lane / 4;
      uint8_t* tile = shared.query[query.stage] + row * kRowBytes + lane % 2 * 8;
#pragma unroll
      for (int i = 0; i < kDimV / 8; ++i) {
        const int chunk = i % 4 * 2 + lane % 4 / 2;
        *reinterpret_cast<float2*>(tile + i / 4 * kBlockQ * kRowBytes + (chunk ^ (row % 8)) * 16) =
            make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
      }
    }
    fence_async_proxy();
  }

  __device__ __forceinline__ void store_partial(const Assignment& assigned, const float (&o)[kDimV / 2]) {
    const int lane = thread % 32;
    const Problem& own = problem_of(p, assigned);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_group() * 64 + thread / 32 * 16 + 8 * h + lane / 4;
      int64_t position;
      // skip padding rows, which are most rows of a decoding tile
      if (!query_position(p, assigned, row, position)) continue;
      float* target = own.partial_out + partial_row(p, assigned, row) * own.head_dim_v;
#pragma unroll
      for (int i = 0; i < kDimV / 8; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        if (column < own.head_dim_v) {
          *reinterpret_cast<float2*>(target + column) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
        }
      }
    }
  }

  // Normalises the rows and combines them with the partials in the workspace.
  __device__ __forceinline__ void join_prior(const Assignment& assigned, float (&o)[kDimV / 2],
                                             const float (&inverse)[2]) {
    const int lane = thread % 32;
    const Problem& given = problem_of(p, assigned);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_group() * 64 + thread / 32 * 16 + 8 * h + lane / 4;
      const int64_t prior = prior_row(p, assigned, row);
      float& lse = shared.lse[query.stage][row];
      Blend both = {1.0f, 0.0f, lse};
      if (prior >= 0) both = blend(lse, given.partial_lse[prior]);
      __syncwarp();
      if (lane % 4 == 0) lse = both.lse;
      const float* source = given.partial_out + max(prior, int64_t(0)) * given.head_dim_v + lane % 4 * 2;
      const float own = both.own * inverse[h];
#pragma unroll
      for (int i = 0; i < kDimV / 8; ++i) {
        const bool real = prior >= 0 && 8 * i < given.head_dim_v;
        const float2 rest = real ? __ldcs(reinterpret_cast<const float2*>(source + 8 * i)) : float2{};
        o[4 * i + 2 * h] = o[4 * i + 2 * h] * own + rest.x * both.other;
        o[4 * i + 2 * h + 1] = o[4 * i + 2 * h + 1] * own + rest.y * both.other;
      }
    }
  }

  // Epilogue of the task at `query`: normalises its rows and hands them to the writer.
  __device__ __forceinline__ void finish(const Softmax& softmax, float (&o)[kDimV / 2]) {
    const int lane = thread % 32, first = row_group() * 64 + thread / 32 * 16;
    float probe[2], inverse[2];
    probe_rows(o, probe);
    float sums[4];  // row sums of the weights, then a value that is nonzero or NaN for rows to recompute
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] = softmax.row_sum[h];
      sums[2 + h] = probe[h] + softmax.row_sum[h] * 0.0f + (softmax.far(h) ? 1.0f : 0.0f);
    }
#pragma unroll
    for (float& sum : sums) sum = quad_sum(sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      inverse[h] = sums[h] == 0.0f ? 0.0f : reciprocal_of_sum(sums[h]);
      float lse = sums[2 + h] == 0.0f ? softmax.lse(h, sums[h]) : kFailedRow;
      if constexpr (kSinks) {
        const Assignment& own = shared.assigned[query.stage];
        if (own.work.slot < 0) {
          const float sink = row_sink(p, own, first + 8 * h + lane / 4);
          const float with_sink = softmax.lse_with(h, sums[h], sink, inverse[h]);
          if (sums[2 + h] == 0.0f) lse = with_sink;
        }
      }
      if constexpr (kTerms > 1) inverse[h] *= 1.0f / kValueFactor;
      if constexpr (kFloat8) inverse[h] *= head_scales(p, shared.assigned[query.stage]).y;
      if constexpr (Score::kDrops) inverse[h] *= kept_factor(problem_of(p, shared.assigned[query.stage]));
      if (lane % 4 == 0) shared.lse[query.stage][first + 8 * h + lane / 4] = lse;
    }
    const Assignment& assigned = shared.assigned[query.stage];
    __syncwarp();
    if (assigned.work.slot <= -2) join_prior(assigned, o, inverse);
    else scale_rows(o, inverse);
    named_sync(kOwn + warpgroup, 128);  // all warps of the warpgroup have finished reading the query tile
    if (assigned.work.slot >= 0) store_partial(assigned, o);
    else stage_tile(o);
    named_arrive(kDone + query.stage, kDoneThreads);
  }

  // Waits for a query tile and returns the number of iterations of its work item; 0 ends the kernel.
  __device__ __forceinline__ int open(const RingPosition<kQueries>& position) {
    barrier_wait(shared_address(&shared.query_full[position.stage]), position.parity);
    if constexpr (kGathers) fence_async_proxy();
    const Work& work = shared.assigned[position.stage].work;
    if (kProblems > 1) problem = static_cast<int>(uniform(p.query_views[work.query_view].problem));
    const int first_row = row_group() * 64 + thread / 32 * 16 + thread % 32 / 4;
    scores.open(p, shared.assigned[position.stage], first_row);
    drops.open(p, shared.assigned[position.stage], first_row);
    return (work.end - work.begin + kTiles - 1) / kTiles;
  }

  // Software pipeline over all tasks of this CTA: a PV product overlaps the next softmax, across task boundaries.
  __device__ void run() {
    if (kWarpgroups > 1 && warpgroup == kWarpgroups - 1) named_arrive(kTurn, 256);
    int steps = open(query);
    if (steps == 0) return finish_all(query);
    float s[kStepKV / 2], o[kDimV / 2], rescale[2];
    float separate[kDimV / 2];  // of the PV product in flight, if kSeparate
    float (&product)[kDimV / 2] = kSeparate ? separate : o;
    Weights weights;
    softmax.reset();
    if (!kOverwrites) clear(o);
    wait_stages<kKeySlices>();
    multiply_keys(s, rows_address(query.stage), next_addresses<kKeySlices>());
    weigh_first(s, rescale);
    split_weights(s, weights);
    bool last = steps == 1, first = true;
    RingPosition<kQueries> ahead = query;  // stage of the next iteration's task
    if (last) ahead.advance();
    uint32_t rows = rows_address(ahead.stage);
    KeySlices keys = next_addresses<kKeySlices>();
    while (true) {
      steps = last ? open(ahead) : steps - 1;
      if (steps == 0) break;
      wait_stages<kKeySlices + (kGathers ? kValueSlices : 0)>();
      if (kWarpgroups > 1) named_sync(kTurn + warpgroup, 256);
      const KeySlices key_slices = next_slices<kKeySlices>();
      const MaskNumbers numbers = read_numbers(key_slices.stage[0]);
      multiply_keys(s, rows, keys);
      const StepMask<kTiles> mask = load_mask(numbers);
      advance_slices<kKeySlices>();
      if constexpr (!kGathers) wait_stages<kValueSlices>();
      multiply_values(product, weights, next_addresses<kValueSlices>(), first);
      if (kWarpgroups > 1) named_arrive(kTurn + (warpgroup + 1) % kWarpgroups, 256);

      const ValueSlices value_slices = next_slices<kValueSlices>();
      const bool finished = last;
      advance_slices<kValueSlices>();
      keys = next_addresses<kKeySlices>();  // of the next iteration, computed early
      last = steps == 1;
      if (last) ahead.advance();
      rows = rows_address(ahead.stage);

      wgmma_wait<1>();
      pin(s);
      if constexpr (!kModified) release(key_slices.stage[0]);
      release<1>(key_slices);
      const Softmax before = softmax;
      if (finished) softmax.reset();
      const bool moved = weigh(s, mask, key_slices.stage[0], rescale);
      softmax.settle();
      wgmma_wait<0>();
      add_product(o, product);
      release(value_slices);
      split_weights(s, weights);
      if (finished) {
        finish(before, o);
        query.advance();
        if (!kOverwrites) clear(o);
      } else if (moved) {
        scale_rows(o, rescale);
      }
      first = finished;
    }
    wait_stages<kValueSlices>();
    multiply_values(product, weights, next_addresses<kValueSlices>(), first);
    wgmma_wait<0>();
    add_product(o, product);
    finish(softmax, o);
    query.advance();
    finish_all(query);
  }

  // Runs all tasks of this CTA with kShares. A task of one iteration is one warpgroup's alone; of others, warpgroup 0
  // takes the even iterations and finishes the rows. Nothing overlaps across tasks but the work of both warpgroups.
  __device__ void run_shared() {
    float o[kDimV / 2];
    uint32_t begin = 0;  // number of stages filled before the task's
    if (warpgroup == 0) named_arrive(kEmptied, 256);
    for (int task = 0;; ++task, query.advance()) {
      const int steps = open(query);
      if (steps == 0) break;
      const bool alone = steps == 1;
      const int own = alone ? task % 2 : 0;  // the warpgroup that finishes the rows
      if (!alone || warpgroup == own) run_iterations(o, begin, alone ? 0 : warpgroup, steps);
      begin += 2 * steps;
      if (warpgroup == own) {
        if (!alone) receive(o);
        finish(softmax, o);
      } else {
        if (!alone) send(o);
        __syncwarp();  // all lanes have read the assignment and the query tile
        if (thread % 32 == 0) barrier_arrive(shared_address(&shared.query_empty[query.stage]));
      }
    }
    if (warpgroup == 0) finish_all(query);
  }

  // Returns the position of the stage that is filled as number `number`, counted from 0.
  __device__ __forceinline__ static RingPosition<kStages> stage_of(uint32_t number) {
    return {number % kStages, number / kStages & 1};
  }

  // Computes iterations first, first + 2, ... of a task, whose stages are in the order K0 K1 V0 K2 V1 ... V(n-1).
  __device__ __forceinline__ void run_iterations(float (&o)[kDimV / 2], uint32_t begin, int first, int steps) {
    const auto keys_of = [&](int i) { return stage_of(begin + (i ? 2 * i - 1 : 0)); };
    const auto values_of = [&](int i) { return stage_of(begin + 2 * i + (i < steps - 1 ? 2 : 1)); };
    float s[kStepKV / 2], rescale[2];
    float separate[kDimV / 2];
    float (&product)[kDimV / 2] = kSeparate ? separate : o;
    Weights weights;
    softmax.reset();
    clear(o);
    const uint32_t rows = rows_address(query.stage);
    drops.seek(begin / 2 + first);
    ring = keys_of(first);
    wait_stages<1>();
    multiply_keys(s, rows, next_addresses<kKeySlices>());
    weigh_first(s, rescale);
    split_weights(s, weights);
    for (int i = first + 2; i < steps; i += 2) {
      drops.seek(begin / 2 + i);
      ring = keys_of(i);
      wait_stages<1>();
      const uint32_t key_stage = ring.stage;
      const MaskNumbers numbers = read_numbers(key_stage);
      multiply_keys(s, rows, next_addresses<kKeySlices>());
      const StepMask<kTiles> mask = load_mask(numbers);
      ring = values_of(i - 2);
      wait_stages<1>();
      const uint32_t value_stage = ring.stage;
      multiply_values(product, weights, next_addresses<kValueSlices>(), false);
      wgmma_wait<1>();
      pin(s);
      if constexpr (!kModified) release(key_stage);
      const bool moved = weigh(s, mask, key_stage, rescale);
      softmax.settle();
      wgmma_wait<0>();
      add_product(o, product);
      release(value_stage);
      split_weights(s, weights);
      if (moved) scale_rows(o, rescale);
    }
    ring = values_of(first + (steps - 1 - first) / 2 * 2);
    wait_stages<1>();
    multiply_values(product, weights, next_addresses<kValueSlices>(), false);
    wgmma_wait<0>();
    add_product(o, product);
    release(ring.stage);
  }

  // Passes the results of warpgroup 1 to the same thread of warpgroup 0.
  __device__ __forceinline__ void send(const float (&o)[kDimV / 2]) {
    named_sync(kEmptied, 256);
#pragma unroll
    for (int i = 0; i < kDimV / 8; ++i) {
      shared.exchange[i][thread] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    shared.exchange[kDimV / 8][thread] =
        make_float4(softmax.reference[0], softmax.reference[1], softmax.row_sum[0], softmax.row_sum[1]);
    shared.exchange[kDimV / 8 + 1][thread] = make_float4(softmax.limit[0], softmax.limit[1], 0.0f, 0.0f);
    named_arrive(kFilled, 256);
  }

  // Combines the results of both warpgroups.
  __device__ __forceinline__ void receive(float (&o)[kDimV / 2]) {
    named_sync(kFilled, 256);
    const float4 sums = shared.exchange[kDimV / 8][thread], limits = shared.exchange[kDimV / 8 + 1][thread];
    const float other_reference[2] = {sums.x, sums.y}, other_sum[2] = {sums.z, sums.w}, limit[2] = {limits.x, limits.y};
    float own[2], other[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax.join(h, other_reference[h], other_sum[h], limit[h], own[h], other[h]);
#pragma unroll
    for (int i = 0; i < kDimV / 8; ++i) {
      const float4 rest = shared.exchange[i][thread];
      o[4 * i] = o[4 * i] * own[0] + rest.x * other[0];
      o[4 * i + 1] = o[4 * i + 1] * own[0] + rest.y * other[0];
      o[4 * i + 2] = o[4 * i + 2] * own[1] + rest.z * other[1];
      o[4 * i + 3] = o[4 * i + 3] * own[1] + rest.w * other[1];
    }
    named_arrive(kEmptied, 256);
  }

  // Computes the softmax of the CTA's first iteration, which no product overlaps.
  __device__ __forceinline__ void weigh_first(float (&s)[kStepKV / 2], float (&rescale)[2]) {
    const StepMask<kTiles> mask = load_mask(read_numbers(ring.stage));
    const uint32_t stage = ring.stage;
    wgmma_wait<0>();
    pin(s);
    if constexpr (!kModified && !Score::kDrops) release(stage);
    release<1>(next_slices<kKeySlices>());
    advance_slices<kKeySlices>();
    weigh<true>(s, mask, stage, rescale);
  }

  // Tells the writer that there are no more tasks.
  __device__ __forceinline__ void finish_all(const RingPosition<kQueries>& end) {
    named_arrive(kDone + end.stage, kDoneThreads);
  }
};

}  // namespace spattn::sm90
