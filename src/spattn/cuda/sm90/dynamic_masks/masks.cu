// Formula    bitmasks of the tiles that tiles.cu lists: the plan's bitmask and the dynamic mask, intersected.
// Grid       a few CTAs per SM; each warp loops over tiles.
// Target     sm_90a (no special instructions; shares the structs of attention.cu).
// Test       tests/cuda/sm90/test_dynamic_masks.py      Benchmark  benchmarks/planning/replanning_cuda.py

#include "sm90/dynamic_masks/allowed.cuh"
#include "sm90/forward/mask.cuh"

namespace spattn::sm90 {

constexpr int kMaskThreads = 128;
constexpr int kMaskWarps = kMaskThreads / 32;
constexpr int kWords = 128;   // per bitmask of 64 rows
constexpr int kColumns = 16;  // keys per lane and row

// Returns the bit of a lane's key n, column 8 (n / 2) + 2 (lane % 4) + n % 2 of the tile, in rows 0 to 7 of 16; in rows
// 8 to 15 the bit is two higher.
__device__ __forceinline__ uint32_t bit_of(int n) { return 1u << (n / 2 * 4 + n % 2); }

// Extracts the lane's bits from a row of 64.
__device__ __forceinline__ uint32_t own_bits(uint64_t row, int lane) {
  uint64_t bits = row >> (lane % 4 * 2) & 0x0303030303030303;
  bits = (bits | bits >> 4) & 0x00ff00ff00ff00ff;
  bits = (bits | bits >> 8) & 0x0000ffff0000ffff;
  return bits | bits >> 16;
}

// Keys of a tile: the codes of the lane's keys and, if all 64 are contiguous, the first one's position.
struct Columns {
  const Allowed& allowed;
  const int lane;
  int codes[kColumns];
  uint32_t real = 0;   // the lane's keys that some query may attend to
  uint32_t later = 0;  // the lane's keys that all queries from the key's position on may attend to
  int first = -1;      // position of the first of 64 contiguous keys (kLines only), else -1
  uint64_t chosen = 0;

  __device__ __forceinline__ Columns(const Allowed& allowed, const View& view, const Entry& entry, int lane)
      : allowed(allowed), lane(lane) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      int64_t at;
      const bool there = cell_position(view, entry.x, entry.y, entry.z, n / 2 * 8 + lane % 4 * 2 + n % 2, at);
      codes[n] = there ? allowed.key_code(at) : -1;
      if (!allowed.some_queries(codes[n])) continue;
      real |= bit_of(n);
      if (allowed.later_queries(codes[n])) later |= bit_of(n);
    }
    if (allowed.s.form == kLines && view.box[2] == 64 && view.stride[2] == 1) {
      first = reach_of(view, entry.x, entry.y, entry.z).first;
      chosen = allowed.bits_from(0, first);
    }
  }

  // Returns the lane's keys that a query may attend to.
  __device__ __forceinline__ uint32_t seen_by(int position) const {
    if (allowed.s.form == kLengths) return real;
    if (position < 0) return 0;
    if (first >= 0) return own_bits(seen_side_by_side(position - first), lane) & real;
    const int code = allowed.query_code(position);
    uint32_t found = 0;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint32_t own = bit_of(n);
      if ((real & own) && allowed.pair(code, codes[n], later & own)) found |= own;
    }
    return found;
  }

  // Returns a bitmask of the 64 contiguous keys that a query `far` positions after the first key may attend to.
  __device__ __forceinline__ uint64_t seen_side_by_side(int far) const {
    if (far < 0) return 0;
    const uint64_t apart = far < 63 ? allowed.bits_from(1, 0) << (63 - far) : allowed.bits_from(1, far - 63);
    const uint64_t before = far < 63 ? (uint64_t(2) << far) - 1 : ~uint64_t(0);
    return (chosen | __brevll(apart)) & before;
  }
};

constexpr int kNoQuery = INT32_MIN;

// Returns the position of a row's query, of whichever packed head; kNoQuery for padding.
__device__ __forceinline__ int query_position(const Select& s, const Work& work, int row) {
  int64_t at;
  if (!cell_position(s.query_views[work.query_view], work.x, work.y, work.z, row, at)) return kNoQuery;
  return s.q_offset + (at < s.q_len ? int(at) : int(at) % s.q_len);
}

// Writes a tile's bitmask in accumulator order (mask.cuh), with one warp.
__device__ void write_mask(const Select& s, const Job& job, uint32_t* target) {
  const int lane = threadIdx.x % 32;
  const NewItem item = new_item(s, job.item);
  const Entry entry = s.new_entries[job.entry];
  const Columns columns(item.allowed, s.key_views[item.work.key_view + entry.view], entry, lane);
#pragma unroll 4
  for (int part = 0; part < 4 * s.warpgroups; ++part) {
    const int at = part * 32 + lane;
    uint32_t word = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = query_position(s, item.work, part * 16 + 8 * h + lane / 4);
      if (position != kNoQuery) word |= columns.seen_by(position) << (2 * h);
    }
    target[at] = job.mask < 0 ? word : word & s.masks[int64_t(job.mask) * s.warpgroups * kWords + at];
  }
}

extern "C" __constant__ int launch_shape[3] = {kMaskThreads, 0, sizeof(Select)};

extern "C" __global__ void __launch_bounds__(kMaskThreads) hopper_select_masks(const __grid_constant__ Select s) {
  const int count = *s.masks_taken;
  for (int n = blockIdx.x * kMaskWarps + threadIdx.x / 32; n < count; n += gridDim.x * kMaskWarps) {
    write_mask(s, s.jobs[n], s.new_masks + int64_t(n) * s.warpgroups * kWords);
  }
}

}  // namespace spattn::sm90
