// The shape of both products of the forward: M tiles below each other, 16 columns wide.
#pragma once
#include "amx.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int64_t kTileSize = kTileRows * kTileBytes;  // bytes

// C += A B for the M tiles of C, whose registers are 0 to M - 1, over one tile of terms.
template <int M> SPATTN_INLINE void column_step(const TileFactor& a, int64_t terms, int number) {
  tile_load<4>(a.at(0, terms, number), a.ld), tile_dot<0, 4, 6>();
  if constexpr (M > 1) tile_load<5>(a.at(1, terms, number), a.ld), tile_dot<1, 5, 6>();
  if constexpr (M > 2) tile_load<4>(a.at(2, terms, number), a.ld), tile_dot<2, 4, 6>();
  if constexpr (M > 3) tile_load<5>(a.at(3, terms, number), a.ld), tile_dot<3, 5, 6>();
}

// C = A B, or C += A B, for M tiles of C, adjacent in memory; as tile_product() otherwise.
template <int kParts, int M>
SPATTN_INLINE void column_product(const TileFactor& a, const TileFactor& b, int64_t steps, bool add, void* c) {
  static_assert(M <= 4 && kParts <= 2, "four registers of C, two of A, one of B");
  char* out = static_cast<char*>(c);
  if (add) {
    tile_load<0>(out, kTileBytes);
    if constexpr (M > 1) tile_load<1>(out + kTileSize, kTileBytes);
    if constexpr (M > 2) tile_load<2>(out + 2 * kTileSize, kTileBytes);
    if constexpr (M > 3) tile_load<3>(out + 3 * kTileSize, kTileBytes);
  } else {
    tile_zero<0>();
    if constexpr (M > 1) tile_zero<1>();
    if constexpr (M > 2) tile_zero<2>();
    if constexpr (M > 3) tile_zero<3>();
  }
  if constexpr (kParts == 2) {  // high by low and low by high first: small numbers round less
    for (int64_t t = 0; t < steps; ++t) {
      tile_load<6>(b.at(0, t, 0), b.ld), column_step<M>(a, t, 1);
      tile_load<6>(b.at(0, t, 1), b.ld), column_step<M>(a, t, 0);
    }
  }
  for (int64_t t = 0; t < steps; ++t) tile_load<6>(b.at(0, t, 0), b.ld), column_step<M>(a, t, 0);
  tile_store<0>(out, kTileBytes);
  if constexpr (M > 1) tile_store<1>(out + kTileSize, kTileBytes);
  if constexpr (M > 2) tile_store<2>(out + 2 * kTileSize, kTileBytes);
  if constexpr (M > 3) tile_store<3>(out + 3 * kTileSize, kTileBytes);
}

// The same for any number of tiles.
template <int kParts>
void column_product(int64_t tiles, TileFactor a, const TileFactor& b, int64_t steps, bool add, void* c) {
  char* out = static_cast<char*>(c);
  for (; tiles >= 4; tiles -= 4, out += 4 * kTileSize) {
    column_product<kParts, 4>(a, b, steps, add, out);
    a.data = a.at(4, 0, 0);
  }
  if (tiles == 3) column_product<kParts, 3>(a, b, steps, add, out);
  if (tiles == 2) column_product<kParts, 2>(a, b, steps, add, out);
  if (tiles == 1) column_product<kParts, 1>(a, b, steps, add, out);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
