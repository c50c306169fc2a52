// The exact slow path: one warp recomputes one row from the plan, touching allowed keys only.
//
// The tensor cores multiply masked probabilities (0) by every value of a tile; 0 * NaN and 0 * inf are NaN. A row that
// comes out non-finite, or whose logits are too large for float32, is therefore computed again here, in float64 and in
// the order of the plan's list.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "exact_softmax.cuh"
#include "sm90_mask.cuh"
#include "sm90_params.cuh"
#include "sm90_softmax.cuh"

namespace spattn {

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }

// Softmax attention of row `row` (position `query`) of an item; lane l holds dimensions l, l + 32, ... of the result.
template <typename Element, int kDim, int kTileKV, int kWarpgroups>
__device__ void repair_row(const Params& p, const Item& item, const Unit& unit, int row, int64_t query,
                           float (&result)[kDim / 32], float& lse) {
    const int lane = threadIdx.x % 32;
    const Element* q = static_cast<const Element*>(p.q) + unit.batch * p.q_stride.batch +
                       unit.head_q * p.q_stride.head + query * p.q_stride.token;
    const Element* k = static_cast<const Element*>(p.k) + unit.batch * p.k_stride.batch +
                       unit.head_kv * p.k_stride.head;
    const Element* v = static_cast<const Element*>(p.v) + unit.batch * p.v_stride.batch +
                       unit.head_kv * p.v_stride.head;
    ExactSoftmax softmax{p.scale_log2};
    double sums[kDim / 32] = {};
    for (int e = item.begin; e < item.end; ++e) {
        const Entry entry = p.entries[e];
        const View& view = p.key_views[item.key_view + entry.view];
        const int mask = p.entry_masks[e];
        for (int column = 0; column < kTileKV; ++column) {
            int64_t key;
            if (!mask_allows<kTileKV, kWarpgroups>(p.masks, mask, row, column)) continue;
            if (!cell_position(view, entry.x, entry.y, entry.z, column, key)) continue;
            double dot = 0;
            for (int d = lane; d < p.head_dim; d += 32) {
                dot += double(p.sign * to_float(q[d])) * double(to_float(k[key * p.k_stride.token + d]));
            }
            for (int step = 16; step; step /= 2) dot += __shfl_xor_sync(0xffffffff, dot, step);
            const auto weight = softmax.add(dot);
            for (int i = 0; i < kDim / 32; ++i) {
                const int d = lane + 32 * i;
                const double value = d < p.head_dim_v ? to_float(v[key * p.v_stride.token + d]) : 0.0f;
                sums[i] = sums[i] * weight.before + weight.own * value;
            }
        }
    }
    for (int i = 0; i < kDim / 32; ++i) result[i] = float(softmax.normalised(sums[i]));
    lse = float(softmax.lse());
}

}  // namespace spattn
