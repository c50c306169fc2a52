// Key tiles of contiguous lines: K is read interleaved, V by rows, line by line.
#pragma once
#include "decode/interleaved.h"
#include "decode/products.h"
#include "decode/reach.h"
#include "kernels.h"
#include "simd/blocking.h"
#include "tile/tile.h"

namespace spattn {
namespace SPATTN_ISA {

// Vectors of scores per iteration: with kRowsAtOnce rows their accumulators fill the registers.
template <class T> constexpr int kScoreVectors = kOutputVectors / kFeaturesAbreast<T>;

// Runs of contiguous keys, one vector of interleaved keys each, except for the last run of a line.
template <class T> struct Runs {
  // Keys of a run; runs of a vector of scores.
  static constexpr int64_t kKeys = kKeysAbreast<T>, kAtOnce = kFeaturesAbreast<T>;

  int64_t most;           // capacity
  const T** keys;         // the first features of the first key of each
  const char** values;    // the first row of V of each
  int64_t* cell;          // cell of the first key of each, if apart
  int64_t value_step;     // bytes from row to row of V
  int64_t count, line;    // number of runs; keys of a line
  int64_t step, of_step;  // cells skipped as a unit, if apart, and their runs
  bool apart;             // whether runs are not contiguous in cell order

  Runs() = default;
  // The runs of several tiles.
  Runs(const Call& call, int64_t tiles, Arena& arena)
      : most(call.plan.block_kv + kAtOnce), keys(arena.array<const T*>(tiles * most)),
        values(arena.array<const char*>(tiles * most)), cell(arena.array<int64_t>(tiles * most)) {}

  Runs of_tile(int64_t tile) const {
    Runs own = *this;
    own.keys += tile * most, own.values += tile * most, own.cell += tile * most;
    return own;
  }

  // Whether the runs of a tile fill at least half of their lanes.
  static bool pay(const Tile& tile) { return tile.stride[2] == 1 && 2 * tile.box[2] >= round_up(tile.box[2], kKeys); }

  // Lists the runs of a tile in cell order, and copies of the last one up to a whole vector of scores. Scores of
  // padding are unspecified.
  template <class E>
  __attribute__((noinline)) void list(const Tile& tile, const KeyHead& head, const InterleavedKeys<T>& interleaved,
                                      const Call& call) {
    const auto finder = interleaved.template finder<E>(head, call);
    const T** key = keys;
    const char** value = values;
    const int64_t planes = tile.count[0], lines = tile.count[1], length = tile.count[2];
    line = length, value_step = interleaved.value_step(head);
    for (int64_t i = 0; i < planes; ++i) {
      int64_t start = tile.start + i * tile.stride[0];
      for (int64_t j = 0; j < lines; ++j, start += tile.stride[1]) {
        KeyPlace<T> at = finder.find(start);
        for (int64_t k = 0;;) {
          *key++ = at.keys, *value++ = at.values;
          if ((k += kKeys) >= length) break;
          at.keys += kKeys * kAtOnce, at.values += kKeys * value_step;
          if (uint64_t(start + k) % InterleavedKeys<T>::kKeys < kKeys) at = finder.find(start + k);  // the next block
        }
      }
    }
    count = key - keys;
    for (; (key - keys) % kAtOnce; ++key) *key = key[-1];
    const bool planes_apart = planes > 1 && tile.box[1] != lines;
    apart = planes_apart || (planes * lines > 1 && tile.box[2] != round_up(length, kKeys));
    step = planes_apart ? tile.cells() : apart ? tile.box[2] : 1;  // else a run: whole vectors have whole runs
    of_step = planes_apart ? count : of_line();
    if (apart) list_cells(tile);
  }

  // The runs of some cells, in multiples of `step`.
  Keys with(Keys cells) const {
    const bool by_steps = apart;  // dividing by a constant is cheaper
    const int64_t begin = by_steps ? cells.begin / step * of_step : cells.begin / kKeys;
    const int64_t end = by_steps ? (cells.end + step - 1) / step * of_step : (cells.end + kKeys - 1) / kKeys;
    return {begin, end < count ? end : count};
  }

  // The runs of the cells that rows attend to. Halves stay together where the unused lanes of a run overlap the first
  // cells of the next line, whose scores must be written later.
  Reach reached(const Reach& cells) const {
    const Keys every = with(cells.all);
    if (apart && line % kKeys) return {every, {every, every}};
    return {every, {with(cells.half[0]), with(cells.half[1])}};
  }

  // Calls visit(sum, key, row) for the keys and V rows of some runs, with alternating accumulators `sum`. If the halves
  // are staggered, visit_halves(key, row, key, row) first handles the keys of one half only, for both halves at once.
  template <class Visit, class VisitHalves>
  SPATTN_INLINE void each(const Reach& runs, const Visit& visit, const VisitHalves& visit_halves) const {
    if (line % kKeys) return each_run<false>(runs.all, visit);
    if (!runs.staggered()) return each_run<true>(runs.all, visit);
    const Keys lead = runs.lead();
    const int64_t later = runs.later(), step = value_step;
    for (int64_t run = lead.begin; run < lead.end; ++run) {
      const char *row = values[run], *later_row = values[run + later];
      const int64_t key = first_key(run), later_key = first_key(run + later);
      SPATTN_UNROLL
      for (int i = 0; i < kKeys; ++i, row += step, later_row += step) {
        visit_halves(key + i, row, later_key + i, later_row);
      }
    }
    each_run<true>(runs.common(), visit);
  }
  SPATTN_INLINE void prefetched() const {}
  static constexpr bool kHalves = true;

 private:
  int64_t first_key(int64_t run) const { return apart ? cell[run] : run * kKeys; }

  // each() for all rows. kWhole: all lines consist of whole runs.
  template <bool kWhole, class Visit> SPATTN_INLINE void each_run(Keys runs, const Visit& visit) const {
    const int64_t step = value_step;
    int64_t left = kWhole ? 0 : line - runs.begin % of_line() * kKeys;  // keys left of the line
    for (int64_t run = runs.begin; run < runs.end; ++run) {
      const char* row = values[run];
      int64_t key = first_key(run);
      if (kWhole || left >= kKeys) {
        SPATTN_UNROLL
        for (int i = 0; i < kKeys; i += 2) {
          visit(Count<0>{}, key + i, row);
          row += step;
          visit(Count<1>{}, key + i + 1, row);
          row += step;
        }
        left -= kKeys;
      } else {
        for (; left; --left, ++key, row += step) visit(Count<0>{}, key, row);
      }
      if (!kWhole && !left) left = line;
    }
  }

  int64_t of_line() const { return (line + kKeys - 1) / kKeys; }

  void list_cells(const Tile& tile) {
    int64_t listed = 0;
    for (int64_t i = 0; i < tile.count[0]; ++i) {
      for (int64_t j = 0; j < tile.count[1]; ++j) {
        const int64_t first = (i * tile.box[1] + j) * tile.box[2];
        for (int64_t k = 0; k < tile.count[2]; k += kKeys) cell[listed++] = first + k;
      }
    }
    for (; listed % kAtOnce; ++listed) cell[listed] = cell[listed - 1] + kKeys;
  }
};

// The query features that match those of a vector of interleaved keys.
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

// R rows of S for `count` groups of runs that fill N vectors, written to `scores`. With kApart each run goes to its
// cell, and the next one overwrites its unused lanes. With kHalves the second half of the rows uses the runs `later`
// further on. Prefetches the run `next` further on, and what shares its cache lines; 0: none.
template <int R, int N, bool kApart, bool kHalves, class T>
__attribute__((noinline)) void multiply_runs(const T* const* run, const int64_t* cell, int64_t count, int64_t later,
                                             int64_t next, const T* const* query, int64_t depth, T* scores,
                                             int64_t ld_scores) {
  constexpr int F = kFeaturesAbreast<T>, G = kKeysAbreast<T>, H = kHalves ? 2 : 1;
  constexpr int64_t kLd = InterleavedKeys<T>::kLd;
  const T* left_row[R];
  SPATTN_UNROLL
  for (int i = 0; i < R; ++i) left_row[i] = query[i];
  for (; count; --count, run += N * F) {
    Vec<T> sum[R][N][F] = {};
    const T* right_row[H][N * F];
    SPATTN_UNROLL
    for (int h = 0; h < H; ++h) {
      SPATTN_UNROLL
      for (int j = 0; j < N * F; ++j) right_row[h][j] = run[h * later + j];
    }
    const T* const soon = run[next];
    for (int64_t d = 0, at = 0; d < depth; d += F, at += kLd) {
      SPATTN_UNROLL
      for (int h = 0; h < H; ++h) {
        Vec<T> left[R / H];
        SPATTN_UNROLL
        for (int i = 0; i < R / H; ++i) left[i] = held(repeat_features<T>(left_row[h * R / H + i] + d));
        SPATTN_UNROLL
        for (int j = 0; j < N; ++j) {
          SPATTN_UNROLL
          for (int f = 0; f < F; ++f) {
            const Vec<T> right = held(load<Vec<T>>(right_row[h][j * F + f] + at));
            SPATTN_UNROLL
            for (int i = 0; i < R / H; ++i) sum[h * R / H + i][j][f] += left[i] * right;
          }
        }
      }
      if (next) __builtin_prefetch(soon + at);
    }
    SPATTN_UNROLL
    for (int j = 0; j < N; ++j) {
      SPATTN_UNROLL
      for (int i = 0; i < R; ++i) {
        const Vec<T> score = by_runs<T>(fold<Add, T, F / 2>(sum[i][j]), typename MakeLanes<kLanes<T>>::type{});
        const int64_t beyond = 2 * i >= R && kHalves ? later : 0;  // runs
        T* const to = scores + i * ld_scores;
        if constexpr (kApart) {
          T lanes[kLanes<T>];
          store(lanes, score);
          SPATTN_UNROLL
          for (int f = 0; f < F; ++f) memcpy(to + cell[beyond + j * F + f], lanes + f * G, G * sizeof(T));
        } else {
          store(to + beyond * G + j * kLanes<T>, score);
        }
      }
    }
    if (kApart) {
      cell += N * F;
    } else {
      scores += N * kLanes<T>;
    }
  }
}

// Work list of scores: blocks of rows, each with the runs of a tile that any of its rows attends to.
template <class T> class Meetings {
 public:
  // For up to `rows` rows with scores `ld` apart. Staggered rows have two entries.
  Meetings(int64_t rows, int64_t ld, Arena& arena) : ld_(ld), all_(arena.array<Meeting>(rows)) {}

  void clear() { count_ = most_ = 0; }

  // Adds the rows [begin, end) with the runs of one tile; `reached`, starting at row `begin`, has their ranges of
  // cells.
  void add(const Runs<T>& runs, int64_t begin, int64_t end, const Reach* reached) {
    in_blocks<kRowsAtOnce<T>>(
        end,
        [&](auto together, int64_t row) {
          constexpr int R = decltype(together)::value;
          const Reach own = runs.reached(reached[row - begin]).as([](Keys some) {
            return Keys{some.begin / kRuns, (some.end + kRuns - 1) / kRuns};  // vectors
          });
          if constexpr (R > 1) {
            if (own.staggered()) {
              add<R, true>(runs, row, own.lead(), own.later() * kRuns);
              return add<R, false>(runs, row, own.common(), 0);
            }
          }
          add<R, false>(runs, row, own.all, 0);
        },
        begin);
  }

  // Computes S of all entries, a few vectors of each per round: neighbouring boxes, and the rows of a box, use keys of
  // the same lines in the same round, which stay in the L1 cache.
  void score(const T* const* query, int64_t depth, T* scores) const {
    const int64_t bytes = kRuns * kLanes<T> * depth * int64_t(sizeof(T));  // of the keys of a vector
    const int64_t fit = kNear / bytes / kAtOnce * kAtOnce, round = fit > kAtOnce ? fit : kAtOnce;
    const bool ahead = 4 * bytes > kNear;  // else the next vectors are in the L1 cache already
    for (int64_t vector = 0; vector < most_; vector += round) {
      for (const Meeting* own = all_; own != all_ + count_; ++own) {
        const auto multiply = [&](Multiply* kernel, int64_t at, int64_t count, int64_t abreast) {
          const int64_t vectors = count * abreast;
          const int64_t next = ahead && at + 2 * vectors <= own->vectors.end ? vectors * kRuns : 0;
          kernel(own->keys + at * kRuns, own->cell + at * kRuns, count, own->later, next, query + own->row, depth,
                 scores + own->to + at * own->step, ld_);
        };
        const int64_t first = own->from(vector), count = own->from(vector + round) - first;
        const int64_t whole = count / kAtOnce * kAtOnce;
        if (whole > 0) multiply(own->some, first, whole / kAtOnce, kAtOnce);
        if (count > whole) multiply(own->one, first + whole, count - whole, 1);
      }
    }
  }

 private:
  static constexpr int64_t kRuns = Runs<T>::kAtOnce;  // of a vector
  static constexpr int kAtOnce = kScoreVectors<T>;
  static constexpr int64_t kNear = 8192;  // bytes of keys that stay in the L1 cache beside all else

  using Multiply = void(const T* const* keys, const int64_t* cell, int64_t count, int64_t later, int64_t next,
                        const T* const* query, int64_t depth, T* scores, int64_t ld_scores);
  struct Meeting {
    const T* const* keys;  // first vector of runs of the tile, as in `cell` and `to`, the output
    const int64_t* cell;
    int64_t later, row, to, step;  // step: from the scores of a vector to the next
    Keys vectors;                  // range that the rows attend to
    Multiply *some, *one;          // for kAtOnce vectors, and for one

    // The first vector in range from `vector` on, in steps of kAtOnce.
    int64_t from(int64_t vector) const {
      const int64_t begin = vectors.begin;
      const int64_t first = vector > begin ? begin + round_up(vector - begin, kAtOnce) : begin;
      return first < vectors.end ? first : vectors.end;
    }
  };

  // Adds R rows with a range of vectors of runs. With kHalves the second half of the rows uses the runs `later` further
  // on.
  template <int R, bool kHalves> void add(const Runs<T>& runs, int64_t row, Keys some, int64_t later) {
    const int64_t step = runs.apart ? 0 : kLanes<T>;
    const auto kernel = [&](auto abreast) -> Multiply* {
      constexpr int N = decltype(abreast)::value;
      return runs.apart ? multiply_runs<R, N, true, kHalves, T> : multiply_runs<R, N, false, kHalves, T>;
    };
    Multiply *const some_at_once = kernel(Count<kAtOnce>{}), *const one = kernel(Count<1>{});
    all_[count_++] = {runs.keys, runs.cell, later, row, row * ld_, step, some, some_at_once, one};
    most_ = some.end > most_ ? some.end : most_;
  }

  int64_t ld_, count_ = 0, most_ = 0;
  Meeting* all_;
};

}  // namespace SPATTN_ISA
}  // namespace spattn
