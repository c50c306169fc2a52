// Tiles whose keys lie in lines of neighbours: K is read interleaved, V where it lies, line after line.
#pragma once
#include "decode/interleaved.h"
#include "decode/products.h"
#include "kernels.h"
#include "simd/blocking.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Rows of V in memory, of the real cells of a tile.
struct Lines {
  const char* data;
  int64_t step[3];  // bytes between neighbours along each axis
  const Tile& tile;

  Lines(const Head& head, const Tile& tile) : data(head.data + tile.start * head.position), tile(tile) {
    for (int axis = 0; axis < 3; ++axis) step[axis] = tile.stride[axis] * head.position;
  }

  template <class Visit> SPATTN_INLINE void each(int64_t, const Visit& visit) const {
    for (int64_t i = 0; i < tile.count[0]; ++i) {
      for (int64_t j = 0; j < tile.count[1]; ++j) {
        const char* row = data + i * step[0] + j * step[1];
        int64_t key = (i * tile.box[1] + j) * tile.box[2];
        const int64_t end = key + tile.count[2];
        for (; key + 1 < end; key += 2, row += 2 * step[2]) {
          visit(Count<0>{}, key, row);
          visit(Count<1>{}, key + 1, row + step[2]);
        }
        if (key < end) visit(Count<0>{}, key, row);
      }
    }
  }
  SPATTN_INLINE void prefetched() const {}
};

// Vectors of scores that are computed at once: with kRowsAtOnce rows their accumulators fill the registers.
template <class T> constexpr int kScoreVectors = kOutputVectors / kFeaturesAbreast<T>;

// Pieces of lines, of as many keys as a vector of interleaved keys has, but for the last one of a line.
template <class T> struct Runs {
  static constexpr int64_t kKeys = kKeysAbreast<T>, kAtOnce = kFeaturesAbreast<T>;  // that fill a vector of scores

  const T** data;  // the first features of the first key of each
  int64_t* cell;   // and its number in the tile
  int64_t count;   // a multiple of kAtOnce
  bool apart;      // do they not follow each other as cells do?

  Runs(const Call& call, Arena& arena)
      : data(arena.array<const T*>(call.plan.block_kv + kAtOnce)),
        cell(arena.array<int64_t>(call.plan.block_kv + kAtOnce)) {}

  // Do those of a tile have keys for half of their lanes?
  static bool pay(const Tile& tile) { return tile.stride[2] == 1 && 2 * tile.box[2] >= round_up(tile.box[2], kKeys); }

  // Those of a tile, in the order of its cells. Scores of padding are anything.
  template <class Find> void list(const Tile& tile, const Find& find) {
    count = 0, apart = false;
    for (int64_t i = 0; i < tile.count[0]; ++i) {
      for (int64_t j = 0; j < tile.count[1]; ++j) {
        const int64_t start = tile.start + i * tile.stride[0] + j * tile.stride[1];
        const int64_t first = (i * tile.box[1] + j) * tile.box[2];
        const T* at = nullptr;
        for (int64_t k = 0; k < tile.count[2]; k += kKeys, at += kKeys * kAtOnce) {
          if (k == 0 || (start + k) % InterleavedKeys<T>::kKeys < kKeys) at = find(start + k);  // in another block
          data[count] = at;
          cell[count] = first + k;
          apart |= first + k != kKeys * count++;
        }
      }
    }
    for (; count % kAtOnce; ++count) data[count] = data[count - 1], cell[count] = cell[count - 1] + kKeys;
  }
};

// The features of a query that meet those of a vector of interleaved keys.
template <class T> SPATTN_INLINE Vec<T> repeat_features(const T* from) {
  constexpr int kBytes = kFeaturesAbreast<T> * int(sizeof(T));
  if constexpr (kBytes == sizeof(T)) {
    return splat(*from);
  } else if constexpr (kBytes == 8) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return (Vec<T>)splat_bits<double>(word);
  } else {
#if defined(__AVX512F__)
    static_assert(kBytes == 16, "a quarter of a vector");
    return (Vec<T>)_mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float*>(from)));
#endif
  }
}

template <class T, int... I> SPATTN_INLINE Vec<T> by_runs(Vec<T> v, Lane<I...>) {
  return __builtin_shufflevector(v, v, (I % kKeysAbreast<T> * kFeaturesAbreast<T> + I / kKeysAbreast<T>)...);
}

// R rows of S for the runs that fill N vectors. Where they are apart, what one has more lanes than keys is
// overwritten by the next one.
template <int R, int N, bool kApart, class T>
__attribute__((noinline)) void multiply_runs(const T* const* run, const int64_t* cell, const T* query, int64_t ld_query,
                                             int64_t depth, T* scores, int64_t ld_scores) {
  constexpr int F = kFeaturesAbreast<T>, G = kKeysAbreast<T>;
  constexpr int64_t kLd = InterleavedKeys<T>::kLd;
  Vec<T> sum[R][N][F] = {};
  for (int64_t d = 0; d < depth; d += F) {
    Vec<T> right[N][F];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      SPATTN_UNROLL
      for (int f = 0; f < F; ++f) right[j][f] = load<Vec<T>>(run[j * F + f] + d / F * kLd);
    }
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = repeat_features<T>(query + i * ld_query + d);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) {
        SPATTN_UNROLL
        for (int f = 0; f < F; ++f) sum[i][j][f] += left * right[j][f];
      }
    }
  }
  SPATTN_UNROLL
  for (int j = 0; j < N; ++j) {
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> score =
          Logits<T>::score(by_runs<T>(fold<Add, T, F / 2>(sum[i][j]), typename MakeLanes<kLanes<T>>::type{}));
      T* const to = scores + i * ld_scores;
      if constexpr (kApart) {
        T lanes[kLanes<T>];
        store(lanes, score);
        SPATTN_UNROLL
        for (int f = 0; f < F; ++f) memcpy(to + cell[j * F + f], lanes + f * G, G * sizeof(T));
      } else {
        store(to + cell[j * F], score);
      }
    }
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
