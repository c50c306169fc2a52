// Pairwise forward of work items with one-query tiles, for patterns too sparse for blocks of pairs.
//
// As in decoding, vectors run along features and keys, and the query heads of a group are rows of one matrix. A tile is
// only a list of keys: a chunk holds the keys of several tiles, and the products gather their rows of K and V. Only
// allowed pairs are computed, except for padding of a chunk's last vector.
//
//   floor: bytes of the pairs' rows of K and V / L2 bandwidth; measured by benchmarks/kernels/pairwise_cpu.py
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

// Adds a chunk of `count` keys to O, row_max and row_sum.
template <class E, class T = typename E::Compute>
void add_chunk(const Item& item, int64_t count, bool first, int64_t rows, Logits<T> logits, PairwiseScratch<T>& s) {
  DecodeScratch<T>& own = s.rows;
  const Call& call = item.call;
  const Head k = item.keys(), v = item.values();
  const int64_t* const position = s.chunk.position;
  const auto visit_keys = [&](const auto& visit) {
    visit_positions<E>(k, position, round_up(count, kLanes<T>), call.head_dim, own.width.key, own.staging.keys,
                       read_soon<E>(k, position + kSoon, call.head_dim), visit);
  };
  const auto visit_values = [&](const auto& visit) {
    visit_positions<E>(v, position, count, call.head_dim_v, own.width.value, own.staging.values,
                       read_soon<E>(v, position + kSoon, call.head_dim_v), visit);
  };
  find_reached<T>({}, 1, count, rows, own.reached);
  score_rows(item, visit_keys, position, round_up(count, kLanes<T>), 1, rows, own);
  add_scores(visit_values, count, first, Mask{}, 1, rows, logits, own);
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
