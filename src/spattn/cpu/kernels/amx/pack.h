// Operands as AMX wants them: Q' and P' as the right factor, pairs of terms in a lane; K and V' as the left one, whole
// terms in a row. Rows that are missing, and terms beyond the last, are zero.
#pragma once
#include "amx/parts.h"
#include "amx/scratch.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Stores a block of 16 vectors of 32-bit elements, transposed, as a tile with rows `ld` bytes apart.
SPATTN_INLINE void store_transposed(Vec<float> (&block)[kTileRows], char* out, int64_t ld) {
  transpose<float>(block);
  SPATTN_UNROLL
  for (int i = 0; i < kTileRows; ++i) store(out + i * ld, block[i]);
}

// Q' of a column of queries, from its staged rows.
template <class Path> void pack_column(char* out, typename Path::Check& check, float sign, const AmxScratch<Path>& s) {
  constexpr int kParts = Path::kParts;
  for (int64_t t = 0; t < s.key_steps; ++t) {
    Vec<float> block[kParts][kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      typename Path::Bits parts[kParts];
      Path::terms(s.staged + i * s.staged_keys() + t * kTileTerms, sign, parts, check);
      for (int p = 0; p < kParts; ++p) block[p][i] = (Vec<float>)parts[p];
    }
    for (int p = 0; p < kParts; ++p) store_transposed(block[p], out + (p * s.key_steps + t) * kPanelSize, kPanelBytes);
  }
}

// Q' of the cells [0, cells). Queries that the check does not pass are left to the exact path.
template <class Path>
void pack_queries(const Head& head, int64_t cells, float sign, const Call& call, AmxScratch<Path>& s) {
  const int64_t ld = s.staged_keys();
  for (int64_t first = 0; first < cells; first += kTileColumns) {
    gather_queries<typename Path::Raw>(head, first, kTileColumns, cells, call.head_dim, ld, s.query_position, s.staged);
    typename Path::Check check;
    pack_column<Path>(s.query_column(first), check, sign, s);
    for (int64_t i = 0; i < kTileColumns && !check.passed(); ++i) {
      typename Path::Check one;
      one.look_at(s.staged + i * ld, ld);
      s.exact[first + i] |= !one.passed();
    }
  }
}

// K of a tile into a slot, from `rows` rows of whole steps. True: they pass the check.
template <class Path>
bool pack_keys(Operand<typename Path::Row> from, int64_t rows, char* out, const AmxScratch<Path>& s) {
  typename Path::Check check;
  for (int64_t row = 0; row < rows; ++row) {
    char* line = out + row / kTileRows * s.key_steps * kTileSize + row % kTileRows * kTileBytes;
    for (int64_t t = 0; t < s.key_steps; ++t) {
      typename Path::Bits parts[Path::kParts];
      Path::terms(from.data + row * from.ld + t * kTileTerms, 1.0f, parts, check);
      for (int p = 0; p < Path::kParts; ++p) store(line + p * s.key_part + t * kTileSize, parts[p]);
    }
  }
  return check.passed();
}

// V' of a tile into a slot, from `rows` rows of whole tiles.
template <class Path>
void pack_values(Operand<typename Path::Row> from, int64_t rows, char* out, const AmxScratch<Path>& s) {
  constexpr int kParts = Path::kParts;
  for (int64_t t = 0; t < rows / kTileTerms; ++t) {
    for (int64_t d = 0; d < s.value_tiles; ++d) {
      Vec<float> block[kParts][kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        const auto* row = from.data + (t * kTileTerms + 2 * i) * from.ld + d * kTileRows;
        typename Path::Bits parts[kParts];
        Path::pairs(row, row + from.ld, parts);
        for (int p = 0; p < kParts; ++p) block[p][i] = (Vec<float>)parts[p];
      }
      char* tile = out + (d * s.tile_steps + t) * kTileSize;
      for (int p = 0; p < kParts; ++p) store_transposed(block[p], tile + p * s.value_part, kTileBytes);
    }
  }
}

// Rows of a tile, `width` whole elements each: in place or staged.
template <class Path>
Operand<typename Path::Row> tile_rows(const Head& head, const Tile& tile, int64_t rows, int64_t width, int64_t ld,
                                      AmxScratch<Path>& s) {
  using Raw = typename Path::Raw;
  if (rows == tile.cells() && width == ld && readable_in_place<Raw>(head, tile)) return in_place<Raw>(head, tile);
  gather_rows<Raw>(head, tile, rows, width, ld, s.key_position, s.staged);
  return {s.staged, ld};
}

// Packs a tile into a slot; true: its keys pass the check.
template <class Path>
bool pack_tile(const Call& call, const Tile& tile, int64_t rows, const Head& keys, const Head& values, int slot,
               AmxScratch<Path>& s) {
  const auto k = tile_rows<Path>(keys, tile, rows, call.head_dim, s.staged_keys(), s);
  const bool fit = pack_keys<Path>(k, rows, s.keys_of(slot), s);
  const auto v = tile_rows<Path>(values, tile, rows, call.head_dim_v, s.staged_values(), s);
  pack_values<Path>(v, rows, s.values_of(slot), s);
  return fit;
}

// A key tile out of the cache, packed where it is not there. The s.slots tiles found last are valid.
template <class Path>
PackedTile find_tile(const Call& call, int64_t pair, int64_t view, int64_t number, const Tile& tile, const Head& keys,
                     const Head& values, AmxScratch<Path>& s) {
  const int64_t rows = round_up(tile.cells(), kTileTerms);
  bool hit;
  const int slot = s.cache.find(pair, view, number, s.slots, hit);
  if (!hit) {
    constexpr int64_t kBytes = sizeof(typename Path::E::Storage);
    prefetch_rows(keys, tile, call.head_dim * kBytes);
    prefetch_rows(values, tile, call.head_dim_v * kBytes);
    s.cache.unfit[slot] = !pack_tile<Path>(call, tile, rows, keys, values, slot, s);
  }
  return {{s.keys_of(slot), kTileBytes, s.key_steps * kTileSize, kTileSize, s.key_part},
          {s.values_of(slot), kTileBytes, s.tile_steps * kTileSize, kTileSize, s.value_part},
          rows,
          s.cache.unfit[slot]};
}

}  // namespace SPATTN_ISA
}  // namespace spattn
