// K of plans whose items are of few queries but meet each key often, with the features of neighbouring keys interleaved:
// a vector has some features of several keys, so that few steps of a dot product go across its lanes, and may start at
// any key.
//
// Blocks of consecutive keys are interleaved when an item first needs them, and stay until others of the ring need the
// room: items that follow each other meet neighbouring keys. What is in the ring changes no result.
#pragma once
#include "decode/rows.h"
#include "kernels.h"
#include "simd/element.h"
#include "simd/vec.h"
#include "tile/arena.h"
#include "tile/operand.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// The keys of a vector, and the features of each, which are neighbours.
template <class T> constexpr int kKeysAbreast = kLanes<T> < 4 ? kLanes<T> : 4;
template <class T> constexpr int kFeaturesAbreast = kLanes<T> / kKeysAbreast<T>;

template <class T> class InterleavedKeys {
 public:
  static constexpr int64_t kKeys = 64;  // of a block
  // Elements from the features of a vector to the next ones. There is room for a vector from the last key on; an odd
  // number of cache lines, where they are whole, so that not all fall into few cache sets.
  static constexpr int64_t kLd = (kKeys + kKeysAbreast<T>)*kFeaturesAbreast<T>;

  // At the beginning of the scratch, where the blocks are of no head before the first item. Not in use where tiles whose
  // keys lie as far apart as `reach` would not find room for all of theirs at once, or where that is 0.
  InterleavedKeys(const Call& call, int64_t reach, Arena& arena)
      : blocks_((call.kv_len + kKeys - 1) / kKeys),
        size_(round_up(call.head_dim, kFeaturesAbreast<T>) / kFeaturesAbreast<T> * kLd), room_(reach ? room(reach) : 0),
        owner_(arena.array<int64_t>(room_ ? kMostBlocks : 0)), data_(arena.array<T>(room_ * size_)),
        rows_(arena.array<T>(room_ ? kKeysAbreast<T> * round_up(call.head_dim, kLanes<T>) : 0)) {}

  explicit operator bool() const { return room_ > 0; }

  // Where the first features of key `position` are, and of as many as a vector has from it on.
  template <class E> const T* find(const Head& head, int64_t kv_number, int64_t position, const Call& call) const {
    const int64_t block = position / kKeys, place = block & (room_ - 1), owner = 1 + kv_number * blocks_ + block;
    T* data = data_ + place * size_;
    if (owner_[place] != owner) {
      fill<E>(head, block * kKeys, call, data);
      owner_[place] = owner;
    }
    return data + position % kKeys * kFeaturesAbreast<T>;
  }

 private:
  static constexpr int64_t kMostBlocks = kZeroedScratch / sizeof(int64_t), kBytes = 1024 * 1024;

  int64_t room(int64_t reach) const {
    int64_t found = 1;
    while (found < blocks_ && 2 * found <= kMostBlocks && 2 * found * size_ * int64_t(sizeof(T)) <= kBytes) found *= 2;
    return reach / kKeys + 2 <= found || found >= blocks_ ? found : 0;
  }

  // What lies beyond the last key or the last feature is 0.
  template <class E>
  __attribute__((noinline)) void fill(const Head& head, int64_t first, const Call& call, T* to) const {
    constexpr int64_t G = kKeysAbreast<T>, F = kFeaturesAbreast<T>, L = kLanes<T>;
    const int64_t width = call.head_dim, ld = round_up(width, L);
    const bool in_place = whole_vectors<E>(head, width, ld);
    for (int64_t key = first; key < first + kKeys + G; key += G, to += L) {
      const char* from = head.data + key * head.position;
      const bool copied = !in_place || key + G > call.kv_len;
      for (int64_t i = 0; copied && i < G; ++i) {
        const int64_t real = key + i < call.kv_len ? width : 0;
        if (real) read_row<E>(from + i * head.position, head.feature, width, rows_ + i * ld);
        clear(rows_ + i * ld + real, ld - real);
      }
      for (int64_t d = 0; d < ld; d += L) {
        Vec<T> block[G];
        SPATTN_UNROLL
        for (int64_t i = 0; i < G; ++i) {
          block[i] = copied ? load<Vec<T>>(rows_ + i * ld + d)
                            : load_elements<E>(from + i * head.position + d * int64_t(sizeof(typename E::Storage)));
        }
        transpose<T, F>(block);
        for (int64_t i = 0; i < G && d + i * F < width; ++i) store(to + (d / F + i) * kLd, block[i]);
      }
    }
  }

  int64_t blocks_, size_, room_;  // of a head; elements of a block; blocks of the ring, a power of 2
  int64_t* owner_;                // 1 + the number of a block among those of all heads
  T* data_;                       // (room_, head_dim / features abreast, kLd)
  T* rows_;                       // (keys abreast, head_dim in whole vectors): of K, where it is not read in place
};

}  // namespace SPATTN_ISA
}  // namespace spattn
