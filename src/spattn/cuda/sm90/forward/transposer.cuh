// Transposer warps: transpose tiles of float8 values in shared memory, because WGMMA reads 8-bit operands K-major only.
//
// A tile of 128 keys by 128 features becomes 128 features by 128 keys, in place and in the same swizzle. The keys of
// every 16 are permuted so that the accumulators of q k^T are the A operand of the second product: place 4 t + i is that
// of key 2 t + i % 2 + i / 2 * 8.
#pragma once

#include "common/chain.cuh"
#include "sm90/isa/barrier.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/isa/wgmma.cuh"

namespace spattn::sm90 {

struct Transposer {
  const Params& p;
  Shared& shared;
  const int part;  // index of this warp among the transposers
  const int lane = threadIdx.x % 32;

  static constexpr int kSide = 32, kBlocks = 128 / kSide;  // of square blocks
  static constexpr int kPairs = kBlocks * kBlocks / 2;  // of blocks that take each other's place, or of diagonal ones

  // Words of a block: features 0 to 15, 16 to 31; even and odd features of keys 0 to 15, 16 to 31.
  using Block = uint32_t[2][4];

  // Loads the transpose of the block of keys 32 * key and features 32 * feature.
  __device__ __forceinline__ void load(uint32_t tile, int key, int feature, Block& block) const {
    const uint32_t row = tile + (key * kSide + lane) * kRowBytes;
    const bool upper = lane >= 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[4];  // features 2 g, 2 g + 1 of keys 2 t, 2 t + 1 of every eight, in lane 4 g + t
      load_matrices_transposed(row + ((feature * 2 + half) ^ lane % 8) * 16, pairs);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The upper lanes exchange even and odd features: eight rows of a store then are in different banks.
        block[half][2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], upper ? 0x7531 : 0x6420);
        block[half][2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], upper ? 0x6420 : 0x7531);
      }
    }
  }

  // Stores a transposed block of these keys and features.
  __device__ __forceinline__ void store(uint32_t tile, int key, int feature, const Block& block) const {
    const int odd = lane / 8 % 2 ^ lane % 8 / 4;
    const int at = lane % 8 * 2 + odd;  // feature of the row that this lane addresses
    const uint32_t row = tile + (feature * kSide + at) * kRowBytes + ((key * 2 + lane / 16) ^ at % 8) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_matrices(row + half * 16 * kRowBytes, block[half][0], block[half][1], block[half][2], block[half][3]);
    }
  }

  __device__ __forceinline__ void transpose(uint32_t tile) const {
#pragma unroll 1
    for (int i = 0; i < kPairs; i += kTransposers) {
      const int number = 4 * (i + part);
      const int first = 0x20211000 >> number & 15, second = 0x20332321 >> number & 15;
      const bool diagonal = first == second;
      const int third = diagonal ? first + 1 : second, fourth = diagonal ? first + 1 : first;
      Block own, other;
      load(tile, first, second, own);
      load(tile, third, fourth, other);
      store(tile, first, second, own);
      store(tile, third, fourth, other);
    }
  }

  // Transposes all values of this CTA, which are in every other stage.
  __device__ void run() {
    if (int(blockIdx.x) >= p.task_count) return;
    RingPosition<kStages> ring;
    uint32_t parities = 0;  // of the next phase of `raw`, a bit for each stage
    bool last;
    do {
      ring.advance();
      ring.advance();
      barrier_wait(shared_address(&shared.raw[ring.stage]), parities >> ring.stage & 1);
      parities ^= 1u << ring.stage;
      last = shared.masks[ring.stage][0] == kLastValues;
      transpose(shared_address(shared.ring[ring.stage]));
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.full[ring.stage]), kGathers ? kCopies : 1);
    } while (!last);
  }
};

}  // namespace spattn::sm90
