// Work items of few query rows, as in decoding, where reading K and V once is all that should take time.
//
// Vectors hold features and keys instead of queries, so that one row keeps all lanes busy: S = Q K' by dot products
// along the features, softmax along the keys, O += P V by adding up multiples of V's rows. K and V are read in place, as
// they are stored. The query heads that share K and V go through a tile together, as rows of one matrix.
//
//   rows of S, P, O: head after head of the task, the cells of the query tile within
//   floor: bytes of K and V / memory bandwidth; measured by benchmarks/decode_cpu.py
#pragma once
#include "simd/element.h"
#include "simd/exp2.h"
#include "decode/products.h"
#include "forward/forward.h"
#include "kernels.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/scratch.h"
#include "softmax/softmax.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct FewScratch : Scratch<T> {
  T* query_rows;  // (ld_query, ld_key): Q, times the sign of the scale

  FewScratch(const Call& call, char* memory) : Scratch<T>(call, memory) {
    this->carve(memory, query_rows, this->ld_query * this->ld_key);
  }
};

// Marks the pairs of a row that are not allowed; the lanes' largest scores.
template <class T> Vec<T> mask_scores(const uint64_t* bits, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  Vec<T> largest = splat(-kInfinity<T>);
  BitsVec<T> lane;
  for (int i = 0; i < L; ++i) lane[i] = Word<T>(1) << i;
  for (int64_t key = 0; key < count; key += L) {
    Vec<T> score = load<Vec<T>>(scores + key);
    if (bits) {
      score = (splat_bits<T>(Word<T>(bits[key / 64] >> (key % 64))) & lane) != 0 ? score : splat(-kInfinity<T>);
      store(scores + key, score);
    }
    largest = larger(score, largest);
  }
  return largest;
}

// S becomes P, as in exponentiate(): a row's keys lie in lanes, but its statistics where move_origin() has them.
template <class T>
void few_weights(const Mask& mask, int64_t cells, int64_t rows, int64_t count, int64_t ld, T factor, Scratch<T>& s) {
  constexpr int L = kLanes<T>;
  const auto used = [&](int64_t first) { return rows - first < L ? rows - first : L; };
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> largest[L] = {};
    for (int64_t i = 0; i < used(first); ++i) {
      const uint64_t* bits = mask ? mask.bits + (first + i) % cells * mask.words : nullptr;
      largest[i] = mask_scores(bits, count, s.scores + (first + i) * ld);
    }
    store(s.tile_max + first, across<Larger, T>(largest));
  }
  move_origin<T>((rows + L - 1) / L, factor, s);
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> sum[L] = {};
    for (int64_t i = 0; i < used(first); ++i) {
      T* scores = s.scores + (first + i) * ld;
      const Vec<T> origin = splat(s.origin[first + i]);
      Vec<T> total = {};
      for (int64_t key = 0; key < count; key += L) {
        const Vec<T> weight = exp2<T>(exponent<T>(load<Vec<T>>(scores + key), origin, factor));
        store(scores + key, weight);
        total += weight;
      }
      sum[i] = total;
    }
    const Vec<T> before = load<Vec<T>>(s.row_sum + first) * load<Vec<T>>(s.rescale + first);
    store(s.row_sum + first, before + across<Add, T>(sum));
  }
}

// One entry of the list, for all rows: O, row_max and row_sum take in the keys of one tile.
template <class E, class T>
void take_few(const Call& call, const Component& component, int64_t entry, const Head& keys, const Head& values,
              int64_t cells, int64_t rows, bool first, bool more, T factor, FewScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors;
  const Plan& plan = call.plan;
  const Tile tile = locate(plan.views[component.key_view + plan.key_view[entry]], plan.indices[entry]);
  const int64_t count = round_up(tile.cells(), L), ld = plan.block_kv;
  const int64_t after = more ? entry + 1 : entry;
  const Tile next = locate(plan.views[component.key_view + plan.key_view[after]], plan.indices[after]);
  visit_rows<E>(keys, tile, next, count, call.head_dim, s.ld_key, s, s.keys, [&](auto stored, Rows k) {
    in_panels<kPanelRows<T>>(rows, [&](auto panel, int64_t row) {
      few_scores<decltype(stored), decltype(panel)::value>(k, count, s.query_rows + row * s.ld_key, s.ld_key,
                                                           s.scores + row * ld, ld);
      k.width = 0;  // prefetched
    });
  });
  few_weights(Mask(plan, entry), cells, rows, count, ld, factor, s);
  visit_rows<E>(values, tile, next, count, call.head_dim_v, s.ld_value, s, s.values, [&](auto stored, Rows v) {
    using Stored = decltype(stored);
    in_panels<kPanelRows<T>>(rows, [&](auto panel, int64_t row) {
      in_panels<W>(s.ld_value / L, [&](auto vectors, int64_t column) {
        few_output<Stored, decltype(panel)::value, decltype(vectors)::value>(
            v, column * L, count, s.scores + row * ld, ld, first ? nullptr : s.rescale + row,
            s.output + row * s.ld_value + column * L, s.ld_value);
        v.width = 0;
      });
    });
  });
}

// The part of the scratch that begins with row `first`.
template <class T> Scratch<T> rows_from(const Scratch<T>& s, int64_t first) {
  Scratch<T> part = s;
  part.row_max += first;
  part.origin += first;
  part.row_sum += first;
  part.output += first * s.ld_value;
  return part;
}

// The query heads [head, end) of a group.
template <class E, class T>
void few_heads(const Call& call, int64_t batch, int64_t head, int64_t end, const Work& item, int64_t cells,
               FewScratch<T>& s) {
  const Component& component = call.plan.components[item.component];
  const Head keys(call.k, batch, head / call.group), values(call.v, batch, head / call.group);
  const Scale<T> scale(call.scale);
  const int64_t rows = (end - head) * cells;
  for (int64_t h = head; h < end; ++h) {
    gather_queries<E>(Head(call.q, batch, h), 0, cells, cells, call.head_dim, s.ld_key, s.query_position,
                      s.query_rows + (h - head) * cells * s.ld_key);
  }
  for (int64_t i = 0; i < rows * s.ld_key; ++i) s.query_rows[i] *= scale.sign;
  reset_softmax((rows + kLanes<T> - 1) / kLanes<T>, s);
  leave_marked(call, batch, head, item, cells, s);  // the heads share keys and masks
  for (int64_t e = item.begin; e < item.end; ++e) {
    take_few<E>(call, component, e, keys, values, cells, rows, e == item.begin, e + 1 < item.end, scale.factor, s);
  }
  for (int64_t h = head; h < end; ++h) {
    Scratch<T> own = rows_from<T>(s, (h - head) * cells);
    finish_item<E>(call, batch, h, item, cells, scale, own.row_sum, own);
  }
}

// An item of the heads that a task takes together: this way up to kFew cells of a query tile, else as Many does it. The
// scratch of both lies apart, because Many may keep something there from item to item.
template <class E, class Many, int64_t kFew> struct ByRows {
  using T = typename E::Compute;

  static size_t many_bytes(const Call& call) { return size_t(round_up(int64_t(Many::bytes(call)), 64)); }

  static size_t bytes(const Call& call) noexcept {
    alignas(64) char none[1];
    return many_bytes(call) + FewScratch<T>(call, none).bytes;
  }

  static void forward(const Call& call, int64_t batch, int64_t head, const Work& item, char* scratch) noexcept {
    const int64_t end = head + call.together;
    const Tile tile = locate(call.plan.views[call.plan.components[item.component].query_view], item.query_tile);
    const int64_t cells = tile.cells();
    if (cells > kFew) {
      for (; head < end; ++head) Many::forward(call, batch, head, item, scratch);
      return;
    }
    FewScratch<T> s(call, scratch + many_bytes(call));
    list_positions(tile, s.query_position);
    for (const int64_t at_once = s.ld_query / cells; head < end; head += at_once) {
      few_heads<E>(call, batch, head, head + at_once < end ? head + at_once : end, item, cells, s);
    }
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
