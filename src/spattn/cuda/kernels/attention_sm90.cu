// Formula    out = softmax(scale * q k^T, over the plan's pairs) v and its log-sum-exp, forward.
// Grid       one persistent CTA a multiprocessor; units (work item, batch, head) are handed out by an atomic counter.
// Target     sm_90a: TMA, WGMMA, setmaxnreg.
// Types      bfloat16 or float16 in and out, float32 accumulation, statistics, workspace and lse.
// Warps      warpgroup 0: its first warp loads (TMA); warpgroups 1 .. kBlockQ / 64: 64 query rows each, taking turns on
//            the tensor cores so that one's softmax hides behind the other's products, and each overlapping its own
//            softmax with its own product of the step before.
// Shared     kQueries query tiles and a ring of kSlots key or value steps, in the order K0 K1 V0 K2 V1 ... V(n-1);
//            224 KiB for head_dim 128. The output leaves through the query tile it came from.
// Registers  224 a consumer thread, 56 a producer thread (two consumer warpgroups); no spills.
// Test       tests/cuda/test_hopper.py      Benchmark  benchmarks/peers_cuda.py
// Source     Shah et al., FlashAttention-3 (arXiv:2407.08608): ping-pong and overlap. Plan contract: plan/_types.py.

#include <cstdint>

#include "sm90_barrier.cuh"
#include "sm90_mask.cuh"
#include "sm90_params.cuh"
#include "sm90_repair.cuh"
#include "sm90_softmax.cuh"
#include "sm90_tma.cuh"
#include "sm90_wgmma.cuh"

namespace spattn {

constexpr int kDim = SPATTN_HEAD_DIM;   // 64, 128 or 256: smaller head_dim arrive padded with zeros
constexpr int kBlockQ = SPATTN_BLOCK_Q;
constexpr int kTileKV = SPATTN_TILE_KV;  // the plan's block_kv: 64 or 128
constexpr int kStepKV = SPATTN_STEP_KV;  // keys a product covers
constexpr int kTiles = kStepKV / kTileKV;
constexpr int kPanels = kDim / 64;       // 64 elements are one 128-byte swizzled row
constexpr int kWarpgroups = kBlockQ / 64;
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kConsumerRegisters = kWarpgroups == 3 ? 152 : kWarpgroups == 2 ? 224 : 240;
constexpr int kProducerRegisters = 56;

constexpr uint32_t kRowBytes = 128;
constexpr uint32_t kQueryBytes = kBlockQ * kDim * 2;
constexpr uint32_t kSlotBytes = kStepKV * kDim * 2;
constexpr uint32_t kSharedLimit = 227 * 1024 - 2048;
constexpr int kQueries = 2;
constexpr int kSlotsThatFit = (kSharedLimit - kQueries * kQueryBytes) / kSlotBytes;
constexpr int kSlots = kSlotsThatFit < 8 ? kSlotsThatFit : 8;
static_assert(kStepKV % kTileKV == 0 && kTiles * kPanels <= 32 && kSlots >= 3);

using Element = SPATTN_TYPE;
using QueryKeyProduct = Product<kStepKV>;
using ValueProduct = Product<kDim < 128 ? kDim : 128>;

// What the producer tells the consumers about a unit; an item without keys ends the kernel.
struct alignas(16) Work {
    Item item;
    Unit unit;
};

struct alignas(1024) Shared {
    uint8_t query[kQueries][kQueryBytes];
    uint8_t ring[kSlots][kSlotBytes];
    Work work[kQueries];
    uint64_t query_full[kQueries], query_empty[kQueries], full[kSlots], empty[kSlots];
    int32_t masks[kSlots][kTiles];
};

// Named barriers: 1 + w is warpgroup w's turn on the tensor cores, 4 + w its own threads.
constexpr uint32_t kTurn = 1, kOwn = 4;

// A lane's share of a step: the tile it loads, as coordinates of a tensor map.
struct StepTile {
    int x, y, z, map, mask;
};

// Everything the producer must know of a unit before its first copy.
struct Assignment {
    Unit unit;
    Item item;
    StepTile tiles;  // lane l: entry begin + l of the list
};

__device__ __forceinline__ StepTile broadcast(const StepTile& tile, int lane) {
    constexpr uint32_t kAll = 0xffffffff;
    return {__shfl_sync(kAll, tile.x, lane), __shfl_sync(kAll, tile.y, lane), __shfl_sync(kAll, tile.z, lane),
            __shfl_sync(kAll, tile.map, lane), __shfl_sync(kAll, tile.mask, lane)};
}

struct Producer {
    const Params& p;
    Shared& shared;
    const int lane = threadIdx.x % 32;
    RingPosition<kSlots> ring;
    RingPosition<kQueries> query;
    StepTile previous;  // its values are still to be loaded
    int previous_head = -1;

    __device__ __forceinline__ StepTile load_entries(const Assignment& work, int e) const {
        const int last = min(e, work.item.end - 1);
        const Entry entry = p.entries[last];
        const View& view = p.key_views[work.item.key_view + entry.view];
        return {entry.x, entry.y + view.shift_y, entry.z + view.shift_z, view.map + work.unit.batch * p.batch_maps,
                e < work.item.end ? p.entry_masks[last] : kNoTile};
    }

    // Four dependent reads: done for the next unit while this one's copies are under way.
    __device__ __forceinline__ Assignment look_up(int number) const {
        Assignment work;
        work.unit.item = -1;
        if (number < p.unit_count) {
            work.unit = p.units[number];
            work.item = p.items[work.unit.item];
            work.tiles = load_entries(work, work.item.begin + lane);
        }
        return work;
    }

    __device__ __forceinline__ void load_query(const Assignment& work) {
        const uint32_t full = shared_address(&shared.query_full[query.slot]);
        const View& view = p.query_views[work.item.query_view];
        barrier_wait(shared_address(&shared.query_empty[query.slot]), query.parity ^ 1);
        if (lane == 0) {
            shared.work[query.slot].item = work.item;
            shared.work[query.slot].unit = work.unit;
            barrier_arrive_expect(full, kQueryBytes);
        }
        if (lane < kWarpgroups * kPanels) {
            const int part = lane / kPanels, panel = lane % kPanels;
            const uint32_t destination = shared_address(shared.query[query.slot]) + panel * kBlockQ * kRowBytes +
                                         part * 64 * kRowBytes;
            tma_load(destination, &p.maps[view.map + work.unit.batch * p.batch_maps], full, panel * 64,
                     work.item.x + part * view.half[2], work.item.y + view.shift_y + part * view.half[1],
                     work.item.z + view.shift_z + part * view.half[0],
                     work.unit.batch * p.q_batch + work.unit.head_q);
        }
        query.advance();
    }

    // Fills the next slot with keys (kValue = 0) or values (1); lane = tile * kPanels + panel issues one copy.
    template <int kValue>
    __device__ __forceinline__ void load_step(const StepTile& tile, int head) {
        const uint32_t full = shared_address(&shared.full[ring.slot]);
        const int part = lane / kPanels, panel = lane % kPanels;
        barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
        if (kValue == 0) {
            if (lane < kTiles * kPanels && panel == 0) shared.masks[ring.slot][part] = tile.mask;
            __syncwarp();
        }
        if (lane == 0) barrier_arrive_expect(full, kSlotBytes);
        if (lane < kTiles * kPanels) {
            const uint32_t destination =
                shared_address(shared.ring[ring.slot]) + (panel * kStepKV + part * kTileKV) * kRowBytes;
            tma_load(destination, &p.maps[tile.map + kValue], full, panel * 64, tile.x, tile.y, tile.z, head);
        }
        ring.advance();
    }

    __device__ __forceinline__ void load_previous_values() {
        if (previous_head >= 0) load_step<1>(previous, previous_head);
    }

    // The counter hands out unit_count + gridDim.x tickets in all, whoever draws them. A ticket is used long after it was
    // drawn, so that nothing waits for the atomic.
    __device__ __forceinline__ int draw() const { return lane == 0 ? atomicAdd(p.counter, 1) : 0; }

    // Number of a ticket's unit; whoever holds the last ticket puts the counter back to zero.
    __device__ __forceinline__ int settle(int ticket) const {
        if (lane == 0 && ticket == p.unit_count + gridDim.x - 1) atomicExch(p.counter, 0);
        return gridDim.x + __shfl_sync(0xffffffff, ticket, 0);
    }

    // Loads a unit and returns the next one, whose ticket is replaced by the ticket of the one after it.
    __device__ __forceinline__ Assignment load_unit(Assignment& work, int& ticket) {
        Assignment next;
        load_query(work);
        const int part = lane / kPanels % kTiles;
        const int head = work.unit.batch * p.kv_batch + work.unit.head_kv;
        for (int e = work.item.begin; e < work.item.end; e += kTiles) {
            const int place = (e - work.item.begin) % 32;
            if (place == 0 && e > work.item.begin) work.tiles = load_entries(work, e + lane);
            const StepTile current = broadcast(work.tiles, place + part);
            load_step<0>(current, head);
            load_previous_values();
            previous = current;
            previous_head = head;
            if (e == work.item.begin) next = look_up(settle(ticket));
        }
        ticket = draw();
        return next;
    }

    __device__ void run() {
        int ticket = draw();
        Assignment work = look_up(blockIdx.x);
        while (work.unit.item >= 0) work = load_unit(work, ticket);
        settle(ticket);
        load_previous_values();
        barrier_wait(shared_address(&shared.query_empty[query.slot]), query.parity ^ 1);
        if (lane == 0) {
            shared.work[query.slot].item = {0, 0, 0, 0, 0, 0, 0, 0};
            barrier_arrive(shared_address(&shared.query_full[query.slot]));
        }
    }
};

struct Consumer {
    const Params& p;
    Shared& shared;
    const int warpgroup = threadIdx.x / 128 - 1;
    const int thread = threadIdx.x % 128;
    RingPosition<kSlots> ring;
    RingPosition<kQueries> query;
    Softmax softmax;

    __device__ __forceinline__ uint32_t wait_slot() {
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        return shared_address(shared.ring[ring.slot]);
    }

    __device__ __forceinline__ void release(uint32_t slot) {
        if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[slot]));
    }

    // s = q k^T of this warpgroup's rows and the step in the slot at `keys`; asynchronous.
    __device__ __forceinline__ void multiply_keys(float (&s)[kStepKV / 2], uint32_t query_slot, uint32_t keys) {
        const uint32_t rows = shared_address(shared.query[query_slot]) + warpgroup * 64 * kRowBytes;
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

    __device__ __forceinline__ StepMask load_mask() {
        StepMask mask;
        mask.partial = false;
        int number[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            number[t] = shared.masks[ring.slot][t];
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

    __device__ __forceinline__ void weigh(float (&s)[kStepKV / 2], const StepMask& mask, float (&rescale)[2]) {
        if (p.sign != 1.0f) {
#pragma unroll
            for (int i = 0; i < kStepKV / 2; ++i) s[i] *= p.sign;
        }
        if (mask.partial) {
            apply_mask<0>(s, mask.word[0]);
            if constexpr (kStepKV == 128) apply_mask<32>(s, mask.word[1]);
        }
        softmax.update(s, p.scale_log2, rescale);
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

    // Normalised rows as elements, through this warpgroup's own rows of the query tile; cells outside the view stay.
    __device__ __forceinline__ void store_tile(const Item& item, const Unit& unit, const float (&o)[kDim / 2]) {
        const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
        const uint32_t tile = shared_address(shared.query[query.slot]) + warpgroup * 64 * kRowBytes;
#pragma unroll
        for (int i = 0; i < kDim / 8; i += 2) {
            const int chunk = i % 8 + lane / 16;
            const uint32_t address =
                tile + i / 8 * kBlockQ * kRowBytes + row * kRowBytes + ((chunk ^ (row % 8)) * 16);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                         "r"(pack(o[4 * i], o[4 * i + 1])), "r"(pack(o[4 * i + 2], o[4 * i + 3])),
                         "r"(pack(o[4 * i + 4], o[4 * i + 5])), "r"(pack(o[4 * i + 6], o[4 * i + 7]))
                         : "memory");
        }
        fence_async_proxy();
        named_sync(kOwn + warpgroup, 128);
        if (thread == 0) {
            const View& view = p.query_views[item.query_view];
            const TensorMap* map = &p.maps[view.map + 1 + unit.batch * p.batch_maps];
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                tma_store(map, tile + panel * kBlockQ * kRowBytes, panel * 64, item.x + warpgroup * view.half[2],
                          item.y + view.shift_y + warpgroup * view.half[1],
                          item.z + view.shift_z + warpgroup * view.half[0], unit.batch * p.q_batch + unit.head_q);
            }
            tma_store_commit();
            tma_store_wait_read();
        }
    }

    // Row of the workspace where row `row` of the item goes.
    __device__ __forceinline__ int64_t partial_row(const Item& item, const Unit& unit, int row) {
        return (static_cast<int64_t>(unit.batch) * p.heads_q + unit.head_q) * p.partial_rows + item.slot * kBlockQ +
               row;
    }

    __device__ __forceinline__ void store_partial(const Item& item, const Unit& unit, const float (&o)[kDim / 2]) {
        const int lane = thread % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = warpgroup * 64 + thread / 32 * 16 + 8 * h + lane / 4;
            float* target = p.partial_out + partial_row(item, unit, row) * p.head_dim_v;
#pragma unroll
            for (int i = 0; i < kDim / 8; ++i) {
                const int column = 8 * i + lane % 4 * 2;
                if (column < p.head_dim_v) {
                    *reinterpret_cast<float2*>(target + column) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ void store_lse(const Item& item, const Unit& unit, int row, float lse) {
        int64_t position;
        const bool valid = cell_position(p.query_views[item.query_view], item.x, item.y, item.z, row, position);
        if (item.slot >= 0) {
            p.partial_lse[partial_row(item, unit, row)] = lse;
        } else if (valid) {
            p.lse[(static_cast<int64_t>(unit.batch) * p.heads_q + unit.head_q) * p.q_len + position] = lse;
        }
    }

    // Overwrites the non-finite rows of this warp (bit r of `rows`: its row r) once the tile has been stored.
    __device__ __forceinline__ void repair(const Item& item, const Unit& unit, uint32_t rows) {
        const int lane = thread % 32;
        for (; rows; rows &= rows - 1) {
            const int row = warpgroup * 64 + thread / 32 * 16 + __ffs(rows) - 1;
            int64_t position;
            float result[kDim / 32], lse;
            if (!cell_position(p.query_views[item.query_view], item.x, item.y, item.z, row, position)) continue;
            repair_row<Element, kDim, kTileKV, kWarpgroups>(p, item, unit, row, position, result, lse);
            Element* out = static_cast<Element*>(p.out) + unit.batch * p.out_stride.batch +
                           unit.head_q * p.out_stride.head + position * p.out_stride.token;
            for (int i = 0; i < kDim / 32; ++i) {
                const int d = lane + 32 * i;
                if (d >= p.head_dim_v) continue;
                if (item.slot >= 0) p.partial_out[partial_row(item, unit, row) * p.head_dim_v + d] = result[i];
                else from_float(result[i], out[d]);
            }
            if (lane == 0) store_lse(item, unit, row, lse);
        }
    }

    // Normalises the rows of the item at `query` and writes them; gives its query tile back.
    __device__ __forceinline__ void finish(Softmax softmax, float (&o)[kDim / 2]) {
        const int lane = thread % 32;
        const Item item = shared.work[query.slot].item;
        const Unit unit = shared.work[query.slot].unit;
        softmax.total();
        float probe[2], inverse[2];
        probe_rows(o, probe);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            probe[h] = quad_sum(probe[h] + softmax.row_sum[h] * 0.0f);
            inverse[h] = softmax.row_sum[h] == 0.0f ? 0.0f : 1.0f / softmax.row_sum[h];
            const int row = warpgroup * 64 + thread / 32 * 16 + 8 * h + lane / 4;
            if (lane % 4 == 0) store_lse(item, unit, row, softmax.lse(h, p.scale_log2));
        }
        uint32_t rows = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t lanes = __ballot_sync(0xffffffff, !(probe[h] == 0.0f));
            for (int r = 0; lanes && r < 8; ++r) rows |= (lanes >> (4 * r) & 1) << (8 * h + r);
        }
        scale_rows(o, inverse);
        const bool repairs = named_sync_or(kOwn + warpgroup, 128, rows != 0);  // and all are done with the query tile
        if (item.slot >= 0) store_partial(item, unit, o);
        else store_tile(item, unit, o);
        if (repairs) {
            if (thread == 0) tma_store_wait();
            named_sync(kOwn + warpgroup, 128);
            repair(item, unit, rows);
        }
        if (thread == 0) barrier_arrive(shared_address(&shared.query_empty[query.slot]));
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
        if (kWarpgroups > 1 && warpgroup == kWarpgroups - 1) named_arrive(kTurn, 256);
        int steps = open(query);
        if (steps == 0) return;
        float s[kStepKV / 2], o[kDim / 2], rescale[2];
        uint32_t weights[kStepKV / 4];
        softmax.reset();
        clear(o);
        {
            const uint32_t keys = wait_slot();
            const StepMask mask = load_mask();
            multiply_keys(s, query.slot, keys);
            wgmma_wait<0>();
            pin(s);
            release(ring.slot);
            ring.advance();
            weigh(s, mask, rescale);
            pack_weights(s, weights);
        }
        while (true) {
            const bool last = --steps == 0;
            RingPosition<kQueries> ahead = query;
            if (last) {
                ahead.advance();
                steps = open(ahead);
                if (steps == 0) break;
            }
            const uint32_t keys = wait_slot();
            const StepMask mask = load_mask();
            if constexpr (kWarpgroups > 1) named_sync(kTurn + warpgroup, 256);
            multiply_keys(s, ahead.slot, keys);
            const uint32_t key_slot = ring.slot;
            ring.advance();
            multiply_values(o, weights, wait_slot());
            if constexpr (kWarpgroups > 1) named_arrive(kTurn + (warpgroup + 1) % kWarpgroups, 256);
            wgmma_wait<1>();
            pin(s);
            release(key_slot);
            const Softmax before = softmax;
            if (last) softmax.reset();
            weigh(s, mask, rescale);
            wgmma_wait<0>();
            pin(o);
            release(ring.slot);
            ring.advance();
            pack_weights(s, weights);
            if (last) {
                finish(before, o);
                query = ahead;
                clear(o);
            } else {
                scale_rows(o, rescale);
            }
        }
        multiply_values(o, weights, wait_slot());
        wgmma_wait<0>();
        pin(o);
        finish(softmax, o);
        if (thread == 0) tma_store_wait();
    }
};

}  // namespace spattn

extern "C" __global__ void __launch_bounds__(spattn::kThreads, 1)
attention_sm90(const __grid_constant__ spattn::Params params) {
    using namespace spattn;
    extern __shared__ uint8_t dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(dynamic) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kQueries; ++i) {
            barrier_init(shared_address(&shared.query_full[i]), 1);
            barrier_init(shared_address(&shared.query_empty[i]), kWarpgroups);
        }
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), 4 * kWarpgroups);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_shrink<kProducerRegisters>();
        if (threadIdx.x < 32) {
            Producer producer{params, shared};
            producer.run();
        }
    } else {
        registers_grow<kConsumerRegisters>();
        Consumer consumer{params, shared};
        consumer.run();
    }
}

// One warp a row and head: the log-sum-exp combination of the row's workspace rows, in the plan's order.
extern "C" __global__ void __launch_bounds__(256)
merge_sm90(const int32_t* rows, const int32_t* indptr, const int32_t* sources, const int4* heads, int head_count,
           const float* partial_out, const float* partial_lse, int64_t partial_rows, void* out, float* lse,
           spattn::Strides out_stride, int64_t q_len, int heads_q, int head_dim_v) {
    using namespace spattn;
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.y;  // {first merge, end merge, batch, head_q}
    const int4 range = heads[head];
    const int merge = range.x + blockIdx.x * 8 + threadIdx.x / 32;
    if (merge >= range.y) return;
    const int64_t place = static_cast<int64_t>(range.z) * heads_q + range.w;
    const int begin = indptr[merge], end = indptr[merge + 1];
    float largest = minus_infinity(), sum = 0.0f;
    for (int s = begin; s < end; ++s) {
        const float value = partial_lse[place * partial_rows + sources[s]];
        largest = value > largest || value != value ? value : largest;
    }
    const float shift = largest == minus_infinity() ? 0.0f : largest;
    float result[kDim / 32] = {};
    for (int s = begin; s < end; ++s) {
        const int64_t source = place * partial_rows + sources[s];
        const float weight = expf(partial_lse[source] - shift);
        sum += weight;
        for (int i = 0; i < kDim / 32; ++i) {
            const int d = lane + 32 * i;
            if (d < head_dim_v) result[i] = fmaf(weight, partial_out[source * head_dim_v + d], result[i]);
        }
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    Element* target = static_cast<Element*>(out) + range.z * out_stride.batch + range.w * out_stride.head +
                      rows[merge] * out_stride.token;
    for (int i = 0; i < kDim / 32; ++i) {
        const int d = lane + 32 * i;
        if (d < head_dim_v) from_float(result[i] * inverse, target[d]);
    }
    if (lane == 0) lse[place * q_len + rows[merge]] = sum == 0.0f ? minus_infinity() : shift + logf(sum);
}
