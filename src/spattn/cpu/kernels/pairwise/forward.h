// Work items of plans whose tiles have one query: pair by pair, for patterns so sparse that no block of pairs is worth
// a product of its own.
//
// As in decoding, vectors hold features and keys, and the query heads that share K and V are rows of one matrix. But a
// tile is no more than a list of keys: those of several tiles fill a chunk, and products read their rows of K and V
// wherever these lie. No pair is computed that is not allowed, but for the last vector of a chunk.
//
//   floor: bytes of the pairs' rows of K and V / bandwidth of the second-level cache; measured by
//   benchmarks/pairwise_cpu.py
#pragma once
#include "decode/decode.h"
#include "kernels.h"
#include "pairwise/keys.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct PairwiseScratch {
  DecodeScratch<T> rows;
  Chunk chunk;

  PairwiseScratch(const Call& call, Arena& arena) : rows(call, arena), chunk(call, rows.position.key, arena) {}
};

// One chunk: O, row_max and row_sum take in `count` keys.
template <class E, class T = typename E::Compute>
void add_chunk(const Item& item, int64_t count, bool first, int64_t rows, Logits<T> logits, PairwiseScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors;
  DecodeScratch<T>& own = s.rows;
  const Call& call = item.call;
  const Head k = item.keys(), v = item.values();
  const int64_t padded = round_up(count, L), ld = s.chunk.most, ld_key = own.width.key, ld_value = own.width.value;
  visit_keys<E>(k, s.chunk, padded, call.head_dim, ld_key, own.staging.keys, read_soon<E>(v, call.head_dim_v),
                [&](auto stored, auto keys) {
                  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                    multiply_keys<decltype(stored), decltype(some)::value>(keys, padded, own.query + row * ld_key,
                                                                           ld_key, own.scores + row * ld, ld);
                  });
                });
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t key = count; key < padded; ++key) own.scores[row * ld + key] = -kInfinity<T>;
  }
  weigh_rows(Mask{}, 1, padded, rows, logits, own.scores, ld, own.rows);
  visit_keys<E>(v, s.chunk, count, call.head_dim_v, ld_value, own.staging.values, {}, [&](auto stored, auto values) {
    in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
      in_blocks<W>(ld_value / L, [&](auto vectors, int64_t column) {
        multiply_values<decltype(stored), decltype(some)::value, decltype(vectors)::value>(
            values, column * L, count, own.scores + row * ld, ld, first ? nullptr : own.rows.rescale + row,
            own.output.row(row) + column * L, ld_value);
      });
    });
  });
}

// An item of the query heads [item.head, end) of a group.
template <class E> void pairwise(const Item& item, int64_t end, PairwiseScratch<typename E::Compute>& s) {
  constexpr int64_t L = kLanes<typename E::Compute>;
  list_positions(item.query_tile(), s.rows.position.query);
  decode_item<E>(item, end, 1, s.rows, [&](const Item& some, int64_t rows, auto logits) {
    bool first = true;
    each_chunk(some, s.chunk, L, [&](int64_t count) {
      add_chunk<E>(some, count, first, rows, logits, s);
      first = false;
    });
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
