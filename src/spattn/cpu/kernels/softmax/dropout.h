// Dropout of softmax weights: which pairs of a tile are kept.
//
// A query has an offset and an odd multiplier, a key has a word: random numbers of its position, the head and the batch
// entry, so the dropped pairs do not depend on tiles or threads. A pair is dropped if word * multiplier + offset,
// modulo 2^32, is below a threshold. The forward drops weights after their sum, and divides by 1 - p in its epilogue.
#pragma once
#include "kernels.h"
#include "simd/vec.h"
#include "tile/arena.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// The words of queries, in lanes. Returns nonzero lanes for the keys with which their weights are kept.
template <class T> struct KeptPairs {
  BitsVec<T> multiplier, offset, threshold;

  SPATTN_INLINE IntVec<T> operator()(BitsVec<T> key) const {
    BitsVec<T> number = key * multiplier + offset;
    if (sizeof(T) == 8) number &= 0xffffffff;
    return number >= threshold;
  }
};

// The words of the queries and keys of a tile. A Dropout of a call without dropout is false and owns nothing.
template <class T> class Dropout {
  static constexpr int64_t L = kLanes<T>;

 public:
  // For tiles of at most `queries` x `keys` pairs, rounded up to vectors.
  Dropout(const Call& call, int64_t queries, int64_t keys, Arena& arena) : call_(call), words_(call.dropout) {
    if (!words_) return;
    offset_ = arena.array<Word<T>>(round_up(queries, L));
    multiplier_ = arena.array<Word<T>>(round_up(queries, L));
    key_ = arena.array<Word<T>>(round_up(keys, L));
  }

  explicit operator bool() const { return words_ != nullptr; }

  // Factor of the kept weights, 1 / (1 - p).
  T factor() const { return T(words_->factor); }

  // Reads the words of `count` queries, which are queries `first` and following of the tile.
  void list_queries(int64_t batch, int64_t head, const int64_t* position, int64_t count, int64_t first = 0) const {
    const int64_t start = (batch * call_.heads_q + head) * call_.q_len;
    for (int64_t i = 0; i < count; ++i) {
      const bool real = position[i] != kPadding;
      offset_[first + i] = real ? words_->offset[start + position[i]] : 0;
      multiplier_[first + i] = real ? words_->multiplier[start + position[i]] : 0;
    }
  }

  // Reads the words of the tile's `count` keys.
  void list_keys(int64_t batch, int64_t head, const int64_t* position, int64_t count) const {
    const uint32_t* const words = words_->key + (batch * call_.heads_q + head) * call_.kv_len;
    for (int64_t i = 0; i < count; ++i) key_[i] = position[i] != kPadding ? words[position[i]] : 0;
  }

  // Queries in the lanes from `query` on, or one query in all lanes.
  SPATTN_INLINE KeptPairs<T> queries(int64_t query) const {
    return {load<BitsVec<T>>(multiplier_ + query), load<BitsVec<T>>(offset_ + query), threshold()};
  }
  SPATTN_INLINE KeptPairs<T> one_query(int64_t query) const {
    return {splat_bits<T>(multiplier_[query]), splat_bits<T>(offset_[query]), threshold()};
  }

  // One key in all lanes, or keys in the lanes from `key` on.
  SPATTN_INLINE BitsVec<T> one_key(int64_t key) const { return splat_bits<T>(key_[key]); }
  SPATTN_INLINE BitsVec<T> keys(int64_t key) const { return load<BitsVec<T>>(key_ + key); }

  // Multiplies the weights P' of the keys [begin, end), (keys, ld), by `factor` if they are kept, by 0 if not.
  void drop_queries(int64_t begin, int64_t end, int64_t count, T factor, T* weights, int64_t ld) const {
    for (int64_t query = 0; query < count; query += L) {
      const KeptPairs<T> kept = queries(query);
      for (int64_t key = begin; key < end; ++key) {
        T* const at = weights + key * ld + query;
        store(at, kept(one_key(key)) ? load<Vec<T>>(at) * factor : Vec<T>{});
      }
    }
  }

  // As drop_queries() with factor 1, for the queries [first, first + count) and the keys [begin, end) as pairs of 16
  // bits. Row `begin` / 2 of `weights` has the first pairs; each weight is a sum of kParts parts, `part` elements apart.
  template <int kParts>
  void drop_pairs(int64_t begin, int64_t end, int64_t first, int64_t count, uint32_t* weights, int64_t ld,
                  int64_t part = 0) const {
    static_assert(sizeof(T) == 4, "a pair has the size of a lane");
    for (int64_t query = 0; query < count; query += L) {
      const KeptPairs<T> kept = queries(first + query);
      for (int64_t key = begin; key < end; key += 2) {
        const IntVec<T> even = kept(one_key(key)), odd = kept(one_key(key + 1));
        for (int i = 0; i < kParts; ++i) {
          uint32_t* const at = weights + key / 2 * ld + query + i * part;
          const auto both = load<BitsVec<T>>(at);
          store(at, (even ? both & 0xffff : BitsVec<T>{}) | (odd ? both & 0xffff0000 : BitsVec<T>{}));
        }
      }
    }
  }

  // Multiplies the weights P of a query by `factor` if they are kept, by 0 if not; `count` is a multiple of kLanes.
  void drop_keys(int64_t query, int64_t count, T factor, T* weights) const {
    const KeptPairs<T> kept = one_query(query);
    for (int64_t key = 0; key < count; key += L) {
      store(weights + key, kept(keys(key)) ? load<Vec<T>>(weights + key) * factor : Vec<T>{});
    }
  }

 private:
  SPATTN_INLINE BitsVec<T> threshold() const { return splat_bits<T>(words_->threshold); }

  const Call& call_;
  const DropoutWords* words_;
  Word<T>* offset_ = nullptr;
  Word<T>* multiplier_ = nullptr;
  Word<T>* key_ = nullptr;
};

// Dropout of a row, one pair at a time.
class RowDropout {
 public:
  RowDropout(const Call& call, int64_t batch, int64_t head, int64_t query) : words_(call.dropout) {
    if (!words_) return;
    const int64_t number = batch * call.heads_q + head;
    offset_ = words_->offset[number * call.q_len + query];
    multiplier_ = words_->multiplier[number * call.q_len + query];
    key_ = words_->key + number * call.kv_len;
  }

  // Returns the factor of a weight: 1 / (1 - p) if it is kept, else 0.
  double factor(int64_t key) const {
    if (!words_) return 1;
    return key_[key] * multiplier_ + offset_ < words_->threshold ? 0 : words_->factor;
  }

 private:
  const DropoutWords* words_;
  uint32_t offset_ = 0, multiplier_ = 0;
  const uint32_t* key_ = nullptr;
};

}  // namespace SPATTN_ISA
}  // namespace spattn
