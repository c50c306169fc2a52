// Matrix products on AMX tiles of sixteen rows of 64 bytes, bfloat16 with float32 accumulation.
//
// `tdpbf16ps` adds A B to C, a tile of 16 x 16 float32. A has 16 rows of 32 terms, and B 16 rows of 16 pairs of
// adjacent terms. The instruction sums even and odd terms separately, adds both sums, then adds the result to C. It
// reads subnormals as 0.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd/blocking.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

constexpr int kTileRows = 16, kTileBytes = 64;
constexpr int kTileTerms = 32;  // terms per tile in the dimension over which a product sums
constexpr int kTileColumns = 16;

#if defined(SPATTN_AMX_EMULATED)
// Slow emulation, to test on machines without AMX.
inline thread_local char emulated_tiles[8][kTileRows][kTileBytes];

struct TileSession {};

template <int R> SPATTN_INLINE void tile_zero() { memset(emulated_tiles[R], 0, sizeof emulated_tiles[R]); }
template <int R> inline void tile_load(const void* from, int64_t ld) {
  for (int i = 0; i < kTileRows; ++i) memcpy(emulated_tiles[R][i], static_cast<const char*>(from) + i * ld, kTileBytes);
}
template <int R> inline void tile_store(void* to, int64_t ld) {
  for (int i = 0; i < kTileRows; ++i) memcpy(static_cast<char*>(to) + i * ld, emulated_tiles[R][i], kTileBytes);
}

SPATTN_INLINE Vec<float> flush(Vec<float> x) {
  const BitsVec<float> exponent = (BitsVec<float>)x & splat_bits<float>(0x7f800000);
  return exponent != 0 ? x : Vec<float>{};
}

template <int C, int A, int B> inline void tile_dot() {
  for (int i = 0; i < kTileRows; ++i) {
    Vec<float> even = {}, odd = {};
    for (int k = 0; k < kTileRows; ++k) {
      uint32_t pair;
      memcpy(&pair, &emulated_tiles[A][i][4 * k], 4);
      const BitsVec<float> left = splat_bits<float>(pair), right = load<BitsVec<float>>(emulated_tiles[B][k]);
      even = flush(even + flush((Vec<float>)(left << 16)) * flush((Vec<float>)(right << 16)));
      odd = flush(odd + flush((Vec<float>)(left & 0xffff0000)) * flush((Vec<float>)(right & 0xffff0000)));
    }
    store(emulated_tiles[C][i], flush(load<Vec<float>>(emulated_tiles[C][i]) + flush(even + odd)));
  }
}
#else
// Configures the tile registers of this thread at full size. Its destructor releases them, because otherwise each
// context switch saves 8 KiB.
struct TileSession {
  TileSession() {
    alignas(64) uint8_t config[64] = {1};  // palette 1; from byte 16: bytes per row (16-bit); from byte 48: rows
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = kTileBytes, config[48 + i] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileSession() { asm volatile("tilerelease" ::: "memory"); }
  TileSession(const TileSession&) = delete;
};

// Assembly, because the intrinsics require literal register numbers, which templates cannot pass.
template <int R> SPATTN_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(R)); }
template <int R> SPATTN_INLINE void tile_load(const void* from, int64_t ld) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(R), "r"(from), "r"(ld) : "memory");
}
template <int R> SPATTN_INLINE void tile_store(void* to, int64_t ld) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(R), "r"(to), "r"(ld) : "memory");
}
template <int C, int A, int B> SPATTN_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

// An operand A or B, stored as tiles; all strides are in bytes.
struct TileFactor {
  const void* data;
  int64_t ld;     // stride between rows of a tile
  int64_t block;  // stride between tiles along the rows of A or the columns of B
  int64_t step;   // stride between tiles in the dimension over which the product sums
  int64_t part;   // stride between the high and low parts: parts.h

  const void* at(int index, int64_t terms, int number) const {
    return static_cast<const char*>(data) + index * block + terms * step + number * part;
  }
};

// Loads part `number` of N operand tiles into tile registers First, First + 1, ...
template <int First, int N> SPATTN_INLINE void load_tiles(const TileFactor& factor, int64_t terms, int number) {
  tile_load<First>(factor.at(0, terms, number), factor.ld);
  if constexpr (N > 1) tile_load<First + 1>(factor.at(1, terms, number), factor.ld);
}

template <int M, int N> SPATTN_INLINE void multiply_tiles() {
  tile_dot<0, 4, 6>();
  if constexpr (N > 1) tile_dot<1, 4, 7>();
  if constexpr (M > 1) tile_dot<2, 5, 6>();
  if constexpr (M > 1 && N > 1) tile_dot<3, 5, 7>();
}

// Computes C = A B, or C += A B if `add`, for M by N tiles of C, over `steps` times kTileTerms terms. The tiles of C
// are adjacent, in a row-major matrix with a row stride of `ld` bytes.
template <int M, int N>
SPATTN_INLINE void tile_product(const TileFactor& a, const TileFactor& b, int64_t steps, bool add, void* c,
                                int64_t ld) {
  static_assert(M <= 2 && N <= 2, "eight registers: four of C, two each of A and B");
  char* out = static_cast<char*>(c);
  const auto each = [&](auto visit) {
    visit(Count<0>{}, out);
    if constexpr (N > 1) visit(Count<1>{}, out + kTileBytes);
    if constexpr (M > 1) visit(Count<2>{}, out + kTileRows * ld);
    if constexpr (M > 1 && N > 1) visit(Count<3>{}, out + kTileRows * ld + kTileBytes);
  };
  if (add) {
    each([&](auto number, char* p) { tile_load<decltype(number)::value>(p, ld); });
  } else {
    each([](auto number, char*) { tile_zero<decltype(number)::value>(); });
  }
  for (int64_t t = 0; t < steps; ++t) load_tiles<4, M>(a, t, 0), load_tiles<6, N>(b, t, 0), multiply_tiles<M, N>();
  each([&](auto number, char* p) { tile_store<decltype(number)::value>(p, ld); });
}

// As tile_product(), for 2 by `columns` tiles of C.
inline void strip_product(const TileFactor& a, TileFactor b, int64_t steps, bool add, float* c, int64_t ld,
                          int64_t columns) {
  for (; columns > 1; columns -= 2, c += 2 * kTileColumns, b.data = b.at(2, 0, 0)) {
    tile_product<2, 2>(a, b, steps, add, c, ld);
  }
  if (columns > 0) tile_product<2, 1>(a, b, steps, add, c, ld);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
