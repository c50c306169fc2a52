// One work item of the bfloat16 backward on AMX tiles: the five products of backward.h, block by block of keys.
//
// S' = K Q' and dP' = V dO' take K and V as they lie; P' and dS' come out as the left factors of dV += P' dO and
// dK += dS' Q, which are added to the unit's sums where they lie, and dS' also as the right factor of dQ' += K' dS'.
// While vector instructions weigh one block, S' and dP' of the next one and the sums of the last one are multiplied.
#pragma once
#include "amx/backward_operands.h"
#include "amx/tiles.h"
#include "backward/backward.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// An entry of the list and a block of it.
struct TileBlock {
  Tile place;
  KeyRows keys, values;
  int64_t entry, entry_side;
  int64_t blocks;      // of the entry
  int64_t index, side;
  int64_t begin, end;  // vectors of queries from the first to the last that attends to a key of the block

  int64_t rows() const { return blocks * kTileTerms; }
  bool straight() const { return place.even() && place.cells() == rows(); }  // keys evenly spaced, none of them padding
};

struct TileWalk {
  const Item& item;
  Head keys, values;
  int64_t vectors;  // of queries
  TileBackwardScratch& s;

  TileWalk(const Item& item, int64_t cells, TileBackwardScratch& s)
      : item(item), keys(item.keys()), values(item.values()),
        vectors((cells + kLanes<float> - 1) / kLanes<float>), s(s) {}

  // Before the first block.
  TileBlock start() const {
    TileBlock block = {};
    block.entry = item.work.begin - 1;
    return block;
  }

  // The next block with an allowed pair; false after the last one.
  bool advance(TileBlock& block) {
    const int64_t other = 1 - block.entry_side;
    do {
      if (++block.index >= block.blocks) {
        if (++block.entry == item.work.end) return false;
        open(block, other);
      }
      find_active(block);
    } while (block.begin == block.end);
    block.side = 1 - block.side;
    return true;
  }

 private:
  void open(TileBlock& block, int64_t side) {
    const Call& call = item.call;
    block.place = item.key_tile(block.entry);
    block.entry_side = side;
    block.blocks = (block.place.cells() + kTileTerms - 1) / kTileTerms;
    block.index = 0;
    block.keys = tile_rows(keys, block.place, block.rows(), call.head_dim, s.depth_key, s.rows.position.key,
                           s.key_rows + side * call.plan.block_kv * s.depth_key);
    block.values = tile_rows(values, block.place, block.rows(), call.head_dim_v, s.depth_value, s.rows.position.key,
                             s.value_rows + side * call.plan.block_kv * s.depth_value);
  }

  void find_active(TileBlock& block) {
    constexpr int L = kLanes<float>;
    const Mask allowed(item.call.plan, block.entry);
    const auto idle = [&](int64_t at) {
      return allowed && !allowed.any(at * L, L, block.index * kTileTerms, kTileTerms);
    };
    block.begin = 0, block.end = vectors;
    while (block.begin < block.end && idle(block.begin)) ++block.begin;
    while (block.begin < block.end && idle(block.end - 1)) --block.end;
    s.first_active[block.entry_side * s.blocks + block.index] = block.begin;
    s.last_active[block.entry_side * s.blocks + block.index] = block.end;
  }
};

class TileItem {
 public:
  TileItem(const Item& item, int64_t cells, const Sums& sums, TileBackwardScratch& s)
      : call_(item.call), walk_(item, cells, s), cells_(cells), vectors_(walk_.vectors), sums_(sums), s_(s),
        strips_(s.strips) {}

  void run() {
    clear(s_.dq_columns, s_.depth_key * s_.width.query);
    for (int64_t side = 0; vectors_ % 2 && side < 2; ++side) clear_weights(weight_block({}, side), vectors_, s_);
    TileBlock block = walk_.start(), next;
    bool more = walk_.advance(block);
    if (more) multiply_keys(block);
    strips_.finish();
    while (more) {
      more = walk_.advance(next = block);
      if (more) multiply_keys(next);
      weigh(block);
      strips_.finish();
      add_to_keys(block);
      if (!more || next.entry != block.entry) add_to_queries(block);
      block = next;
    }
    strips_.finish();
  }

 private:
  uint32_t* pairs(const TileBlock& block) const {
    return s_.gradient_pairs + block.entry_side * s_.blocks * kPairRows * s_.width.query;
  }

  WeightBlock weight_block(const TileBlock& block, int64_t side) const {
    const int64_t scores = side * kTileTerms * s_.width.query, weights = side * kTileTerms * s_.terms;
    return {s_.scores + scores, s_.score_gradients + scores, s_.weights + weights, s_.gradients + weights,
            pairs(block) + block.index * kPairRows * s_.width.query};
  }

  // S' = K Q' and dP' = V dO'.
  void multiply_keys(const TileBlock& block) {
    const int64_t ld = 4 * s_.width.query, key = block.index * kTileTerms, column = block.begin * kTileColumns;
    const auto multiply = [&](KeyRows rows, const uint32_t* columns, int64_t depth, float* to) {
      const TileFactor a = {rows.data + key * rows.ld, rows.ld, kTileRows * rows.ld, kTileBytes, 0};
      const TileFactor b = {columns + column, ld, kTileBytes, kPairRows * ld, 0};
      strips_.push(a, b, depth / kTileTerms, false, to + block.side * kTileTerms * s_.width.query + column, ld,
                   block.end - block.begin);
    };
    multiply(block.keys, s_.query_columns, s_.depth_key, s_.scores);
    multiply(block.values, s_.dout_columns, s_.depth_value, s_.score_gradients);
  }

  // P' and dS', and whatever products wait.
  void weigh(const TileBlock& block) {
    const WeightBlock matrices = weight_block(block, block.side);
    const Mask allowed = Mask(call_.plan, block.entry);
    const Logits<float> logits(call_.scale);
    const float scale = float(call_.scale);
    const int64_t key = block.index * kTileTerms, stretches = (block.end - block.begin) * (kTileRows / kStretch);
    if (allowed) {
      const uint64_t* words = allowed.bits + key / 64;
      for (int64_t r = 0; r < cells_; ++r) s_.allowed[r] = uint32_t(words[r * allowed.words] >> (key % 64));
      if (block.begin % 2) clear_weights(matrices, block.begin - 1, s_);
      if (block.end % 2 && block.end < vectors_) clear_weights(matrices, block.end, s_);
    }
    for (int64_t i = 0; i < stretches; ++i) {
      strips_.run(stretches - i);
      const int64_t row = i % (kTileRows / kStretch) * kStretch;
      const int64_t column = (block.begin + i / (kTileRows / kStretch)) * kLanes<float>;
      if (allowed) {
        weigh_rows<true>(matrices, row, column, logits, scale, s_);
      } else {
        weigh_rows<false>(matrices, row, column, logits, scale, s_);
      }
    }
  }

  // dV += P' dO and dK += dS' Q, over whole steps of queries.
  void add_to_keys(const TileBlock& block) {
    const WeightBlock matrices = weight_block(block, block.side);
    const int64_t key = block.index * kTileTerms, step = block.begin / 2, steps = (block.end + 1) / 2 - step;
    const auto add_product = [&](const uint16_t* left, const uint32_t* right, int64_t width, char* sums, int64_t ld) {
      const TileFactor a = {left + step * kTileTerms, 2 * s_.terms, kTileRows * 2 * s_.terms, kTileBytes, 0};
      const TileFactor b = {right + step * kPairRows * width, 4 * width, kTileBytes, kPairRows * 4 * width, 0};
      float* out = reinterpret_cast<float*>(sums);
      if (block.straight()) {
        out += (block.place.start + key * block.place.stride[2] - sums_.begin) * ld;
        strips_.push(a, b, steps, true, out, block.place.stride[2] * ld * 4, width / kTileColumns);
        return;
      }
      strips_.push(a, b, steps, false, s_.partial, 4 * width, width / kTileColumns);
      strips_.finish();
      const int64_t cells = list_positions(block.place, s_.rows.position.key) - key;
      for (int64_t i = 0; i < kTileTerms && i < cells; ++i) {
        const int64_t position = s_.rows.position.key[key + i];
        if (position != kPadding) add(out + (position - sums_.begin) * ld, s_.partial + i * width, width);
      }
    };
    add_product(matrices.weights, s_.dout_pairs, s_.width.value, sums_.dv, sums_.ld_dv);
    add_product(matrices.gradients, s_.query_pairs, s_.width.key, sums_.dk, sums_.ld_dk);
  }

  // dQ' += K' dS' of an entry, over the blocks that each pair of vectors of queries attends to.
  void add_to_queries(const TileBlock& block) {
    const int64_t ld = call_.plan.block_kv;
    const int64_t *first = s_.first_active + block.entry_side * s_.blocks,
                  *last = s_.last_active + block.entry_side * s_.blocks;
    for (int64_t i = 0; i < block.blocks; ++i) {
      pack_key_columns(block.keys, i * kTileTerms, ld, s_);
      strips_.run(2 * block.blocks - i);  // half of what waits in all: the other half is for weigh()
      for (int64_t vector = 0; vector < vectors_; ++vector) {
        const bool idle = vector < first[i] || vector >= last[i];
        if (idle) clear_pairs(pairs(block) + i * kPairRows * s_.width.query, vector, s_);
      }
    }
    for (int64_t at = 0; at < vectors_; at += 2) {
      const int64_t columns = vectors_ - at < 2 ? 1 : 2;
      const auto idle = [&](int64_t i) { return first[i] >= at + columns || last[i] <= at; };
      int64_t begin = 0, end = block.blocks;
      while (begin < end && idle(begin)) ++begin;
      while (begin < end && idle(end - 1)) --end;
      const uint32_t* right = pairs(block) + begin * kPairRows * s_.width.query + at * kTileColumns;
      const TileFactor b = {right, 4 * s_.width.query, kTileBytes, kPairRows * 4 * s_.width.query, 0};
      for (int64_t d = 0; begin < end && d < s_.depth_key; d += 2 * kTileRows) {
        const TileFactor a = {s_.key_columns + d * ld + begin * kTileTerms, 2 * ld, kTileRows * 2 * ld, kTileBytes, 0};
        float* sum = s_.dq_columns + d * s_.width.query + at * kTileColumns;
        strips_.push(a, b, end - begin, true, sum, 4 * s_.width.query, columns);
      }
    }
  }

  const Call& call_;
  TileWalk walk_;
  int64_t cells_, vectors_;
  const Sums& sums_;
  TileBackwardScratch& s_;
  Strips strips_;
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
  transpose_rows(s.dq_columns, s.width.query, s.rows.ld, s.width.query, 1.0f, s.rows.dq, s.rows.ld);
  write_query_gradients<Bfloat16>(item, place.cells(), sums, s.rows);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
