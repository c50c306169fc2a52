// The operands of the bfloat16 backward on AMX tiles: queries, packed once an item, and keys, once a tile.
#pragma once
#include "amx/tiles.h"
#include "amx/backward_scratch.h"
#include "backward/queries.h"
#include "tile/operand.h"
#include "forward/paired.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int64_t kPairRows = kTileTerms / 2;  // rows of B in a step

// to = (sign * from)', pairs of features by rows.
inline void pack_columns(const uint16_t* from, int64_t depth, int64_t rows, float sign, uint32_t* to, int64_t ld) {
  constexpr int L = kLanes<float>;
  for (int64_t first = 0; first < rows; first += L) {
    for (int64_t d = 0; d < depth / 2; d += L) {
      Vec<float> block[L];
      SPATTN_UNROLL
      for (int i = 0; i < L; ++i) {
        const BitsVec<float> pairs = load<BitsVec<float>>(from + (first + i) * depth + 2 * d);
        block[i] = (Vec<float>)(sign == 1 ? pairs : Paired::times(pairs, sign));
      }
      transpose<float>(block);
      SPATTN_UNROLL
      for (int i = 0; i < L; ++i) store(to + (d + i) * ld + first, block[i]);
    }
  }
}

// Row p of `to` holds, for every feature, the rows 2 p and 2 p + 1; rows that `from` does not have are zeros.
inline void pack_pairs(const uint16_t* from, int64_t depth, int64_t rows, uint32_t* to, int64_t ld, int64_t terms) {
  for (int64_t row = 0; row < rows; row += 2, from += 2 * depth, to += ld) {
    for (int64_t j = 0; j < ld; j += kLanes<float>) {
      const char *even = reinterpret_cast<const char*>(from + j), *odd = even + 2 * depth;
      store(to + j, Paired::widen(even) | Paired::widen(odd) << 16);
    }
  }
  clear(to, (terms - rows) / 2 * ld);
}

// Packs the rows of an item. delta, the diagonal of O dO', comes from the same instructions as dP' = V dO': a row that
// attends to one key alone has O = V and dS = 0 exactly.
inline void pack_queries(const Call& call, int64_t batch, int64_t head, const Work& item, const Tile& tile,
                         TileBackwardScratch& s) {
  const QueryRows<uint16_t> rows = {reinterpret_cast<uint16_t*>(s.query_rows), reinterpret_cast<uint16_t*>(s.dout_rows),
                                    reinterpret_cast<uint16_t*>(s.out_rows), s.depth_key, s.depth_value};
  gather_item<RawBfloat16>(call, batch, head, item, tile, rows, s);
  pack_columns(rows.query, s.depth_key, s.ld_query, Scale<float>(call.scale).sign, s.query_columns, s.ld_query);
  pack_columns(rows.dout, s.depth_value, s.ld_query, 1, s.dout_columns, s.ld_query);
  pack_pairs(rows.query, s.depth_key, s.ld_query, s.query_pairs, s.ld_key, s.terms);
  pack_pairs(rows.dout, s.depth_value, s.ld_query, s.dout_pairs, s.ld_value, s.terms);
  for (int64_t first = 0; first < s.ld_query; first += kTileRows) {
    const TileFactor out = {rows.out + first * s.depth_value, 2 * s.depth_value, 0, kTileBytes, 0};
    const TileFactor dout = {s.dout_columns + first, 4 * s.ld_query, 0, kPairRows * 4 * s.ld_query, 0};
    tile_product<1, 1>(out, dout, s.depth_value / kTileTerms, false, s.partial, kTileBytes);
    for (int i = 0; i < kTileRows; ++i) s.delta[first + i] = s.partial[i * kTileColumns + i];
  }
}

// Rows of `depth` bfloat16 features; the distance from row to row is in bytes.
struct KeyRows {
  const char* data;
  int64_t ld;
};

// K or V of a key tile, `rows` of them: in place, or copied and padded.
inline KeyRows tile_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t depth,
                         int64_t* position, uint16_t* buffer) {
  if (rows == tile.cells() && tile.even() && width == depth && head.feature == 2) {
    return {head.data + tile.start * head.position, tile.stride[2] * head.position};
  }
  gather_rows<RawBfloat16>(head, tile, rows, width, depth, position, buffer);
  return {reinterpret_cast<const char*>(buffer), 2 * depth};
}

// s.key_columns = K', for the block of keys that starts at `key`. Both halves of a pair of keys go through the 16 by 16
// transpose as one number.
inline void pack_key_columns(KeyRows keys, int64_t key, int64_t ld, TileBackwardScratch& s) {
  constexpr int L = kLanes<float>;
  using Vector = BitsVec<float>;
  const auto pairs = [&](int64_t row, int64_t d) { return load<Vector>(keys.data + (key + row) * keys.ld + 2 * d); };
  for (int64_t d = 0; d < s.depth_key; d += kTileTerms) {
    uint16_t* out = s.key_columns + d * ld + key;
    Vec<float> even[L], odd[L];
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) even[i] = (Vec<float>)((pairs(i, d) & 0xffff) | pairs(L + i, d) << 16);
    transpose<float>(even);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) store(out + 2 * i * ld, even[i]);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) odd[i] = (Vec<float>)(pairs(i, d) >> 16 | (pairs(L + i, d) & 0xffff0000));
    transpose<float>(odd);
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) store(out + (2 * i + 1) * ld, odd[i]);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
