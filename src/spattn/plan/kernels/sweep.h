// Tiles of bands: consecutive queries that have the same runs of keys, and ranges of distances from query to key.
//
// A clause allows a pair whose key lies in a run of the query's band, or whose distance lies in a range; a pair is
// allowed by all clauses. Query tile by query tile, the key tiles at which a run or a range begins are marked in a bitmap.
// From a marked tile on all tiles are alike up to the next one, or to where a run or a range ends, unless a key or a
// diagonal divides them: the sweep looks at few others. What a divided tile depends on, its shape, is a few words: tiles
// of one shape have one bitmap, which is written once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "marks.h"
#include "numbers.h"

namespace spattn {

// What a clause is made of: see spattn/patterns/_bands.py.
struct ClauseArrays {
  const int64_t* start;
  const int64_t* indptr;
  const int64_t* first;
  const int64_t* stop;
  const int64_t* near;
  int64_t bands, ranges;
};

// Consecutive positions in tiles.
struct Side {
  int64_t offset, cells, block;
  int64_t tiles() const { return (cells + block - 1) / block; }
};

// [first, stop) of keys, or of distances, counted from the first query and key.
struct Interval {
  int64_t first, stop;
};

// Sorts intervals; those that meet become one. Returns how many are left.
inline int64_t join_intervals(Interval* intervals, int64_t count) {
  const auto before = [](const Interval& a, const Interval& b) { return a.first < b.first; };
  if (!std::is_sorted(intervals, intervals + count, before)) std::sort(intervals, intervals + count, before);
  int64_t kept = 0;
  for (int64_t n = 0; n < count; ++n) {
    if (kept && intervals[n].first <= intervals[kept - 1].stop) {
      intervals[kept - 1].stop = std::max(intervals[kept - 1].stop, intervals[n].stop);
    } else {
      intervals[kept++] = intervals[n];
    }
  }
  return kept;
}

__attribute__((always_inline)) inline int64_t pairs_plain(const uint64_t* words, int64_t count) {
  int64_t pairs = 0;
  for (int64_t n = 0; n < count; ++n) pairs += __builtin_popcountll(words[n]);
  return pairs;
}

#if defined(__x86_64__)
__attribute__((target("popcnt"))) inline int64_t pairs_popcnt(const uint64_t* words, int64_t count) {
  return pairs_plain(words, count);
}
inline int64_t count_pairs(const uint64_t* words, int64_t count) {
  return __builtin_cpu_supports("popcnt") ? pairs_popcnt(words, count) : pairs_plain(words, count);
}
#else
inline int64_t count_pairs(const uint64_t* words, int64_t count) { return pairs_plain(words, count); }
#endif

// Sets the bits [first, stop), cut to those that there are.
inline void set_bits(uint64_t* words, int64_t count, int64_t first, int64_t stop) {
  first = std::max<int64_t>(first, 0), stop = std::min(stop, 64 * count);
  for (int64_t word = first / 64; 64 * word < stop; ++word) {
    const int64_t low = std::max<int64_t>(first - 64 * word, 0), high = std::min<int64_t>(stop - 64 * word, 64);
    words[word] |= (~uint64_t{0} >> (64 - (high - low))) << low;
  }
}

// The shapes that tiles have, each once, by number. The first word of a shape says how many it has.
class Shapes {
 public:
  int32_t number(const uint64_t* shape, size_t count) {
    uint64_t hash = 0;
    while (factors_.size() < count) factors_.push_back(factors_.empty() ? kFactor : kFactor * factors_.back());
    for (size_t n = 0; n < count; ++n) hash += shape[n] * factors_[n];
    hash = (hash ^ hash >> 32) * kFactor, hash ^= hash >> 32;
    const int32_t number = numbers_.number(hash, [&](int32_t known) {
      // A loop, because a call takes longer to compare so few words.
      const uint64_t* own = words(known);
      size_t same = 0;
      while (same < count && own[same] == shape[same]) ++same;
      return same == count;
    });
    if (number == size()) {
      words_.insert(words_.end(), shape, shape + count);
      ends_.push_back(words_.size());
    }
    return number;
  }
  // Where a shape begins, and the one before it ends.
  const uint64_t* words(int64_t number) const { return words_.data() + ends_[number]; }
  int64_t size() const { return int64_t(ends_.size()) - 1; }

 private:
  static constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u;  // odd, as its powers are

  HashedNumbers numbers_;
  std::vector<uint64_t> words_, factors_;
  std::vector<size_t> ends_{0};
};

struct TileRun {
  int32_t key_tile, length, mask;
};

constexpr int32_t kFullTile = -1, kEmptyTile = -2;

class Sweep {
 public:
  Sweep(const Side& queries, const Side& keys, const std::vector<ClauseArrays>& clauses)
      : queries_(queries), keys_(keys), words_(keys.block / 64), key_tiles_(keys.tiles()),
        shift_(keys.block & (keys.block - 1) ? -1 : __builtin_ctzll(keys.block)), marks_(key_tiles_) {
    for (const ClauseArrays& arrays : clauses) clauses_.emplace_back(arrays, queries, keys);
  }

  // Finds the runs of all query tiles, their masks being numbers of shapes, unless they are more than `most`.
  void run(int64_t most) {
    for (int64_t tile = 0; tile < queries_.tiles(); ++tile) {
      words_ == 1 ? sweep<true>(tile) : sweep<false>(tile);
      ends_.push_back(runs_.size());
      if (rows_ == queries_.block) whole_shapes_ = shapes_.size();
      if (int64_t(runs_.size()) > most) return;
    }
    pairs_.assign(shapes_.size(), 0);
  }

  int64_t shapes() const { return shapes_.size(); }
  // How many of them, the first ones, are of query tiles without padding.
  int64_t whole_shapes() const { return whole_shapes_; }
  int64_t runs() const { return int64_t(runs_.size()); }

  // Writes the bitmasks of the shapes [begin, end), and of each kFullTile, kEmptyTile or 0 where it is neither.
  void write_masks(int64_t begin, int64_t end, uint64_t* masks, int32_t* kinds) {
    const int64_t size = queries_.block * words_;
    for (int64_t shape = begin; shape < end; ++shape, masks += size) {
      const int64_t rows = write_mask(shapes_.words(shape), shapes_.words(shape + 1), masks);
      const int64_t pairs = count_pairs(masks, rows * words_);
      pairs_[shape] = pairs;
      *kinds++ = pairs == rows * keys_.block ? kFullTile : pairs ? 0 : kEmptyTile;
    }
  }

  // Writes query tile, key tile, length and bitmask of each run, `numbers` being the bitmasks of the shapes, and the
  // allowed pairs. Returns how many runs there are.
  int64_t settle(const int32_t* numbers, int32_t* query_tile, int32_t* key_tile, int32_t* length, int32_t* mask,
                 int64_t* pairs) const {
    int64_t kept = 0, found = 0;
    for (size_t tile = 0; tile + 1 < ends_.size(); ++tile) {
      const int64_t first = kept, full = real_rows(int64_t(tile)) * keys_.block;
      for (size_t n = ends_[tile]; n < ends_[tile + 1]; ++n) {
        const TileRun& own = runs_[n];
        const int32_t number = own.mask < 0 ? kFullTile : numbers[own.mask];
        if (number == kEmptyTile) continue;
        found += own.length * (number == kFullTile ? full : pairs_[own.mask]);
        if (kept > first && mask[kept - 1] == number && key_tile[kept - 1] + length[kept - 1] == own.key_tile) {
          length[kept - 1] += own.length;
        } else {
          query_tile[kept] = int32_t(tile), key_tile[kept] = own.key_tile;
          length[kept] = own.length, mask[kept++] = number;
        }
      }
    }
    *pairs = found;
    return kept;
  }

 private:
  // Rows of a query tile that have one band, from `row` on, and the first of its runs that ends behind the tile at
  // hand. Behind the last run of a band stands kNever.
  struct Rows {
    int64_t row;
    const Interval* run;
  };
  static constexpr Interval kNever{INT64_MAX, INT64_MAX};

  // A clause with sorted intervals, all counted from the first query and the first key; and where the sweep is in it.
  struct Clause {
    Clause(const ClauseArrays& arrays, const Side& queries, const Side& keys) {
      starts.reserve(arrays.bands + 1), ends.reserve(arrays.bands + 1), ends.push_back(0);
      runs.resize(arrays.indptr[arrays.bands] + arrays.bands);
      Interval* at = runs.data();
      for (int64_t band = 0; band < arrays.bands; ++band) {
        Interval* const begin = at;
        bool sorted = true;
        for (int64_t n = arrays.indptr[band], last = -1; n < arrays.indptr[band + 1]; ++n) {
          const int64_t first = std::max<int64_t>(arrays.first[n] - keys.offset, 0);
          const int64_t stop = std::min(arrays.stop[n] - keys.offset, keys.cells);
          if (first >= stop) continue;
          sorted &= first > last, last = stop;
          *at++ = {first, stop};
        }
        if (!sorted) at = begin + join_intervals(begin, at - begin);
        *at++ = kNever;
        starts.push_back(arrays.start[band] - queries.offset);
        ends.push_back(at - runs.data());
      }
      starts.push_back(arrays.bands ? arrays.start[arrays.bands] - queries.offset : 0);
      const int64_t apart = queries.offset - keys.offset;
      for (int64_t n = 0; n < arrays.ranges; ++n) {
        const int64_t first = std::max(arrays.near[2 * n] - apart, -keys.cells);
        const int64_t stop = std::min(arrays.near[2 * n + 1] - apart, queries.cells + queries.block);
        if (first < stop) ranges.push_back({first, stop});
      }
      ranges.resize(join_intervals(ranges.data(), ranges.size()));
    }

    std::vector<int64_t> starts;
    std::vector<size_t> ends;
    std::vector<Interval> runs, ranges;
    size_t band = 0;           // the first one that ends behind the first row of the query tile
    int64_t low = 0, top = 0;  // ranges [low, top) have a key that some row of the query tile is so far from
    int64_t range = 0;         // the last one that reaches the key tile at hand, or one behind it
    std::vector<Rows> rows;
  };

  int64_t real_rows(int64_t tile) const { return std::min(queries_.block, queries_.cells - tile * queries_.block); }
  int64_t tile_of(int64_t key) const { return shift_ < 0 ? key / keys_.block : key >> shift_; }

  template <bool kOneWord>
  void sweep(int64_t tile) {
    row_ = tile * queries_.block, rows_ = real_rows(tile);
    size_t most = 1;  // words of a shape
    for (Clause& clause : clauses_) {
      begin(clause);
      most += 2 + clause.rows.size() * (1 + words_);
    }
    if (shape_.size() < most) shape_.resize(most);
    if (keys_.cells % keys_.block) marks_.set(key_tiles_ - 1);
    const size_t first = runs_.size();
    for (int64_t at = marks_.next(0); at < key_tiles_;) {
      const Visit visit = look_at<kOneWord>(at);
      const int64_t mark = marks_.next(at + 1);
      const int64_t after = std::max(std::min(mark, visit.stop), at + 1);  // what ends within the last tile ends there
      if (visit.mask == kEmptyTile) {
        at = mark;
        continue;
      }
      TileRun* last = runs_.size() > first ? &runs_.back() : nullptr;
      if (last && last->mask == visit.mask && last->key_tile + last->length == at) {
        last->length += int32_t(after - at);
      } else {
        runs_.push_back({int32_t(at), int32_t(after - at), visit.mask});
      }
      at = visit.over ? mark : after;
    }
    marks_.clear();
  }

  // Goes to the query tile at hand: finds its bands, and marks where tiles begin to differ.
  void begin(Clause& clause) {
    clause.rows.clear();
    const size_t bands = clause.starts.size() - 1;
    while (clause.band < bands && clause.starts[clause.band + 1] <= row_) ++clause.band;
    int64_t row = row_;
    for (size_t band = clause.band; band < bands && clause.starts[band] < row_ + rows_; ++band) {
      if (clause.starts[band + 1] <= row) continue;
      if (clause.starts[band] > row) clause.rows.push_back({row - row_, &kNever});
      row = std::max(row, clause.starts[band]);
      const Interval* run = clause.runs.data() + clause.ends[band];
      clause.rows.push_back({row - row_, run});
      row = clause.starts[band + 1];
      for (; run->first < keys_.cells; ++run) {
        marks_.set(tile_of(run->first));
      }
    }
    if (bands && row < row_ + rows_) clause.rows.push_back({row - row_, &kNever});
    const int64_t ranges = int64_t(clause.ranges.size());
    while (clause.low < ranges && clause.ranges[clause.low].stop <= row_ - keys_.cells + 1) ++clause.low;
    while (clause.top < ranges && clause.ranges[clause.top].first < row_ + rows_) ++clause.top;
    clause.range = clause.top - 1;
    for (int64_t n = clause.low; n < clause.top; ++n) {
      marks_.set(tile_of(std::max<int64_t>(row_ - clause.ranges[n].stop + 1, 0)));
    }
  }

  // What a tile is: kFullTile, kEmptyTile, or the number of its shape. Up to `stop`, or the next mark, all tiles are
  // like it; `over` where those behind are empty up to that mark.
  struct Visit {
    int32_t mask;
    bool over;
    int64_t stop;
  };

  // A shape has a word for how many it has and for the rows and keys that are no padding, and for each clause that
  // divides it: its number and a count, the distance of the first query from the first key where that matters, and so
  // many times a row with the keys that the rows from there on have in the clause's bands.
  template <bool kOneWord>
  Visit look_at(int64_t tile) {
    const int64_t first = tile * keys_.block, stop = std::min(first + keys_.block, keys_.cells);
    const int64_t nearest = row_ - stop + 1, farthest = row_ + rows_ - 1 - first;
    const bool padded = stop - first < keys_.block;
    Visit found{kEmptyTile, false, key_tiles_};
    uint64_t* at = shape_.data() + 1;
    for (size_t n = 0; n < clauses_.size(); ++n) {
      Clause& clause = clauses_[n];
      while (clause.range >= clause.low && clause.ranges[clause.range].first > farthest) --clause.range;
      const Interval* range = clause.range >= clause.low ? &clause.ranges[clause.range] : nullptr;
      const bool diagonal = range && range->stop > nearest;
      if (diagonal && range->first <= nearest && range->stop > farthest) {
        const int64_t end = tile_of(row_ - range->first + 1);  // a key there is nearer to a row than the range
        if (end < found.stop) found.stop = end, found.over = false;
        continue;
      }
      const RowsOfTile rows = add_rows<kOneWord>(clause, first, stop, at + 2);
      if (!rows.some && !diagonal) return {kEmptyTile, false, key_tiles_};
      if (rows.all) {
        const int64_t end = tile_of(rows.first_end);
        if (end < found.stop) found.stop = end, found.over = !diagonal && rows.last_end == end * keys_.block;
        continue;
      }
      const int64_t end = diagonal || rows.divided ? tile + 1 : tile_of(rows.first_end);
      if (end < found.stop) {
        found.stop = end, found.over = !diagonal && !rows.divided && rows.last_end == end * keys_.block;
      }
      uint64_t* const after = rows.some ? rows.after : at + 2;
      at[0] = n << 32 | uint64_t(after - at - 2) / (1 + words_);
      at[1] = diagonal ? uint64_t(row_ - first) : kNoDiagonal;
      at = after;
    }
    const size_t count = at - shape_.data();
    shape_[0] = uint64_t(count) << 32 | uint64_t(rows_) << 1 | padded;
    found.mask = count == 1 && !padded ? kFullTile : shapes_.number(shape_.data(), count);
    return found;
  }

  // Which keys of a tile the bands of a clause have: some row some, every row all; `divided` where a row has a part of
  // them. Runs of all of them end between `first_end` and `last_end`. What is written of it ends at `after`.
  struct RowsOfTile {
    bool some = false, all, divided = false;
    int64_t first_end = INT64_MAX, last_end = 0;
    uint64_t* after;
  };

  template <bool kOneWord>
  RowsOfTile add_rows(Clause& clause, int64_t first, int64_t stop, uint64_t* at) const {
    const int64_t count = kOneWord ? 1 : words_;
    RowsOfTile found;
    found.all = !clause.rows.empty();
    uint64_t* last = nullptr;
    for (Rows& rows : clause.rows) {
      const Interval* run = rows.run;
      while (run->stop <= first) ++run;
      rows.run = run;
      const bool any = run->first < stop, whole = run->first <= first && run->stop >= stop;
      found.some |= any, found.all &= whole, found.divided |= any & !whole;
      if (whole)
        found.first_end = std::min(found.first_end, run->stop), found.last_end = std::max(found.last_end, run->stop);
      uint64_t* const words = at + 1;
      std::fill_n(words, count, -uint64_t{whole});
      if (any & !whole) {
        for (; run->first < stop; ++run) set_bits(words, count, run->first - first, run->stop - first);
      }
      if (!last || !std::equal(words, words + count, last)) {
        *at = uint64_t(rows.row);
        last = words, at = words + count;
      }
    }
    found.after = at;
    return found;
  }

  // Writes one bitmask; returns its rows that are not padding. Those that are go on as the rows before them.
  int64_t write_mask(const uint64_t* shape, const uint64_t* end, uint64_t* mask) {
    const int64_t block = queries_.block, rows = uint32_t(*shape) >> 1;
    const bool padded = *shape++ & 1;
    bool written = false;
    for (; shape < end; written = true) {
      const Clause& clause = clauses_[*shape >> 32];
      const int64_t count = uint32_t(shape[0]);
      const bool diagonal = shape[1] != kNoDiagonal;
      if (diagonal) write_diagonals(clause, int64_t(shape[1]));
      shape += 2;
      for (int64_t n = 0; n < std::max<int64_t>(count, 1); ++n) {
        const int64_t row = count ? int64_t(shape[0]) : 0;
        const int64_t stop = n + 1 < count ? int64_t(shape[1 + words_]) : block;
        for (int64_t word = 0; word < words_; ++word) {
          const uint64_t keys = count ? shape[1 + word] : 0;
          write_rows(mask + word, row, stop, keys, diagonal ? 64 * word : -1, written);
        }
        if (count) shape += 1 + words_;
      }
    }
    if (!written) std::fill_n(mask, block * words_, ~uint64_t{0});
    if (padded) {
      std::vector<uint64_t> keys(words_, 0);
      set_bits(keys.data(), words_, 0, keys_.cells % keys_.block);
      for (int64_t n = 0; n < block * words_; ++n) mask[n] &= keys[n % words_];
    }
    return rows;
  }

  // Writes a word of some rows: `keys`, and those on diagonals where `first` is the first key of the word, not -1; of
  // a bitmask that is `written` it leaves no other keys.
  void write_rows(uint64_t* mask, int64_t row, int64_t stop, uint64_t keys, int64_t first, bool written) const {
    uint64_t near = 0;
    int64_t at = queries_.block - 1 - row + first;  // of the distance from the row to the first key
    if (first >= 0) near = diagonals_[at / 64] >> at % 64 | (diagonals_[at / 64 + 1] << 1) << (63 - at % 64);
    for (uint64_t* word = mask + row * words_; row < stop; ++row, word += words_) {
      *word = (near | keys) & (written ? *word : ~uint64_t{0});
      if (first >= 0 && --at >= 0) near = near << 1 | (diagonals_[at / 64] >> at % 64 & 1);
    }
  }

  // Bit n says of the distance `apart` + block_q - 1 - n whether it is in a range of the clause.
  void write_diagonals(const Clause& clause, int64_t apart) {
    const int64_t most = apart + queries_.block - 1, count = (queries_.block + keys_.block) / 64 + 2;
    diagonals_.assign(count, 0);
    auto range = std::upper_bound(clause.ranges.begin(), clause.ranges.end(), most,
                                  [](int64_t distance, const Interval& own) { return distance < own.first; });
    while (range != clause.ranges.begin() && (--range)->stop > apart - keys_.block) {
      set_bits(diagonals_.data(), count, most - range->stop + 1, most - range->first + 1);
    }
  }

  static constexpr uint64_t kNoDiagonal = uint64_t{1} << 63;

  Side queries_, keys_;
  int64_t words_, key_tiles_;
  int shift_;
  Marks marks_;
  std::vector<Clause> clauses_;
  int64_t row_ = 0, rows_ = 0;  // of the query tile at hand
  Shapes shapes_;
  std::vector<TileRun> runs_;
  int64_t whole_shapes_ = 0;
  std::vector<size_t> ends_{0};              // of the runs of each query tile
  std::vector<int64_t> pairs_;               // of each shape
  std::vector<uint64_t> shape_, diagonals_;  // of the tile at hand
};

}  // namespace spattn
