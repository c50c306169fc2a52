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
    const Element* q = static_cast<const Element*>(p.q) + unit.batch * p.q_stride.batch +
                       unit.head_q * p.q_stride.head + query * p.q_stride.token;
    const Element* k = static_cast<const Element*>(p.k) + unit.batch * p.k_stride.batch +
                       unit.head_kv * p.k_stride.head;
    const Element* v = static_cast<const Element*>(p.v) + unit.batch * p.v_stride.batch +
                       unit.head_kv * p.v_stride.head;
    const auto key = [&](int n) -> long long {
        const int e = item.begin + n / kTileKV, column = n % kTileKV;
        int64_t position;
        if (!mask_allows<kTileKV, kWarpgroups>(p.masks, p.entry_masks[e], row, column)) return -1;
        const Entry entry = p.entries[e];
        const View& view = p.key_views[item.key_view + entry.view];
        return cell_position(view, entry.x, entry.y, entry.z, column, position) ? position : -1;
    };
    const auto dot = [&](int64_t position) {
        double sum = 0;
        for (int d = 0; d < p.head_dim; ++d) {
            sum += double(to_float(q[d])) * double(to_float(k[position * p.k_stride.token + d]));
        }
        return p.sign * sum;
    };
    const auto value = [&](int64_t position, int d) {
        return d < p.head_dim_v ? double(to_float(v[position * p.v_stride.token + d])) : 0.0;
    };
    const auto exact = exact_attention<kDim / 32>((item.end - item.begin) * kTileKV, p.scale_log2, key, dot, value);
    for (int i = 0; i < kDim / 32; ++i) result[i] = float(exact.out[i]);
    lse = float(exact.lse);
}

}  // namespace spattn
