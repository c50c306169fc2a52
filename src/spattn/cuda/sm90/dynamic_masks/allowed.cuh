// Dynamic masks: classify tiles and look up pairs.
#pragma once

#include "sm90/dynamic_masks/params.cuh"

namespace spattn::sm90 {

constexpr uint32_t kAll = 0xffffffff;

// Range of positions.
struct Reach {
  int first, last;  // positions fit 31 bits
};

// Returns the smallest and largest position in a tile.
__device__ __forceinline__ Reach reach_of(const View& view, int x, int y, int z) {
  const int at[3] = {z, y, x};
  int64_t first = view.offset, last = view.offset;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t low = at[axis] * view.stride[axis];
    const int64_t high = (min(at[axis] + view.box[axis], view.extent[axis]) - 1) * view.stride[axis];
    first += min(low, high), last += max(low, high);
  }
  return {int(first), int(last)};
}

enum class TileKind { kEmpty, kPartial, kFull };

// A dynamic mask's lookup table.
struct Allowed {
  const Select& s;
  const uint32_t* table;

  __device__ __forceinline__ bool bit(int row, int column) const {
    return table[int64_t(row) * s.words + column / 32] >> (column % 32) & 1;
  }

  // Returns 64 bits of a row from bit `first` on; zeros past the last word.
  __device__ __forceinline__ uint64_t bits_from(int row, int first) const {
    uint32_t found[3];
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const int word = first / 32 + n;
      found[n] = word < s.words ? table[int64_t(row) * s.words + word] : 0;
    }
    const uint32_t low = __funnelshift_r(found[0], found[1], first % 32);
    const uint32_t high = __funnelshift_r(found[1], found[2], first % 32);
    return uint64_t(high) << 32 | low;
  }

  __device__ __forceinline__ int document(int position) const { return table[position]; }

  __device__ __forceinline__ static bool is_document(int number) { return number >= 0 && number != kNowhere; }

  // Tests the bits [first, last] of a row: sets `any` if one of them is set, clears `every` if one of them is not.
  __device__ void test_bits(int row, int first, int last, bool& any, bool& every) const {
    for (int word = first / 32; word <= last / 32; ++word) {
      const int low = max(first - word * 32, 0), high = min(last - word * 32, 31);
      const uint32_t own = kAll >> (31 - high + low) << low, found = table[int64_t(row) * s.words + word] & own;
      any |= found != 0;
      every &= found == own;
    }
  }

  __device__ TileKind kind_of(const Reach& given, const Reach& k) const {
    bool any = false, every = true;
    if (s.form == kLengths) {
      const int first = table[0], stop = table[1];
      any = k.first < stop && k.last >= first;
      every = k.first >= first && k.last < stop;
      return !any ? TileKind::kEmpty : every ? TileKind::kFull : TileKind::kPartial;
    }
    if (given.last < 0) return TileKind::kEmpty;
    const Reach q = {max(given.first, 0), given.last};  // queries before the first key attend to nothing
    if (s.form == kBlocks) {
      const int first = key_code(k.first), last = key_code(k.last);
      for (int row = query_code(q.first); row <= query_code(q.last); ++row) test_bits(row, first, last, any, every);
    } else if (s.form == kDocuments) {
      const int low = document(q.first), high = document(q.last), first = document(k.first), last = document(k.last);
      any = max(max(first, low), 0) <= min(min(last, high), kNowhere - 1);
      every = low == high && first == low && last == low;
    } else {
      if (k.first > q.last) return TileKind::kEmpty;
      bool any_apart = false, every_apart = true;
      test_bits(0, k.first, k.last, any, every);
      test_bits(1, max(q.first - k.last, 0), q.last - k.first, any_apart, every_apart);
      any |= any_apart;
      every = (every || every_apart) && k.last <= q.first;
    }
    return !any ? TileKind::kEmpty : every && given.first >= 0 ? TileKind::kFull : TileKind::kPartial;
  }

  // Returns the code of a query or key position, by which pair() looks up a pair: its block, document or position. A
  // negative code matches nothing.
  __device__ __forceinline__ int query_code(int position) const {
    if (s.form == kBlocks) return position / s.block_q;
    return s.form == kDocuments ? document(position) : position;
  }

  __device__ __forceinline__ int key_code(int position) const {
    if (s.form == kBlocks) return position / s.block_kv;
    return s.form == kDocuments ? document(position) : position;
  }

  // some_queries: true if any query may attend to the key with code `k`. later_queries: true if all queries from that
  // key's position on may.
  __device__ __forceinline__ bool some_queries(int k) const {
    return k >= 0 && (s.form != kLengths || (k >= int(table[0]) && k < int(table[1])));
  }

  __device__ __forceinline__ bool later_queries(int k) const { return s.form == kLines && bit(0, k); }

  // True if the pair of these codes is allowed. Requires some_queries(k); `later` is later_queries(k).
  __device__ __forceinline__ bool pair(int q, int k, bool later) const {
    if (s.form == kBlocks) return bit(q, k);
    if (s.form == kLengths) return true;
    if (s.form == kDocuments) return q == k && is_document(q);
    return k <= q && (later || bit(1, q - k));
  }
};

// The plan's work item that a new work item is a selection of, and the lookup table of its mask.
struct NewItem {
  const Work work;
  const Allowed allowed;
};

__device__ __forceinline__ NewItem new_item(const Select& s, int number) {
  return {s.work[s.items[number]], {s, s.table + s.selections[number] * s.table_stride}};
}

}  // namespace spattn::sm90
