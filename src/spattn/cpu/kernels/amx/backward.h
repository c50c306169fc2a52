// AMX backward of a bfloat16 work item: the five products of backward/backward.h, for blocks of keys.
//
// S' = K Q' and dP' = V dO' read K and V in place. The softmax writes P' and dS' as left operands of dV += P' dO and
// dK += dS' Q, which accumulate directly in the unit's sums. It also writes dS' as the right operand of dQ' += K' dS'.
// There is no software pipelining, because tile and vector instructions do not overlap: interleaving the softmax of a
// block with the products of its neighbours made the backward 2 to 3 % slower.
#pragma once
#include "amx/backward_operands.h"
#include "amx/tiles.h"
#include "backward/backward.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

struct BackwardEntry {
  Tile place;
  Mask mask;
  int64_t blocks;
  Operand<uint16_t> keys, values;

  int64_t rows() const { return blocks * kTileTerms; }
  bool straight() const { return place.even() && place.cells() == rows(); }  // true if evenly spaced, without padding
};

// A block of keys, and the range [begin, end) of query vectors that attend to any of them.
struct KeyBlock {
  int64_t index, begin, end;
};

class TileItem {
 public:
  TileItem(const Item& item, int64_t cells, const Sums& sums, TileBackwardScratch& s)
      : item_(item), keys_(item.keys()), values_(item.values()), cells_(cells),
        vectors_((cells + kLanes<float> - 1) / kLanes<float>), sums_(sums), s_(s) {}

  void run() {
    clear(s_.dq_columns, s_.depth_key * s_.width.query);
    if (vectors_ % 2) clear_weights(vectors_, s_);
    for (Listed at = item_.first(); at.number < item_.work.end; at = item_.after(at)) {
      const BackwardEntry entry = open(at);
      bool any = false;
      for (int64_t index = 0; index < entry.blocks; ++index) {
        const KeyBlock block = find_active(entry, index);
        if (block.begin == block.end) continue;
        any = true;
        multiply_keys(entry, block);
        weigh(entry, block);
        add_to_keys(entry, block);
      }
      if (any) add_to_queries(entry);
    }
  }

 private:
  BackwardEntry open(const Listed& at) {
    const Call& call = item_.call;
    BackwardEntry entry = {item_.key_tile(at), item_.mask(at), 0, {}, {}};
    entry.blocks = (entry.place.cells() + kTileTerms - 1) / kTileTerms;
    int64_t* const position = s_.rows.position.key;
    if (s_.score || s_.dropout) list_padded(entry.place, entry.rows(), position);
    const auto rows = [&](const Head& head, int64_t width, int64_t depth, uint16_t* buffer) {
      return tile_rows<RawBfloat16>(head, entry.place, entry.rows(), width, depth, false, position, buffer);
    };
    entry.keys = rows(keys_, call.head_dim, s_.depth_key, s_.key_rows);
    entry.values = rows(values_, call.head_dim_v, s_.depth_value, s_.value_rows);
    return entry;
  }

  KeyBlock find_active(const BackwardEntry& entry, int64_t index) {
    constexpr int L = kLanes<float>;
    const int64_t key = index * kTileTerms;
    const auto idle = [&](int64_t at) {
      return entry.mask && !uint32_t(entry.mask.merged(at * L, L, key / 64) >> key % 64);
    };
    KeyBlock block = {index, 0, vectors_};
    while (block.begin < block.end && idle(block.begin)) ++block.begin;
    while (block.begin < block.end && idle(block.end - 1)) --block.end;
    s_.first_active[index] = block.begin;
    s_.last_active[index] = block.end;
    return block;
  }

  // Computes S' = K Q' and dP' = V dO' of a block.
  void multiply_keys(const BackwardEntry& entry, const KeyBlock& block) {
    const int64_t ld = 4 * s_.width.query, key = block.index * kTileTerms, column = block.begin * kTileColumns;
    const auto multiply = [&](Operand<uint16_t> rows, const uint32_t* columns, int64_t depth, float* to) {
      const TileFactor a = {rows.data + key * rows.ld, 2 * rows.ld, kTileRows * 2 * rows.ld, kTileBytes, 0};
      const TileFactor b = {columns + column, ld, kTileBytes, kPairRows * ld, 0};
      strip_product(a, b, depth / kTileTerms, false, to + column, ld, block.end - block.begin);
    };
    multiply(entry.keys, s_.query_columns, s_.depth_key, s_.scores);
    multiply(entry.values, s_.dout_columns, s_.depth_value, s_.score_gradients);
  }

  template <bool kDrops> auto weigh_of(bool masked) const {
    return s_.score ? masked ? weigh_rows<true, true, kDrops> : weigh_rows<false, true, kDrops>
           : masked ? weigh_rows<true, false, kDrops>
                    : weigh_rows<false, false, kDrops>;
  }

  // Computes P', after dropout, and dS' of a block.
  void weigh(const BackwardEntry& entry, const KeyBlock& block) {
    const Mask& allowed = entry.mask;
    const Logits<float> logits(item_.call);
    const float scale = float(item_.call.scale);
    uint32_t* const pairs = s_.pairs_of(block.index);
    const int64_t key = block.index * kTileTerms, first = block.begin * kLanes<float>, end = block.end * kLanes<float>;
    if (s_.score) {
      s_.score.apply<false>(s_.rows.position.key + key, kTileTerms, s_.rows.position.query + first, end - first,
                            s_.scores + first, s_.width.query);
    }
    if (allowed) {
      const uint64_t* words = allowed.bits + key / 64;
      for (int64_t r = 0; r < cells_; ++r) s_.allowed[r] = uint32_t(words[r * allowed.words] >> (key % 64));
      if (block.begin % 2) clear_weights(block.begin - 1, s_);
      if (block.end % 2 && block.end < vectors_) clear_weights(block.end, s_);
    }
    if (s_.dropout) s_.dropout.list_keys(item_.batch, item_.head, s_.rows.position.key + key, kTileTerms);
    const auto weigh = s_.dropout ? weigh_of<true>(bool(allowed)) : weigh_of<false>(bool(allowed));
    for (int64_t column = first; column < end; column += kLanes<float>) {
      for (int64_t row = 0; row < kTileRows; row += kStretch) weigh(row, column, logits, scale, pairs, first, s_);
    }
    if (s_.score) s_.score.add_table_gradients(s_.score_gradients + first, s_.width.query);
  }

  // Computes dV += P' dO and dK += dS' Q, where the range of queries is rounded to multiples of kTileTerms.
  void add_to_keys(const BackwardEntry& entry, const KeyBlock& block) {
    const Tile& place = entry.place;
    const int64_t key = block.index * kTileTerms, step = block.begin / 2, steps = (block.end + 1) / 2 - step;
    const auto add_product = [&](const uint16_t* left, const uint32_t* right, int64_t width, char* sums, int64_t ld) {
      const TileFactor a = {left + step * kTileTerms, 2 * s_.terms, kTileRows * 2 * s_.terms, kTileBytes, 0};
      const TileFactor b = {right + step * kPairRows * width, 4 * width, kTileBytes, kPairRows * 4 * width, 0};
      float* out = reinterpret_cast<float*>(sums);
      if (entry.straight()) {
        out += (place.start + key * place.stride[2] - sums_.begin) * ld;
        strip_product(a, b, steps, true, out, place.stride[2] * ld * 4, width / kTileColumns);
        return;
      }
      strip_product(a, b, steps, false, s_.partial, 4 * width, width / kTileColumns);
      const int64_t* position = s_.rows.position.key;
      const int64_t cells = list_positions(place, s_.rows.position.key) - key;
      for (int64_t i = 0; i < kTileTerms && i < cells; ++i) {
        if (position[key + i] == kPadding) continue;
        add(out + (position[key + i] - sums_.begin) * ld, s_.partial + i * width, width);
      }
    };
    add_product(s_.weights, s_.dout_pairs, s_.width.value, sums_.dv, sums_.ld_dv);
    add_product(s_.gradients, s_.query_pairs, s_.width.key, sums_.dk, sums_.ld_dk);
  }

  // Computes dQ' += K' dS' for each pair of query vectors and the blocks of the key tile to which they attend.
  void add_to_queries(const BackwardEntry& entry) {
    const int64_t ld = item_.call.plan.block_kv, ld_query = s_.width.query;
    const int64_t *first = s_.first_active, *last = s_.last_active;
    for (int64_t i = 0; i < entry.blocks; ++i) {
      pack_key_columns(entry.keys, i * kTileTerms, ld, s_);
      for (int64_t vector = 0; vector < vectors_; ++vector) {
        const bool idle = vector < first[i] || vector >= last[i];
        if (idle) clear_pairs(s_.pairs_of(i), vector, s_);
      }
    }
    for (int64_t at = 0; at < vectors_; at += 2) {
      const int64_t columns = vectors_ - at < 2 ? 1 : 2;
      const auto idle = [&](int64_t i) { return first[i] >= at + columns || last[i] <= at; };
      int64_t begin = 0, end = entry.blocks;
      while (begin < end && idle(begin)) ++begin;
      while (begin < end && idle(end - 1)) --end;
      const TileFactor b = {s_.pairs_of(begin) + at * kTileColumns, 4 * ld_query, kTileBytes, kPairRows * 4 * ld_query,
                            0};
      for (int64_t d = 0; begin < end && d < s_.depth_key; d += 2 * kTileRows) {
        const TileFactor a = {s_.key_columns + d * ld + begin * kTileTerms, 2 * ld, kTileRows * 2 * ld, kTileBytes, 0};
        float* sum = s_.dq_columns + d * ld_query + at * kTileColumns;
        strip_product(a, b, end - begin, true, sum, 4 * ld_query, columns);
      }
    }
  }

  const Item& item_;
  Head keys_, values_;
  int64_t cells_, vectors_;
  const Sums& sums_;
  TileBackwardScratch& s_;
};

inline void tile_backward(const Call& call, int64_t batch, int64_t head, const Work& work, const Sums& sums,
                          char* scratch) noexcept {
  Arena arena(scratch);
  TileBackwardScratch s(call, arena);
  [[maybe_unused]] const TileSession session;
  const Item item = {call, batch, head, work};
  const Tile place = item.query_tile();
  pack_queries(item, place, s);
  TileItem(item, place.cells(), sums, s).run();
  transpose_rows<Plain<Float32>>(s.dq_columns, s.width.query, s.rows.ld, s.width.query, 1.0f, s.rows.dq, s.rows.ld);
  write_query_gradients<Bfloat16>(item, place.cells(), sums, s.rows);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
