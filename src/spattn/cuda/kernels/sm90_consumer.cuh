// The warpgroups that compute: products on the tensor cores, online softmax in between.
#pragma once

#include "sm90_barrier.cuh"
#include "sm90_config.cuh"
#include "sm90_mask.cuh"
#include "sm90_softmax.cuh"
#include "sm90_wgmma.cuh"

namespace spattn {

struct Consumer {
    const Params& p;
    Shared& shared;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    const int thread = threadIdx.x % 128;
    RingPosition<kSlots> ring;
    RingPosition<kQueries> query;
    Softmax softmax;

    __device__ __forceinline__ void wait_slot() {
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    }

    // Where the keys or values of a slot lie, and this warpgroup's rows of a query tile.
    __device__ __forceinline__ uint32_t slot_address(uint32_t slot) const {
        return uniform(shared_address(shared.ring[slot]));
    }

    __device__ __forceinline__ uint32_t rows_address(uint32_t query_slot) const {
        return uniform(shared_address(shared.query[query_slot]) + warpgroup * 64 * kRowBytes);
    }

    __device__ __forceinline__ void release(uint32_t slot) {
        if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[slot]));
    }

    // s = q k^T of the query rows and the keys at these addresses; asynchronous.
    __device__ __forceinline__ void multiply_keys(float (&s)[kStepKV / 2], uint32_t rows, uint32_t keys) {
        const uint64_t a = operand_descriptor(rows, 16, 1024), b = operand_descriptor(keys, 16, 1024);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kDim / 16; ++chunk) {
            const int panel = chunk / 4, within = chunk % 4 * 32;
            QueryKeyProduct::shared(s, a + (panel * kBlockQ * kRowBytes + within) / 16,
                                    b + (panel * kStepKV * kRowBytes + within) / 16, chunk != 0);
        }
        wgmma_commit();
    }

    // o += probabilities v; asynchronous.
    __device__ __forceinline__ void multiply_values(float (&o)[kDim / 2], const uint32_t (&weights)[kStepKV / 4],
                                                    uint32_t values) {
        const uint64_t b = operand_descriptor(values, kStepKV * kRowBytes, 1024);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kStepKV / 16; ++chunk) {
#pragma unroll
            for (int part = 0; part < kDim / 2 / ValueProduct::kCount; ++part) {
                ValueProduct::registers(o + part * ValueProduct::kCount, weights + 4 * chunk,
                                        b + (chunk * 16 + part * 2 * kStepKV) * kRowBytes / 16);
            }
        }
        wgmma_commit();
    }

    // The mask words of the step in the current slot, issued early so that their latency hides behind the product.
    struct StepMask {
        uint32_t word[kStepKV / 64];
        bool partial;
    };

    __device__ __forceinline__ StepMask load_mask(uint32_t slot) {
        StepMask mask;
        mask.partial = false;
        int number[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            // One lane reads what the same lane releases; the reduction tells the others.
            number[t] = static_cast<int>(uniform(thread % 32 == 0 ? shared.masks[slot][t] : 0));
            mask.partial |= number[t] != kFullTile;
        }
        if (mask.partial) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const auto word = mask_word<kTileKV, kWarpgroups>(p.masks, number[t], warpgroup, thread);
                mask.word[t * (kTileKV / 64)] = static_cast<uint32_t>(word);
                if (kTileKV == 128) mask.word[t * 2 + 1] = static_cast<uint32_t>(static_cast<uint64_t>(word) >> 32);
            }
        }
        return mask;
    }

    __device__ __forceinline__ bool weigh(float (&s)[kStepKV / 2], const StepMask& mask, float (&rescale)[2]) {
        if (p.sign != 1.0f) {
#pragma unroll
            for (int i = 0; i < kStepKV / 2; ++i) s[i] *= p.sign;
        }
        if (mask.partial) {
            apply_mask<0>(s, mask.word[0]);
            if constexpr (kStepKV == 128) apply_mask<32>(s, mask.word[1]);
        }
        return softmax.update(s, p.scale_log2, rescale);
    }

    template <int kCount>
    __device__ __forceinline__ static void clear(float (&o)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) o[i] = 0.0f;
    }

    __device__ __forceinline__ static void pack_weights(const float (&s)[kStepKV / 2],
                                                        uint32_t (&weights)[kStepKV / 4]) {
#pragma unroll
        for (int i = 0; i < kStepKV / 4; ++i) weights[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    // Normalised rows as elements into this warpgroup's own rows of the query tile, for the writer to store.
    __device__ __forceinline__ void stage_tile(const float (&o)[kDim / 2]) {
        const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
        const uint32_t tile = shared_address(shared.query[query.slot]) + (warpgroup * 64 + row) * kRowBytes;
#pragma unroll
        for (int i = 0; i < kDim / 8; i += 2) {
            const int chunk = i % 8 + lane / 16;
            store_matrices(tile + i / 8 * kBlockQ * kRowBytes + (chunk ^ (row % 8)) * 16,
                           pack(o[4 * i], o[4 * i + 1]), pack(o[4 * i + 2], o[4 * i + 3]),
                           pack(o[4 * i + 4], o[4 * i + 5]), pack(o[4 * i + 6], o[4 * i + 7]));
        }
        fence_async_proxy();
    }

    __device__ __forceinline__ void store_partial(const Work& work, const float (&o)[kDim / 2]) {
        const int lane = thread % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warpgroup * 64 + thread / 32 * 16 + 8 * h + lane / 4;
            int64_t position;
            // Most rows of a decoding tile are padding, and nobody reads them.
            if (!cell_position(p.query_views[work.item.query_view], work.item.x, work.item.y, work.item.z, row,
                               position)) {
                continue;
            }
            float* target = p.partial_out + partial_row(p, work, row) * p.head_dim_v;
#pragma unroll
            for (int i = 0; i < kDim / 8; ++i) {
                const int column = 8 * i + lane % 4 * 2;
                if (column < p.head_dim_v) {
                    *reinterpret_cast<float2*>(target + column) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
                }
            }
        }
    }

    // Rows of a finishing item: normalised, and joined with what another item has left in the workspace.
    __device__ __forceinline__ void join_prior(const Work& work, float (&o)[kDim / 2], const float (&inverse)[2]) {
        const int lane = thread % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warpgroup * 64 + thread / 32 * 16 + 8 * h + lane / 4;
            const int64_t prior = prior_row(p, work, row);
            float& lse = shared.lse[query.slot][row];
            Blend both = {1.0f, 0.0f, lse};
            if (prior >= 0) both = blend(lse, p.partial_lse[prior]);
            __syncwarp();
            if (lane % 4 == 0) lse = both.lse;
            const float* source = p.partial_out + max(prior, int64_t(0)) * p.head_dim_v + lane % 4 * 2;
            const float own = both.own * inverse[h];
#pragma unroll
            for (int i = 0; i < kDim / 8; ++i) {
                const bool real = prior >= 0 && 8 * i < p.head_dim_v;
                const float2 rest = real ? __ldcs(reinterpret_cast<const float2*>(source + 8 * i)) : float2{};
                o[4 * i + 2 * h] = o[4 * i + 2 * h] * own + rest.x * both.other;
                o[4 * i + 2 * h + 1] = o[4 * i + 2 * h + 1] * own + rest.y * both.other;
            }
        }
    }

    // Normalises the rows of the item at `query` and hands them to the writer.
    __device__ __forceinline__ void finish(Softmax softmax, float (&o)[kDim / 2]) {
        const int lane = thread % 32, first = warpgroup * 64 + thread / 32 * 16;
        softmax.total();
        float probe[2], inverse[2];
        probe_rows(o, probe);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            probe[h] = quad_sum(probe[h] + softmax.row_sum[h] * 0.0f + (softmax.far(h) ? 1.0f : 0.0f));
            inverse[h] = softmax.row_sum[h] == 0.0f ? 0.0f : 1.0f / softmax.row_sum[h];
            if (lane % 4 == 0) shared.lse[query.slot][first + 8 * h + lane / 4] = softmax.lse(h);
        }
        uint32_t rows = 0;
        if (__any_sync(0xffffffff, !(probe[0] + probe[1] == 0.0f))) {
            for (int h = 0; h < 2; ++h) {
                const uint32_t lanes = __ballot_sync(0xffffffff, !(probe[h] == 0.0f));
                for (int r = 0; r < 8; ++r) rows |= (lanes >> (4 * r) & 1) << (8 * h + r);
            }
        }
        if (lane == 0) shared.repair[query.slot][first / 16] = rows;
        const Work& work = shared.work[query.slot];
        __syncwarp();
        if (work.item.slot <= -2) join_prior(work, o, inverse);
        else scale_rows(o, inverse);
        named_sync(kOwn + warpgroup, 128);  // all of its warps are done with the query tile
        if (work.item.slot >= 0) store_partial(work, o);
        else stage_tile(o);
        barrier_arrive(shared_address(&shared.done[query.slot]));
    }

    // Waits for a query tile and returns the number of steps of its item; 0 ends the kernel.
    __device__ __forceinline__ int open(const RingPosition<kQueries>& position) {
        barrier_wait(shared_address(&shared.query_full[position.slot]), position.parity);
        const Item& item = shared.work[position.slot].item;
        return (item.end - item.begin + kTiles - 1) / kTiles;
    }

    // One stream of steps through all items of this CTA: the products of a step run while the softmax of the next one
    // (of the same item, or the first of the next item) is computed.
    __device__ void run() {
        if (kTurns && warpgroup == kWarpgroups - 1) named_arrive(kTurn, 256);
        int steps = open(query);
        if (steps == 0) return finish_all(query);
        float s[kStepKV / 2], o[kDim / 2], rescale[2];
        uint32_t weights[kStepKV / 4];
        softmax.reset();
        clear(o);
        wait_slot();
        multiply_keys(s, rows_address(query.slot), slot_address(ring.slot));
        weigh_first(s, rescale);
        pack_weights(s, weights);
        bool last = steps == 1;
        RingPosition<kQueries> ahead = query;  // the item whose step comes next
        if (last) ahead.advance();
        uint32_t rows = rows_address(ahead.slot), keys = slot_address(ring.slot);
        while (true) {
            steps = last ? open(ahead) : steps - 1;
            if (steps == 0) break;
            wait_slot();
            if constexpr (kTurns) named_sync(kTurn + warpgroup, 256);
            multiply_keys(s, rows, keys);
            const uint32_t key_slot = ring.slot;
            const StepMask mask = load_mask(key_slot);
            ring.advance();
            wait_slot();
            multiply_values(o, weights, slot_address(ring.slot));
            if constexpr (kTurns) named_arrive(kTurn + (warpgroup + 1) % kWarpgroups, 256);

            const uint32_t value_slot = ring.slot;  // addresses of the next step, while this one is computed
            const bool finished = last;
            ring.advance();
            keys = slot_address(ring.slot);
            last = steps == 1;
            if (last) ahead.advance();
            rows = rows_address(ahead.slot);

            wgmma_wait<1>();
            pin(s);
            release(key_slot);
            const Softmax before = softmax;
            if (finished) softmax.reset();
            const bool moved = weigh(s, mask, rescale);
            softmax.settle();
            wgmma_wait<0>();
            pin(o);
            release(value_slot);
            pack_weights(s, weights);
            if (finished) {
                finish(before, o);
                query.advance();
                clear(o);
            } else if (moved) {
                scale_rows(o, rescale);
            }
        }
        wait_slot();
        multiply_values(o, weights, slot_address(ring.slot));
        wgmma_wait<0>();
        pin(o);
        finish(softmax, o);
        query.advance();
        finish_all(query);
    }

    // Softmax of the very first step, which has no product to hide behind.
    __device__ __forceinline__ void weigh_first(float (&s)[kStepKV / 2], float (&rescale)[2]) {
        const StepMask mask = load_mask(ring.slot);
        wgmma_wait<0>();
        pin(s);
        release(ring.slot);
        ring.advance();
        weigh(s, mask, rescale);
    }

    // Passes the end marker on to the writer.
    __device__ __forceinline__ void finish_all(const RingPosition<kQueries>& end) {
        barrier_arrive(shared_address(&shared.done[end.slot]));
    }
};

}  // namespace spattn
