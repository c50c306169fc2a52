// Consumer warpgroups for float8. No product of a warpgroup overlaps its own softmax; those of the others do. So the PV
// product of an iteration takes the registers of its scores, which leaves room for three warpgroups. It is a sum of its
// own, added to the output by ordinary additions: the tensor cores truncate each product of float8 to about 14 bits of
// the largest addend, which over a long row would add up.
#pragma once

#include "sm90/forward/consumer.cuh"

namespace spattn::sm90 {

struct Float8Consumer : Consumer {
  // Starts product = weights v for values that Transposer has transposed.
  __device__ __forceinline__ static void start_values(float (&product)[kDim / 2], const Weights& weights,
                                                      uint32_t values) {
    const uint64_t b = operand_descriptor(values, 16, 1024);
    pin(product);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kStepKV / 32; ++i) Product<128>::registers(product, weights[0] + 4 * i, b + i * 32 / 16, i > 0);
    wgmma_commit();
  }

  // Converts weights to float8, as the A operand of values in the order of Transposer: words 4 j to 4 j + 3 are of keys
  // 32 j to 32 j + 31.
  __device__ __forceinline__ static void narrow_weights(const float (&s)[kStepKV / 2], Weights& weights) {
#pragma unroll
    for (int i = 0; i < kStepKV / 8; ++i) {
      const float* pairs = s + i / 2 * 8 + i % 2 * 2;
      weights[0][i] = narrow4(pairs[0], pairs[1], pairs[4], pairs[5]);
    }
  }

  // Runs all tasks of this CTA. Keys are in stages 0, 1, 3, 5, ..., values in stages 2, 4, 6, ...
  __device__ void run() {
    float s[kStepKV / 2], o[kDim / 2], rescale[2];
    Weights weights;
    RingPosition<kStages> values;
    values.advance(2);
    uint32_t places = 1;  // from this iteration's keys to the next ones
    for (;; query.advance()) {
      int steps = open(query);
      if (steps == 0) break;
      softmax.reset();
      clear(o);
      const uint32_t rows = rows_address(query.stage);
      for (; steps > 0; --steps) {
        wait_stages<1>();
        const uint32_t key_stage = ring.stage;
        const MaskNumbers numbers = read_numbers(key_stage);
        multiply_keys(s, rows, {shared_address(shared.ring[key_stage])});
        const StepMask<kTiles> mask = load_mask(numbers);
        ring.advance(places);
        places = 2;
        wgmma_wait<0>();
        pin(s);
        if constexpr (!kModified) release(key_stage);
        const bool moved = weigh(s, mask, key_stage, rescale);
        const uint32_t value_stage = values.stage;
        barrier_wait(shared_address(&shared.full[value_stage]), values.parity);
        narrow_weights(s, weights);
        start_values(s, weights, shared_address(shared.ring[value_stage]));
        values.advance(2);
        if (moved) scale_rows(o, rescale);
        wgmma_wait<0>();
        release(value_stage);
        pin(s);
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] += s[i];
      }
      finish(softmax, o);
    }
    finish_all(query);
  }
};

}  // namespace spattn::sm90
