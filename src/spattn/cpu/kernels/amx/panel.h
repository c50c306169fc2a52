// AMX products of the forward. Their results are panels: two tiles wide, or one at the end of the queries.
#pragma once
#include "amx/tiles.h"

namespace spattn {
namespace SPATTN_ISA {

// The two tiles of a panel lie side by side, so that a row of a panel is two tile rows.
constexpr int kPanel = 2 * kTileColumns;     // queries per panel
constexpr int kPanelBytes = 2 * kTileBytes;  // bytes per row
constexpr int64_t kTileSize = kTileRows * kTileBytes, kPanelSize = kTileRows * kPanelBytes;

// Computes a row of N tiles of a product in tile registers C and C + 1, with operands in registers A, 6 and 7.
template <int C, int A, int N> struct TileRow {
  template <int kParts>
  static SPATTN_INLINE void multiply(const TileFactor& a, int row, const TileFactor& b, int64_t steps, bool add,
                                     const char* c) {
    static_assert(kParts <= 2, "three products of parts");
    start(add, c);
    for (int64_t t = 0; kParts == 2 && t < steps; ++t) {  // small products first, for a smaller rounding error
      product(a.at(row, t, 1), a.ld, b, t, 0), product(a.at(row, t, 0), a.ld, b, t, 1);
    }
    for (int64_t t = 0; t < steps; ++t) product(a.at(row, t, 0), a.ld, b, t, 0);
  }

  static SPATTN_INLINE void start(bool add, const char* c) {
    if (add) {
      tile_load<C>(c, kPanelBytes);
      if constexpr (N > 1) tile_load<C + 1>(c + kTileBytes, kPanelBytes);
    } else {
      tile_zero<C>();
      if constexpr (N > 1) tile_zero<C + 1>();
    }
  }

  static SPATTN_INLINE void product(const void* a, int64_t ld, const TileFactor& b, int64_t terms, int number) {
    tile_load<A>(a, ld);
    load_tiles<6, N>(b, terms, number);
    tile_dot<C, A, 6>();
    if constexpr (N > 1) tile_dot<C + 1, A, 7>();
  }

  static SPATTN_INLINE void store(char* c) {
    tile_store<C>(c, kPanelBytes);
    if constexpr (N > 1) tile_store<C + 1>(c + kTileBytes, kPanelBytes);
  }
};

// Computes C = A B or C += A B, like panel_product(), for `steps` = kSteps. Keeps B in the registers from 4 on instead
// of loading it for each row.
template <int N, int kSteps>
void resident_product(int64_t rows, const TileFactor& a, const TileFactor& b, bool add, char* c) {
  static_assert(kSteps <= 2, "eight registers");
  using Row = TileRow<0, 2, N>;
  load_tiles<4, N>(b, 0, 0);
  if constexpr (kSteps > 1) load_tiles<6, N>(b, 1, 0);
  for (int row = 0; row < rows; ++row, c += kPanelSize) {
    Row::start(add, c);
    tile_load<2>(a.at(row, 0, 0), a.ld);
    tile_dot<0, 2, 4>();
    if constexpr (N > 1) tile_dot<1, 2, 5>();
    if constexpr (kSteps > 1) {
      tile_load<3>(a.at(row, 1, 0), a.ld);
      tile_dot<0, 3, 6>();
      if constexpr (N > 1) tile_dot<1, 3, 7>();
    }
    Row::store(c);
  }
}

// Computes C = A B or C += A B for `rows` rows of N tiles, over `steps` times kTileTerms terms. Rows alternate between
// two pairs of registers, so that the products of the next row hide the 52 cycles until a row can be stored.
template <int kParts, int N>
void panel_product(int64_t rows, const TileFactor& a, const TileFactor& b, int64_t steps, bool add, char* c) {
  if (kParts == 1 && steps == 1) return resident_product<N, 1>(rows, a, b, add, c);
  if (kParts == 1 && steps == 2) return resident_product<N, 2>(rows, a, b, add, c);
  using Even = TileRow<0, 4, N>;
  using Odd = TileRow<2, 5, N>;
  int64_t row = 0;
  for (; row + 1 < rows; row += 2, c += 2 * kPanelSize) {
    Even::template multiply<kParts>(a, int(row), b, steps, add, c);
    if (row) Odd::store(c - kPanelSize);
    Odd::template multiply<kParts>(a, int(row + 1), b, steps, add, c + kPanelSize);
    Even::store(c);
  }
  if (row < rows) Even::template multiply<kParts>(a, int(row), b, steps, add, c);
  if (row) Odd::store(c - kPanelSize);
  if (row < rows) Even::store(c);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
