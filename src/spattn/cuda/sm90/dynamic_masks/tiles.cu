// Formula    new tile lists, with the plan's tiles that hold a pair allowed by a dynamic mask, and the jobs of
//            masks.cu: bitmasks of the tiles that also hold a masked pair.
// Grid       one CTA per new work item (a work item of the plan and a mask of its heads).
// Target     sm_90a (no special instructions; shares the structs of attention.cu).
// Order      new lists keep the plan's order. The index of a bitmask varies between runs, its bits do not.
// Test       tests/cuda/sm90/test_dynamic_masks.py      Benchmark  benchmarks/planning/replanning_cuda.py
// Source     Plan contract: planning/contract/types.py.

#include "sm90/dynamic_masks/allowed.cuh"
#include "sm90/forward/mask.cuh"

namespace spattn::sm90 {

constexpr int kSelectThreads = 128;
constexpr int kSelectWarps = kSelectThreads / 32;

// Number of threads of the CTA that satisfy a predicate: those before this one, and all.
struct Rank {
  int before, all;
};

__device__ __forceinline__ Rank rank_of(bool yes, int (&counts)[kSelectWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t own = __ballot_sync(kAll, yes);
  if (lane == 0) counts[warp] = __popc(own);
  __syncthreads();
  Rank found = {__popc(own & ((1u << lane) - 1)), 0};
#pragma unroll
  for (int w = 0; w < kSelectWarps; ++w) {
    found.before += w < warp ? counts[w] : 0;
    found.all += counts[w];
  }
  return found;
}

extern "C" __constant__ int launch_shape[3] = {kSelectThreads, 0, sizeof(Select)};

extern "C" __global__ void __launch_bounds__(kSelectThreads) hopper_select_tiles(const __grid_constant__ Select s) {
  __shared__ int keepers[kSelectWarps], makers[kSelectWarps], first_mask;
  const NewItem item = new_item(s, blockIdx.x);
  const Work& work = item.work;
  const Reach rows = reach_of(s.query_views[work.query_view], work.x, work.y, work.z);
  Reach queries = {s.q_offset, s.q_offset + s.q_len - 1};  // all of them if a tile holds queries of several heads
  if (rows.last < s.q_len) queries = {s.q_offset + rows.first, s.q_offset + rows.last};
  const int64_t start = s.starts[blockIdx.x], room = s.starts[blockIdx.x + 1] - start;
  int kept = 0;
  for (int first = work.begin; first < work.end; first += kSelectThreads) {
    const int e = first + threadIdx.x;
    TileKind found = TileKind::kEmpty;
    Entry entry = {};
    int mask = kFullTile;
    if (e < work.end) {
      entry = s.entries[e];
      mask = s.entry_masks[e];
      const View& keys = s.key_views[work.key_view + entry.view];
      found = item.allowed.kind_of(queries, reach_of(keys, entry.x, entry.y, entry.z));
    }
    const bool keeps = found != TileKind::kEmpty;
    const bool masked = keeps && (found == TileKind::kPartial || mask != kFullTile);
    const Rank keeper = rank_of(keeps, keepers), maker = rank_of(masked, makers);
    if (threadIdx.x == 0 && maker.all > 0) first_mask = atomicAdd(s.masks_taken, maker.all);
    __syncthreads();
    const int own = first_mask + maker.before;
    // __init__.py computes both upper bounds; exceeding one would overwrite another item's list or bitmask.
    if (kept + keeper.all > room || (masked && own >= s.mask_room)) __trap();
    const int64_t at = start + kept + keeper.before;
    if (keeps) {
      s.new_entries[at] = entry;
      s.new_entry_masks[at] = masked ? own : kFullTile;
    }
    if (masked) s.jobs[own] = {int(blockIdx.x), int(at), mask};
    kept += keeper.all;
    __syncthreads();  // before the next iteration overwrites the counts
  }
  if (threadIdx.x > 0) return;
  if (kept == 0) {  // a work item needs at least one tile: this one allows no pair
    s.new_entries[start] = s.entries[work.begin];
    s.new_entry_masks[start] = kNoTile;
    kept = 1;
  }
  Work made = work;
  made.begin = start, made.end = start + kept;
  s.new_work[blockIdx.x] = made;
}

}  // namespace spattn::sm90
