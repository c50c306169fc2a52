// Pairwise forward of work items with one-query tiles, for patterns too sparse for blocks of pairs.
//
// As in the decode kernel, lanes hold features or keys, and the query heads of a group are rows of one matrix. A chunk
// holds the allowed keys of several tiles, and the products gather their rows of K and V. Except for the padding of a
// chunk to the vector length, the kernel computes only allowed pairs.
//
//   lower bound: bytes of K and V per pair / L2 bandwidth; measured by benchmarks/kernels/pairwise_cpu.py
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

// Computes an item for the query heads [item.head, end) of a group.
template <class E> void pairwise(const Item& item, int64_t end, PairwiseScratch<typename E::Compute>& s) {
  constexpr int64_t L = kLanes<typename E::Compute>;
  list_positions(item.query_tile(), s.rows.position.query);
  decode_item<E>(item, end, 1, s.rows, [&](const Item& some, int64_t rows, auto logits) {
    bool first = true;
    each_chunk(some, s.chunk, L, [&](int64_t count) {
      add_keys<E>(some, s.chunk.position, count, nullptr, nullptr, first, Mask{}, 1, rows, logits, s.rows);
      first = false;
    });
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
