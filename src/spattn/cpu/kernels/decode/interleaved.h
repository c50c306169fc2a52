// K and V of plans with few-query items that share keys often. K has the features of adjacent keys interleaved: a
// vector holds some features of several keys, so that dot products need few steps across lanes and may start at any
// key. V is copied if its rows are not whole vectors of the compute type, or if the products read a row in many pieces:
// rows of a power of two of cache lines would map to few cache sets.
//
// Blocks of consecutive keys are filled when an item first needs them, and stay until another block takes their entry
// of the ring: consecutive items use neighbouring keys. The ring does not affect results.
#pragma once
#include "decode/rows.h"
#include "kernels.h"
#include "simd/blocking.h"
#include "simd/element.h"
#include "simd/vec.h"
#include "tile/arena.h"
#include "tile/item.h"
#include "tile/operand.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

// Keys of a vector, and adjacent features of each.
template <class T> constexpr int kKeysAbreast = kLanes<T> < 4 ? kLanes<T> : kLanes<T> < 16 ? 4 : 8;
template <class T> constexpr int kFeaturesAbreast = kLanes<T> / kKeysAbreast<T>;

// K and V of a key.
template <class T> struct KeyPlace {
  const T* keys;       // the first features of the key, and of the next ones in the vector
  const char* values;  // its row of V; the next ones follow evenly spaced
};

template <class T> class InterleavedKeys {
 public:
  static constexpr int64_t kKeys = 64;                       // of a block
  static constexpr int64_t kRows = kKeys + kKeysAbreast<T>;  // space for a vector from the last key on
  // Elements from the features of a vector to the next ones: an odd number of cache lines, to spread over cache sets.
  static constexpr int64_t kLd = kRows * kFeaturesAbreast<T>;

  // Starts the scratch, whose zeros mark the blocks as unowned. Disabled if `reach` is 0 or tiles with keys up to
  // `reach` apart do not fit the ring. `readable`: whether rows of V can be read in place.
  InterleavedKeys(const Call& call, int64_t reach, bool readable, Arena& arena)
      : blocks_((call.kv_len + kKeys - 1) / kKeys),
        key_size_(round_up(call.head_dim, kFeaturesAbreast<T>) / kFeaturesAbreast<T> * kLd),
        ld_value_(value_width(call.head_dim_v, reach, readable)), value_size_(kRows * ld_value_),
        room_(room(reach, key_size_ + value_size_)), owner_(arena.array<int64_t>(room_ ? kMostBlocks : 0)),
        data_(arena.array<T>(room_ * (key_size_ + value_size_))),
        rows_(arena.array<T>(room_ ? kKeysAbreast<T> * round_up(call.head_dim, kLanes<T>) : 0)),
        reciprocal_(room_ ? ~uint64_t(0) / uint64_t(room_) + 1 : 0) {}

  explicit operator bool() const { return room_ > 0; }

  // Vectors at tile starts straddle cache lines half as often if they are an even number of keys from the start of a
  // block; `odd`: most tiles start at an odd key.
  void align(bool odd) { lead_ = odd; }

  // Whether all keys from `first` to `last` fit at once.
  bool holds(int64_t first, int64_t last) const { return room_ >= blocks_ || last - first <= (room_ - 1) * kKeys; }

  // Bytes from row to row of V.
  int64_t value_step(const KeyHead& head) const {
    return ld_value_ ? ld_value_ * int64_t(sizeof(T)) : head.values.position;
  }

  // Finds the keys of a head.
  template <class E> struct Finder {
    const InterleavedKeys& ring;
    const KeyHead& head;
    const Call& call;
    int64_t room, owners, size, lead;
    uint64_t reciprocal;
    T* data;
    int64_t* owner;

    SPATTN_INLINE KeyPlace<T> find(int64_t position) const {
      const int64_t block = int64_t(uint64_t(position) / kKeys), cell = int64_t(uint64_t(position) % kKeys);
      const int64_t place =
          block - int64_t((unsigned __int128)(uint64_t(block)) * reciprocal >> 64) * room;  // block % room
      T* const found = data + place * size;
      if (owner[place] != owners + 2 * block) {
        ring.template fill<E>(head, block * kKeys, call, found);
        owner[place] = owners + 2 * block;
      }
      const T* const keys = found + (cell + lead) * kFeaturesAbreast<T>;
      if (!ring.ld_value_) return {keys, head.values.data + position * head.values.position};
      return {keys, reinterpret_cast<const char*>(found + ring.key_size_ + cell * ring.ld_value_)};
    }
  };

  template <class E> Finder<E> finder(const KeyHead& head, const Call& call) const {
    const int64_t owners = 2 * (1 + head.number * blocks_) + lead_;
    return {*this, head, call, room_, owners, key_size_ + value_size_, lead_, reciprocal_, data_, owner_};
  }

 private:
  // Rounds up to an odd number of cache lines, if a multiple of one.
  static constexpr int64_t odd_lines(int64_t count) {
    constexpr int64_t line = 64 / sizeof(T);
    return count % (2 * line) ? count : count + line;
  }

  // 0 if V is read in place.
  int64_t value_width(int64_t head_dim_v, int64_t reach, bool readable) const {
    const int64_t width = odd_lines(round_up(head_dim_v, kLanes<T>));
    const bool many_pieces = head_dim_v > 2 * kOutputVectors * kLanes<T>;
    return readable && !(many_pieces && room(reach, key_size_ + kRows * width)) ? 0 : width;
  }

  // The ring may have kBytes if a tile needs it, otherwise what stays in the L2 cache beside all else: evicted blocks
  // would be written to memory and read again.
  static constexpr int64_t kMostBlocks = kZeroedScratch / sizeof(int64_t);
  static constexpr int64_t kBytes = 2 * 1024 * 1024, kHotBytes = 256 * 1024;

  int64_t room(int64_t reach, int64_t size) const {
    if (!reach) return 0;
    const int64_t bytes = size * int64_t(sizeof(T)), least = reach / kKeys + 2;
    const int64_t needed = least < blocks_ ? least : blocks_, hot = kHotBytes / bytes;
    if (needed > kMostBlocks || needed * bytes > kBytes) return 0;
    const int64_t most = blocks_ < kMostBlocks ? blocks_ : kMostBlocks;
    return hot < needed ? needed : hot < most ? hot : most;
  }

  // Zeroes everything before the first key and beyond the last key or feature. Prefetches rows in software, as the
  // hardware prefetcher does not follow several streams at once.
  template <class E>
  __attribute__((noinline)) void fill(const KeyHead& head, int64_t first, const Call& call, T* to) const {
    interleave<E>(head.keys, first - lead_, call, to);
    if (ld_value_) copy<E>(head.values, first, call, to + key_size_);
  }

  template <class E>
  void interleave(const Head& head, int64_t first, const Call& call, T* to) const {
    constexpr int64_t G = kKeysAbreast<T>, F = kFeaturesAbreast<T>, L = kLanes<T>;
    constexpr int64_t kSize = sizeof(typename E::Storage);
    const int64_t width = call.head_dim, ld = round_up(width, L);
    const bool in_place = whole_vectors<E>(head, width, ld);
    for (int64_t key = first; key < first + kKeys + G; key += G, to += L) {
      const char* from = head.data + key * head.position;
      const bool copied = !in_place || key < 0 || key + G > call.kv_len;
      for (int64_t i = 0; copied && i < G; ++i) {
        const int64_t real = 0 <= key + i && key + i < call.kv_len ? width : 0;
        if (real) read_row<E>(from + i * head.position, head.feature, width, rows_ + i * ld);
        clear(rows_ + i * ld + real, ld - real);
      }
      const char *soon = from + 2 * kSoon * head.position, *soon_end = soon + ld * kSize;
      for (int64_t d = 0; d < ld; d += L) {
        // As many bytes per iteration, but row by row: the hardware prefetcher helps in address order.
        for (int64_t at = 0; !copied && at < G * L * kSize; at += 64) {
          __builtin_prefetch(soon);
          soon += 64;
          if (soon >= soon_end) soon_end += head.position, soon = soon_end - ld * kSize;
        }
        Vec<T> block[G];
        SPATTN_UNROLL
        for (int64_t i = 0; i < G; ++i) {
          block[i] = copied ? load<Vec<T>>(rows_ + i * ld + d) : load_elements<E>(from + i * head.position + d * kSize);
        }
        transpose<T, F>(block);
        for (int64_t i = 0; i < G && d + i * F < width; ++i) store(to + (d / F + i) * kLd, block[i]);
      }
    }
  }

  template <class E>
  void copy(const Head& head, int64_t first, const Call& call, T* to) const {
    const int64_t end = first + kKeys + kKeysAbreast<T>, real = end < call.kv_len ? end : call.kv_len;
    const int64_t bytes = call.head_dim_v * int64_t(sizeof(typename E::Storage));
    for (int64_t key = first; key < real; ++key, to += ld_value_) {
      const char* from = head.data + key * head.position;
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + kSoon * head.position + at);
      read_row<E>(from, head.feature, call.head_dim_v, to);
      clear(to + call.head_dim_v, round_up(call.head_dim_v, kLanes<T>) - call.head_dim_v);
    }
    clear(to, (end - real) * ld_value_);
  }

  int64_t blocks_;       // of a head
  int64_t key_size_;     // elements of a block of K
  int64_t ld_value_;     // elements from row to row of V; 0: read in place
  int64_t value_size_;   // elements of a block of V
  int64_t room_;         // blocks of the ring
  int64_t* owner_;       // twice 1 + the index of a block over all heads, plus its `lead_`
  T* data_;              // (room_): (head_dim / features abreast, kLd) of K, (kRows, ld_value_) of V
  T* rows_;              // (keys abreast, head_dim in whole vectors): rows of K not read in place
  uint64_t reciprocal_;  // 2^64 / room_, rounded up: gives exact quotients of blocks below 2^32
  int64_t lead_ = 0;     // keys before the first one of a block
};

}  // namespace SPATTN_ISA
}  // namespace spattn
