// Attention dropout in kernels: the pairs that a call's random words drop (request/dropout.py defines them).
//
// A row has two words and a key one; dropout_words.cu computes them before the kernels of a call. A pair's random
// number takes one multiplication. Kernels drop weights after they have added them to the row's sum.
#pragma once

#include <stdint.h>

namespace spattn {

// Words of the queries and keys of a batch entry and query head.
template <class T>
struct Dropout {
  struct alignas(8) Row {
    uint32_t offset, multiplier;

    // The random number of a pair, given the word of its key.
    SPATTN_SCORE uint32_t number(uint32_t word) const { return word * multiplier + offset; }
  };

  const Row* rows;
  const uint32_t* words;
  int first, last_row, last_key;  // position of the first query; indices of the last query and key
  uint32_t threshold;
  T factor;  // of the weights that are kept

  // These take positions, whose words are arbitrary for padding.
  SPATTN_SCORE Row row(int query) const {
    const int at = query - first;
    return rows[at < 0 || at > last_row ? 0 : at];
  }
  SPATTN_SCORE uint32_t word(int key) const { return words[key < 0 || key > last_key ? 0 : key]; }

  SPATTN_SCORE bool keeps(Row row, uint32_t word) const { return row.number(word) >= threshold; }

  // The factor of a pair's weight: 0 if it is dropped.
  SPATTN_SCORE T of(int query, int key) const { return keeps(row(query), word(key)) ? factor : T(0); }
};

// All weights are kept.
template <class T>
struct NoDropout {
  SPATTN_SCORE T of(int, int) const { return T(1); }
};

// `Args` has the fields that score/source.py lists.
template <class T, class Args>
SPATTN_SCORE Dropout<T> open_dropout(const Args& args, int offset, int batch, int query_head) {
  const int64_t head = int64_t(batch) * args.dropout_heads + query_head;
  Dropout<T> found;
  found.rows = reinterpret_cast<const typename Dropout<T>::Row*>(args.dropout_rows) + head * args.dropout_q_len;
  found.words = reinterpret_cast<const uint32_t*>(args.dropout_words) + head * args.dropout_kv_len;
  found.first = offset;
  found.last_row = int(args.dropout_q_len) - 1, found.last_key = int(args.dropout_kv_len) - 1;
  found.threshold = args.dropout_threshold;
  found.factor = T(args.dropout_factor);
  return found;
}

}  // namespace spattn
