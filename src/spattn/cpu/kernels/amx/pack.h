// Packs AMX operands, zero-padded. Q' is a right operand, with pairs of terms in a lane. K and V' are left operands,
// with adjacent terms in a row.
#pragma once
#include "amx/parts.h"
#include "amx/scratch.h"
#include "tile/item.h"
#include "tile/operand.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Transposes 16 vectors of 32-bit elements and stores them as a tile with rows `ld` bytes apart.
SPATTN_INLINE void store_transposed(Vec<float> (&block)[kTileRows], char* out, int64_t ld) {
  transpose<float>(block);
  SPATTN_UNROLL
  for (int i = 0; i < kTileRows; ++i) store(out + i * ld, block[i]);
}

// Packs Q' of one tile column, 16 queries, from the rows in s.staged.
template <class Path> void pack_column(char* out, typename Path::Check& check, float sign, const AmxScratch<Path>& s) {
  constexpr int kParts = Path::kParts;
  for (int64_t t = 0; t < s.counts.key_steps; ++t) {
    Vec<float> block[kParts][kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      typename Path::Bits parts[kParts];
      Path::terms(s.staged + i * s.counts.key_width() + t * kTileTerms, sign, parts, check);
      for (int p = 0; p < kParts; ++p) block[p][i] = (Vec<float>)parts[p];
    }
    for (int p = 0; p < kParts; ++p) {
      store_transposed(block[p], out + (p * s.counts.key_steps + t) * kPanelSize, kPanelBytes);
    }
  }
}

// Packs Q' of the cells [0, cells). Queries that fail Path::Check take the float64 fallback.
template <class Path> void pack_queries(const Item& item, int64_t cells, float sign, AmxScratch<Path>& s) {
  const int64_t ld = s.counts.key_width(), width = item.call.head_dim;
  for (int64_t first = 0; first < cells; first += kTileColumns) {
    gather_queries<typename Path::Raw>(item.queries(), first, kTileColumns, cells, width, ld, s.position.query,
                                       s.staged);
    typename Path::Check check;
    pack_column<Path>(s.query_column(first), check, sign, s);
    for (int64_t i = 0; i < kTileColumns && !check.passed(); ++i) {
      typename Path::Check one;
      one.look_at(s.staged + i * ld, ld);
      s.exact.chosen[first + i] |= !one.passed();
    }
  }
}

// Packs `rows` rows of K, a multiple of kTileTerms, to `out`. Returns whether they pass Path::Check.
template <class Path>
bool pack_keys(Operand<typename Path::Row> from, int64_t rows, char* out, const PackedTiles<Path>& tiles) {
  typename Path::Check check;
  const int64_t steps = tiles.counts.key_steps;
  for (int64_t row = 0; row < rows; ++row) {
    char* line = out + row / kTileRows * steps * kTileSize + row % kTileRows * kTileBytes;
    for (int64_t t = 0; t < steps; ++t) {
      typename Path::Bits parts[Path::kParts];
      Path::terms(from.data + row * from.ld + t * kTileTerms, 1.0f, parts, check);
      for (int p = 0; p < Path::kParts; ++p) store(line + p * tiles.key_part + t * kTileSize, parts[p]);
    }
  }
  return check.passed();
}

// Packs `rows` rows of V, a multiple of kTileTerms, as V' to `out`.
template <class Path>
void pack_values(Operand<typename Path::Row> from, int64_t rows, char* out, const PackedTiles<Path>& tiles) {
  constexpr int kParts = Path::kParts;
  for (int64_t t = 0; t < rows / kTileTerms; ++t) {
    for (int64_t d = 0; d < tiles.counts.value_tiles; ++d) {
      Vec<float> block[kParts][kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        const auto* row = from.data + (t * kTileTerms + 2 * i) * from.ld + d * kTileRows;
        typename Path::Bits parts[kParts];
        Path::pairs(row, row + from.ld, parts);
        for (int p = 0; p < kParts; ++p) block[p][i] = (Vec<float>)parts[p];
      }
      char* tile = out + (d * tiles.counts.steps + t) * kTileSize;
      for (int p = 0; p < kParts; ++p) store_transposed(block[p], tile + p * tiles.value_part, kTileBytes);
    }
  }
}

// Packs K and V of a tile into entry `index` of the cache. Returns whether its keys pass Path::Check (parts.h).
template <class Path>
bool pack_tile(const Item& item, const Tile& tile, int64_t rows, const Head& keys, const Head& values, int index,
               AmxScratch<Path>& s) {
  const Call& call = item.call;
  using Raw = typename Path::Raw;
  const auto k = tile_rows<Raw>(keys, tile, rows, call.head_dim, s.counts.key_width(), false, s.position.key, s.staged);
  const bool fit = pack_keys<Path>(k, rows, s.tiles.keys(index), s.tiles);
  const auto v =
      tile_rows<Raw>(values, tile, rows, call.head_dim_v, s.counts.value_width(), false, s.position.key, s.staged);
  pack_values<Path>(v, rows, s.tiles.values(index), s.tiles);
  return fit;
}

// Returns a key tile from the cache; packs it on a miss. The most recent `capacity` tiles stay valid.
template <class Path>
PackedTile find_tile(const Item& item, const Listed& at, const Head& keys, const Head& values, AmxScratch<Path>& s) {
  const Tile tile = item.key_tile(at);
  const int64_t rows = round_up(tile.cells(), kTileTerms);
  bool hit;
  const int index = s.cache->find(item.kv_number(), item.key_view(at), at.tile, s.tiles.capacity, hit);
  if (!hit) {
    constexpr int64_t kBytes = sizeof(typename Path::E::Storage);
    prefetch_rows(keys, tile, item.call.head_dim * kBytes);
    prefetch_rows(values, tile, item.call.head_dim_v * kBytes);
    s.cache->unfit[index] = !pack_tile<Path>(item, tile, rows, keys, values, index, s);
  }
  return s.tiles.tile(index, rows);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
