// Operands as AMX wants them: Q' and P' as the right factor, pairs of terms in a lane; K and V' as the left one, whole
// terms in a row. Rows that are missing, and terms beyond the last, are zero.
#pragma once
#include "amx_parts.h"
#include "amx_scratch.h"
#include "pack.h"
#include "tile.h"

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

// Q' of the cells [0, cells). Queries that are not finite are left to the exact path, and packed as zeros.
template <class Path>
void pack_queries(const Head& head, int64_t cells, float sign, const Call& call, AmxScratch<Path>& s) {
  const int64_t ld = s.staged_keys();
  for (int64_t first = 0; first < cells; first += kTileColumns) {
    gather_queries<typename Path::Raw>(head, first, kTileColumns, cells, call.head_dim, ld, s.query_position, s.staged);
    char* out = s.query_column(first);
    typename Path::Check check;
    pack_column<Path>(out, check, sign, s);
    if (check.passed()) continue;
    for (int64_t i = 0; i < kTileColumns; ++i) {
      typename Path::Check one;
      one.look_at(s.staged + i * ld, ld);
      if (one.passed()) continue;
      s.exact[first + i] = true;
      clear(s.staged + i * ld, ld);
    }
    pack_column<Path>(out, check, sign, s);
  }
}

// K of a tile into a slot, from `rows` rows of whole steps.
template <class Path>
void pack_keys(Operand<typename Path::Row> from, int64_t rows, char* out, typename Path::Check& check,
               const AmxScratch<Path>& s) {
  for (int64_t row = 0; row < rows; ++row) {
    char* line = out + row / kTileRows * s.key_steps * kTileSize + row % kTileRows * kTileBytes;
    for (int64_t t = 0; t < s.key_steps; ++t) {
      typename Path::Bits parts[Path::kParts];
      Path::terms(from.data + row * from.ld + t * kTileTerms, 1.0f, parts, check);
      for (int p = 0; p < Path::kParts; ++p) store(line + p * s.key_part + t * kTileSize, parts[p]);
    }
  }
}

// V' of a tile into a slot, from `rows` rows of whole tiles.
template <class Path>
void pack_values(Operand<typename Path::Row> from, int64_t rows, char* out, typename Path::Check& check,
                 const AmxScratch<Path>& s) {
  constexpr int kParts = Path::kParts;
  for (int64_t t = 0; t < rows / kTileTerms; ++t) {
    for (int64_t d = 0; d < s.value_tiles; ++d) {
      Vec<float> block[kParts][kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        const auto* row = from.data + (t * kTileTerms + 2 * i) * from.ld + d * kTileRows;
        typename Path::Bits parts[kParts];
        Path::pairs(row, row + from.ld, parts, check);
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

// Packs rows with `pack`. Keys that are not finite are set in `unfit`, and packed as zeros: whoever may not
// attend to them does not notice.
template <class Path, class Pack>
bool pack_fit(Operand<typename Path::Row> from, int64_t rows, int64_t ld, uint64_t* unfit, AmxScratch<Path>& s,
              Pack pack) {
  typename Path::Check check;
  pack(from, check);
  if (check.passed()) return true;
  for (int64_t row = 0; row < rows; ++row) {
    typename Path::Check one;
    const auto* values = from.data + row * from.ld;
    one.look_at(values, ld);
    memmove(s.staged + row * ld, values, size_t(ld) * sizeof *values);
    if (one.passed()) continue;
    clear(s.staged + row * ld, ld);
    unfit[row / 64] |= uint64_t(1) << row % 64;
  }
  pack({s.staged, ld}, check);
  return false;
}

// Packs a tile into a slot; true: all of its keys are fit.
template <class Path>
bool pack_tile(const Call& call, const Tile& tile, int64_t rows, const Head& keys, const Head& values, int slot,
               uint64_t* unfit, AmxScratch<Path>& s) {
  using Check = typename Path::Check;
  using From = Operand<typename Path::Row>;
  const From k = tile_rows<Path>(keys, tile, rows, call.head_dim, s.staged_keys(), s);
  const bool fit = pack_fit(k, rows, s.staged_keys(), unfit, s, [&](From from, Check& check) {
    pack_keys<Path>(from, rows, s.keys_of(slot), check, s);
  });
  const From v = tile_rows<Path>(values, tile, rows, call.head_dim_v, s.staged_values(), s);
  return pack_fit(v, rows, s.staged_values(), unfit, s, [&](From from, Check& check) {
    pack_values<Path>(from, rows, s.values_of(slot), check, s);
  }) && fit;
}

// A key tile out of the cache, packed where it is not there. The s.slots tiles found last are valid.
template <class Path>
PackedTile find_tile(const Call& call, int64_t pair, int64_t view, int64_t number, const Tile& tile, const Head& keys,
                     const Head& values, AmxScratch<Path>& s) {
  const int64_t rows = round_up(tile.cells(), kTileTerms), words = call.plan.block_kv / 64;
  bool hit;
  const int slot = s.cache.find(pair, view, number, s.slots, hit);
  uint64_t* unfit = s.unfit + slot * words;
  if (!hit) {
    constexpr int64_t kBytes = sizeof(typename Path::E::Storage);
    prefetch_rows(keys, tile, call.head_dim * kBytes);
    prefetch_rows(values, tile, call.head_dim_v * kBytes);
    clear(unfit, words);
    s.cache.unfit[slot] = !pack_tile(call, tile, rows, keys, values, slot, unfit, s);
  }
  return {{s.keys_of(slot), kTileBytes, s.key_steps * kTileSize, kTileSize, s.key_part},
          {s.values_of(slot), kTileBytes, s.tile_steps * kTileSize, kTileSize, s.value_part},
          rows,
          s.cache.unfit[slot] ? unfit : nullptr};
}

}  // namespace SPATTN_ISA
}  // namespace spattn
