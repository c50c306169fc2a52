// Work items of few query rows, as in decoding, where reading K and V once is all that should take time.
//
// Vectors hold features and keys instead of queries, so that one row keeps all lanes busy: S = Q K' by dot products
// along the features, softmax along the keys, O += P V by adding up multiples of V's rows. K and V are read in place,
// as they are stored. The query heads that share K and V go through a tile together, as rows of one matrix.
//
//   rows of S, P, O: head after head of the task, the cells of the query tile within
//   floor: bytes of K and V / memory bandwidth; measured by benchmarks/decode_cpu.py
#pragma once
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "simd/element.h"
#include "simd/native.h"
#include "simd/reduce.h"
#include "softmax/softmax.h"
#include "tile/item.h"
#include "tile/mask.h"
#include "tile/operand.h"
#include "tile/scratch.h"

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct DecodeScratch {
  Widths<T> width;
  Positions position;
  RowStatistics<T> rows;
  ExactRowBuffer exact;
  KeyStaging<T> staging;
  T* query;   // (width.query, width.key): Q, times the sign of the scale
  T* scores;  // (width.query, block_kv): S, then the weights
  OutputBlock<T> output;

  DecodeScratch(const Call& call, Arena& arena)
      : width(call), position(call, arena), rows(width.query, arena), exact(width.query, call.head_dim_v, arena),
        staging(call, width, arena), query(arena.array<T>(width.query * width.key)),
        scores(arena.array<T>(width.query * call.plan.block_kv)), output(width.query, width.value, arena) {}
};

// How far to prefetch ahead, in bytes, where tiles follow each other: K and V together stay in a first-level cache.
constexpr int64_t kAhead = 8192;

// Rows of K or V in memory.
struct Rows {
  const char* data;
  int64_t stride;  // bytes
  int64_t ahead;   // bytes from a row to one that is read later, which the products prefetch meanwhile,
  int64_t width;   // this many bytes a row

  // In the order of addresses, as the processor's own prefetching likes it: the products themselves jump to and fro.
  SPATTN_INLINE void prefetch(int64_t first, int count) const {
    for (int i = 0; i < count; ++i) {
      const char* row = data + (first + i) * stride + ahead;
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(row + at);
    }
  }
};

// visit(element type, rows) of the keys of a tile, `count` of them: in place, or else a copy of `ld` values a row.
template <class E, class Visit>
SPATTN_INLINE void visit_rows(const Head& head, const Tile& tile, const Tile& next, int64_t count, int64_t width,
                              int64_t ld, int64_t* position, typename E::Compute* copy, Visit visit) {
  if (tile.even() && tile.cells() == count && width == ld && head.feature == int64_t(sizeof(typename E::Storage))) {
    const int64_t stride = tile.stride[2] * head.position, onwards = (next.start - tile.start) * head.position;
    const int64_t ahead = onwards == count * stride && onwards > kAhead ? kAhead : onwards;
    visit(E{}, Rows{head.data + tile.start * head.position, stride, ahead,
                    ahead && next.even() ? width * int64_t(sizeof(typename E::Storage)) : 0});
  } else {
    gather_rows<E>(head, tile, count, width, ld, position, copy);
    visit(Native<typename E::Compute>{}, Rows{reinterpret_cast<char*>(copy), ld * int64_t(sizeof *copy), 0, 0});
  }
}

// How many rows are computed at once: their accumulators, for several keys or features, fill the registers.
template <int N> struct Count {
  static constexpr int value = N;
};
template <class T> constexpr int kRowsAtOnce = kLanes<T> < 4 ? kLanes<T> : 4;

// run(Count<R>, first) for blocks of R rows, then for what is left in halves of R.
template <int R, class Run> SPATTN_INLINE void in_blocks(int64_t rows, Run run, int64_t first = 0) {
  for (; rows - first >= R; first += R) run(Count<R>{}, first);
  if constexpr (R > 1) in_blocks<R / 2>(rows, run, first);
}

// R rows of S for `count` keys, a multiple of kLanes. A vector's worth of dot products is finished together.
template <class Stored, int R, class T>
void multiply_keys(const Rows& keys, int64_t count, const T* query, int64_t depth, T* scores, int64_t ld_scores) {
  constexpr int L = kLanes<T>, kKeys = L / R, kAtOnce = kKeys < 4 ? kKeys : 4;
  constexpr int64_t kSize = sizeof(typename Stored::Storage);
  for (int64_t key = 0; key < count; key += kKeys) {
    const char* row = keys.data + key * keys.stride;
    Vec<T> sum[L] = {};
    SPATTN_UNROLL
    for (int first = 0; first < kKeys; first += kAtOnce) {
      keys.prefetch(key + first, kAtOnce);
      for (int64_t d = 0; d < depth; d += L) {
        Vec<T> left[R];
        SPATTN_UNROLL
        for (int i = 0; i < R; ++i) left[i] = load<Vec<T>>(query + i * depth + d);
        SPATTN_UNROLL
        for (int j = first; j < first + kAtOnce; ++j) {
          const Vec<T> right = load_elements<Stored>(row + j * keys.stride + d * kSize);
          SPATTN_UNROLL
          for (int i = 0; i < R; ++i) sum[i * kKeys + j] += left[i] * right;
        }
      }
    }
    const Vec<T> total = Logits<T>::score(across<Add, T>(sum));
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      memcpy(scores + i * ld_scores + key, reinterpret_cast<const char*>(&total) + i * kKeys * sizeof(T),
             kKeys * sizeof(T));
    }
  }
}

// N vectors of R rows of O, from `column` of V on: O = rescale * O + P V, or P V for the first tile of an item.
template <class Stored, int R, int N, class T>
void multiply_values(const Rows& values, int64_t column, int64_t keys, const T* weights, int64_t ld_weight,
                     const T* rescale, T* output, int64_t ld) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][N] = {};
  for (int64_t key = 0; key < keys; ++key) {
    const char* row = values.data + key * values.stride + column * int64_t(sizeof(typename Stored::Storage));
    values.prefetch(key, 1);
    Vec<T> right[N];
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      const char* at = row + j * L * int(sizeof(typename Stored::Storage));
      right[j] = load_elements<Stored>(at);
    }
    SPATTN_UNROLL
    for (int i = 0; i < R; ++i) {
      const Vec<T> left = splat(weights[i * ld_weight + key]);
      SPATTN_UNROLL
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) {
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      T* out = output + i * ld + j * L;
      if (rescale) sum[i][j] += load<Vec<T>>(out) * rescale[i];
      store(out, sum[i][j]);
    }
  }
}

// Marks the pairs of a row that are not allowed; the lanes' largest scores.
template <class T> Vec<T> mask_scores(const uint64_t* bits, int64_t count, T* scores) {
  constexpr int L = kLanes<T>;
  Vec<T> largest = splat(-kInfinity<T>);
  BitsVec<T> lane;
  for (int i = 0; i < L; ++i) lane[i] = Word<T>(1) << i;
  for (int64_t key = 0; key < count; key += L) {
    Vec<T> score = load<Vec<T>>(scores + key);
    if (bits) {
      score = Logits<T>::masked(score, splat_bits<T>(Word<T>(bits[key / 64] >> (key % 64))) & lane);
      store(scores + key, score);
    }
    largest = larger(score, largest);
  }
  return largest;
}

// S becomes P, as in exponentiate(): a row's keys lie in lanes, but its statistics where move_reference() has them.
template <class T>
void weigh_rows(const Mask& mask, int64_t cells, int64_t count, int64_t rows, int64_t ld, Logits<T> logits,
                DecodeScratch<T>& s) {
  constexpr int L = kLanes<T>;
  const auto used = [&](int64_t first) { return rows - first < L ? rows - first : L; };
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> largest[L] = {};
    for (int64_t i = 0; i < used(first); ++i) {
      const uint64_t* bits = mask ? mask.bits + (first + i) % cells * mask.words : nullptr;
      largest[i] = mask_scores(bits, count, s.scores + (first + i) * ld);
    }
    store(s.rows.tile_max + first, across<Larger, T>(largest));
  }
  s.rows.move_reference((rows + L - 1) / L, logits);
  for (int64_t first = 0; first < rows; first += L) {
    Vec<T> sum[L] = {};
    for (int64_t i = 0; i < used(first); ++i) {
      T* scores = s.scores + (first + i) * ld;
      const Vec<T> reference = splat(s.rows.reference[first + i]);
      Vec<T> total = {};
      for (int64_t key = 0; key < count; key += L) {
        store(scores + key, weigh<T>(logits.exponent(load<Vec<T>>(scores + key), reference), total));
      }
      sum[i] = total;
    }
    const Vec<T> before = load<Vec<T>>(s.rows.row_sum + first) * load<Vec<T>>(s.rows.rescale + first);
    store(s.rows.row_sum + first, before + across<Add, T>(sum));
  }
}

// One tile of the list, for all rows: O, row_max and row_sum take in the keys of one tile.
template <class E, class T = typename E::Compute>
void add_tile(const Item& item, const Listed& at, const Head& keys, const Head& values, int64_t cells, int64_t rows,
              Logits<T> logits, DecodeScratch<T>& s) {
  constexpr int64_t L = kLanes<T>, W = kOutputVectors;
  const Call& call = item.call;
  const Tile tile = item.key_tile(at), next = at.number + 1 < item.work.end ? item.key_tile(item.after(at)) : tile;
  const int64_t count = round_up(tile.cells(), L), ld = call.plan.block_kv;
  const int64_t ld_key = s.width.key, ld_value = s.width.value;
  visit_rows<E>(keys, tile, next, count, call.head_dim, ld_key, s.position.key, s.staging.keys,
                [&](auto stored, Rows k) {
                  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                    multiply_keys<decltype(stored), decltype(some)::value>(k, count, s.query + row * ld_key, ld_key,
                                                                           s.scores + row * ld, ld);
                    k.width = 0;  // prefetched
                  });
                });
  weigh_rows(item.mask(at), cells, count, rows, ld, logits, s);
  visit_rows<E>(values, tile, next, count, call.head_dim_v, ld_value, s.position.key, s.staging.values,
                [&](auto stored, Rows v) {
                  in_blocks<kRowsAtOnce<T>>(rows, [&](auto some, int64_t row) {
                    in_blocks<W>(ld_value / L, [&](auto vectors, int64_t column) {
                      multiply_values<decltype(stored), decltype(some)::value, decltype(vectors)::value>(
                          v, column * L, count, s.scores + row * ld, ld,
                          at.number == item.work.begin ? nullptr : s.rows.rescale + row, s.output.row(row) + column * L,
                          ld_value);
                      v.width = 0;
                    });
                  });
                });
}

// As many heads of an item, up to `end`, as there are rows for.
template <class E, class T = typename E::Compute>
void decode_heads(const Item& item, int64_t end, int64_t cells, DecodeScratch<T>& s) {
  const Call& call = item.call;
  const Head keys = item.keys(), values = item.values();
  const Logits<T> logits(call.scale);
  const int64_t rows = (end - item.head) * cells;
  for (int64_t row = 0; row < rows; row += cells) {
    gather_queries<E>(Head(call.q, item.batch, item.head + row / cells), 0, cells, cells, call.head_dim, s.width.key,
                      s.position.query, s.query + row * s.width.key);
  }
  for (int64_t i = 0; i < rows * s.width.key; ++i) s.query[i] *= logits.sign;
  s.rows.reset((rows + kLanes<T> - 1) / kLanes<T>);
  leave_marked(item, cells, s.position.key, s.exact);  // the heads share keys and masks
  for (Listed at = item.first(); at.number < item.work.end; at = item.after(at)) {
    add_tile<E>(item, at, keys, values, cells, rows, logits, s);
  }
  for (int64_t row = 0; row < rows; row += cells) {
    const RowStatistics<T> own = s.rows.from(row);
    finish_item<E>({call, item.batch, item.head + row / cells, item.work}, cells, logits, own.row_sum, s.position, own,
                   s.output.from(row), s.exact);
  }
}

// An item of the query heads [item.head, end) of a group.
template <class E> void decode(const Item& item, int64_t end, DecodeScratch<typename E::Compute>& s) {
  const int64_t cells = list_positions(item.query_tile(), s.position.query), at_once = s.width.query / cells;
  for (int64_t head = item.head; head < end; head += at_once) {
    decode_heads<E>({item.call, item.batch, head, item.work}, head + at_once < end ? head + at_once : end, cells, s);
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
