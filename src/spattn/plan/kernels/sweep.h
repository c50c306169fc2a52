// Tiles of bands: consecutive queries that have the same runs of keys, and ranges of distances from query to key.
//
// A clause allows a pair whose key lies in a run of the query's band, or whose distance lies in a range; a pair is
// allowed by all clauses. Of each query tile a clause has two lists of stretches, key tiles beside each other that look
// alike: those of its bands, which query tiles of the same bands share, and those along its ranges, which are the same
// for all query tiles that begin as far behind a key tile, but for a shift. Both are merged, and then those of all
// clauses. What a divided tile looks like is a formula of few words: tiles of one look have one bitmask, written once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "bands.h"
#include "bitmasks.h"
#include "bits.h"
#include "drawing.h"
#include "lists.h"
#include "looks.h"
#include "stretches.h"

namespace spattn {

class Sweep {
 public:
  Sweep(const Side& queries, const Side& keys, const std::vector<ClauseArrays>& clauses, Bitmasks& masks,
        RunLists& lists)
      : queries_(queries), keys_(keys), words_(masks.row_words()), key_tiles_(int32_t(keys.tiles())),
        step_(std::gcd(queries.block, keys.block)),
        shift_(keys.block & (keys.block - 1) ? -1 : __builtin_ctzll(keys.block)), masks_(masks), lists_(lists),
        drawing_(queries.block, keys.block, looks_, clauses_) {
    for (const ClauseArrays& arrays : clauses) clauses_.emplace_back(arrays, queries, keys);
    for (const Clause& clause : clauses_) {
      readings_.push_back({&clause});
      readings_.back().along.resize(keys.block / step_);
    }
  }

  // Finds the runs of all query tiles, unless they are more than `most` or the bitmasks too many. Returns the allowed
  // pairs.
  int64_t run(int64_t most) {
    const int64_t before = lists_.runs();
    for (row_ = 0; row_ < queries_.cells; row_ += queries_.block) {
      const int64_t rows = std::min(queries_.block, queries_.cells - row_);
      if (rows != rows_) begin_rows(rows);
      find_runs();
      lists_.end_list();
      if (lists_.runs() - before > most || masks_.too_many()) break;
    }
    return pairs_;
  }

 private:
  // Rows of a query tile that have one band, from `row` on, how many runs it has, and the first of them that ends behind
  // the tile at hand. Behind the last run of a band stands kNever.
  struct Rows {
    int64_t row, band, count;
    const Interval* run;
    bool operator==(const Rows& other) const { return row == other.row && band == other.band; }
  };
  static constexpr Interval kNothing[2]{kNever, kNever};
  static constexpr int64_t kNoBand = -1;

  // The stretches along the ranges of a clause, of query tiles that begin as far behind a key tile: tile 0 is the one in
  // which the first query stands. Those of the query tile at hand are [begin, end), which only ever fall.
  struct Along {
    bool known = false;
    std::vector<Stretch> stretches;
    size_t begin, end;
  };

  // Where the sweep is in a clause.
  struct Reading {
    const Clause* clause;
    int64_t band = 0;  // the first one that ends behind the first row of the query tile
    std::vector<Rows> rows{};
    StretchList across{};                     // those of the bands of these rows
    std::vector<int32_t> looks_of_choices{};  // of tiles of which each band has all keys or none, where it is known
    std::vector<Along> along{};               // by where the query tile begins in a key tile
    StretchList joined{};
  };

  int64_t tile_of(int64_t key) const { return shift_ < 0 ? key / keys_.block : key >> shift_; }
  static int64_t floor_of(int64_t number, int64_t by) { return number / by - (number % by < 0); }

  // Query tiles of so many rows that are not padding come; nothing is known of them.
  void begin_rows(int64_t rows) {
    rows_ = rows;
    looks_ = Looks();
    seen_.assign(1, {kFullTile, rows * keys_.block});
    Stretch* there = there_.begin(2);
    *there++ = {0, key_tiles_, kWhole};
    if (keys_.cells % keys_.block) {
      uint64_t* const keys = looks_.next(1 + words_);
      std::fill_n(keys, 1 + words_, 0);
      set_bits(keys + 1, words_, 0, keys_.cells % keys_.block);
      there[-1].stop = key_tiles_ - 1;
      *there++ = {key_tiles_ - 1, key_tiles_, looks_.number(Look::kRows, 1 + words_)};
    }
    there_.end(there);
    for (Reading& reading : readings_) {
      reading.rows.clear(), reading.across.clear();
      for (Along& own : reading.along) own.known = false;
    }
  }

  // The runs of the query tile at hand: where the stretches of all clauses meet.
  void find_runs() {
    const auto joined = [this](int32_t one, int32_t other) {
      return one == kWhole ? other : other == kWhole ? one : looks_.pair(Look::kBoth, one, other);
    };
    const StretchList* found = there_.size() == 1 ? nullptr : &there_;  // all keys
    for (Reading& reading : readings_) {
      const StretchList* const own = stretches_of(reading);
      if (found) {
        both(*found, *own, joined, shared_[0]);
        std::swap(shared_[0], shared_[1]);
        found = &shared_[1];
      } else {
        found = own;
      }
    }
    add_runs(found ? *found : there_);
  }

  // Adds a list: of stretches, those that have one bitmask and follow one another as one run.
  void add_runs(const StretchList& list) {
    const RunLists::Room room = lists_.next(list.size());
    int64_t runs = 0, tiles = room.tiles, pairs = pairs_;
    int32_t first = 0, stop = 0, last = kEmptyTile;  // of the last run
    for (const Stretch* at = list.begin(); at->first != kEnd; ++at) {
      if (at->look >= int64_t(seen_.size()) || seen_[at->look].mask == kUnseen) look_at(at->look);
      const Seen seen = seen_[at->look];
      if (seen.mask == kEmptyTile) continue;
      const bool joined = seen.mask == last && at->first == stop;
      runs -= joined, first = joined ? first : at->first, last = seen.mask;
      tiles += at->stop - at->first, pairs += (at->stop - at->first) * seen.pairs, stop = at->stop;
      room.key_tile[runs] = first, room.mask[runs] = last, room.tile_indptr[runs++] = tiles;
    }
    pairs_ = pairs;
    lists_.add(runs);
  }

  // The stretches of a clause: of its bands, of its ranges, or of both.
  const StretchList* stretches_of(Reading& reading) {
    find_rows(reading);
    if (reading.clause->ranges.empty()) return &reading.across;
    Along& own = reading.along[row_ % keys_.block / step_];
    if (!own.known) find_along(*reading.clause, own);
    const std::vector<Stretch>& list = own.stretches;
    const int32_t by = int32_t(tile_of(row_));  // where the first query stands
    while (own.begin && list[own.begin - 1].stop + by > 0) --own.begin;
    while (own.end && list[own.end - 1].first + by >= key_tiles_) --own.end;
    StretchList& along = reading.across.empty() ? reading.joined : along_;
    Stretch* moved = along.begin(list.size());
    for (size_t n = own.begin; n < own.end; ++n) {
      *moved++ = {std::max(list[n].first + by, 0), std::min(list[n].stop + by, key_tiles_), list[n].look};
    }
    along.end(moved);
    if (reading.across.empty()) return &along;
    const auto joined = [this](int32_t rows, int32_t diagonal) {
      return rows == kWhole || diagonal == kWhole ? kWhole : looks_.pair(Look::kEither, rows, diagonal);
    };
    either(reading.across, along_, joined, reading.joined);
    return &reading.joined;
  }

  // Finds the bands of the query tile at hand, and their stretches unless they are those that the tile before had.
  void find_rows(Reading& reading) {
    const Clause& clause = *reading.clause;
    const int64_t bands = int64_t(clause.starts.size()) - 1;
    while (reading.band < bands && clause.starts[reading.band + 1] <= row_) ++reading.band;
    found_rows_.clear();
    int64_t row = row_;
    for (int64_t band = reading.band; band < bands && clause.starts[band] < row_ + rows_; ++band) {
      if (clause.starts[band + 1] <= row) continue;
      if (clause.starts[band] > row) found_rows_.push_back({row - row_, kNoBand, 0, kNothing});
      row = std::max(row, clause.starts[band]);
      const size_t begin = clause.ends[band];
      found_rows_.push_back({row - row_, band, int64_t(clause.ends[band + 1] - begin), clause.runs.data() + begin});
      row = clause.starts[band + 1];
    }
    if (bands && row < row_ + rows_) found_rows_.push_back({row - row_, kNoBand, 0, kNothing});
    if (found_rows_ == reading.rows) return;
    const auto same_row = [](const Rows& one, const Rows& other) { return one.row == other.row; };
    if (!std::equal(found_rows_.begin(), found_rows_.end(), reading.rows.begin(), reading.rows.end(), same_row)) {
      reading.looks_of_choices.assign(found_rows_.size() <= kMostChoices ? size_t{1} << found_rows_.size() : 0, kWhole);
    }
    reading.rows.swap(found_rows_);
    switch (reading.rows.size()) {
      case 1:
        return find_across<1>(reading);
      case 2:
        return find_across<2>(reading);
      default:
        return find_across<0>(reading);
    }
  }

  // The run of a band that ends behind the tile at hand; `following` is the run after it.
  struct Reader {
    int64_t first, stop;
    const Interval* following;

    explicit Reader(const Interval* run = kNothing) : first(run->first), stop(run->stop), following(run + 1) {}
    // One run further is mostly enough, and a guess whether it takes that would often be wrong.
    void go_behind(int64_t key) {
      const int64_t next_first = following->first, next_stop = following->stop;
      const bool ended = stop <= key;
      first = ended ? next_first : first, stop = ended ? next_stop : stop, following += ended;
      while (stop <= key) *this = Reader(following);
    }
  };

  // From one key tile to the next at which a run of a band begins or ends. Of few bands, kCount of them, the readers are
  // in registers.
  template <size_t kCount> void find_across(Reading& reading) {
    const size_t count = kCount ? kCount : reading.rows.size();
    Reader few[kCount ? kCount : 1];
    if (!kCount) readers_.resize(count);
    Reader* const readers = kCount ? few : readers_.data();
    int64_t most = 0, at = 0;
    for (size_t n = 0; n < count; ++n) {
      readers[n] = Reader(reading.rows[n].run);
      most += 4 * reading.rows[n].count;  // a stretch begins where a run's first or last tile begins or ends
    }
    Stretch* found = reading.across.begin(most);
    for (;;) {
      int64_t next = INT64_MAX;
      for (size_t n = 0; n < count; ++n) {
        readers[n].go_behind(at * keys_.block);
        next = std::min(next, readers[n].first);
      }
      if (next >= keys_.cells) break;
      at = std::max(at, tile_of(next));
      const int64_t first = at * keys_.block, stop = first + keys_.block;
      bool all = true, divided = false;
      int64_t same = INT64_MAX;
      uint64_t choice = 0;
      for (size_t n = 0; n < count; ++n) {
        const Reader& run = readers[n];
        const bool any = run.first < stop, whole = (run.first <= first) & (run.stop >= stop);
        all &= whole, divided |= any & !whole, choice = choice << 1 | whole;
        same = std::min(same, run.first + whole * (run.stop - run.first));  // its end or its begin, without a guess
      }
      int32_t look = kWhole;
      if (!all) {
        if (divided) same = stop;
        const bool known = !divided & (choice < reading.looks_of_choices.size());
        look = known ? reading.looks_of_choices[choice] : kWhole;
        if (look == kWhole) {
          for (size_t n = 0; n < count; ++n) reading.rows[n].run = readers[n].following - 1;
          look = look_of_rows(reading, first, stop);
          if (known) reading.looks_of_choices[choice] = look;
        }
      }
      const int64_t end = std::min<int64_t>(tile_of(same), key_tiles_);
      *found++ = {int32_t(at), int32_t(end), look};
      at = end;
    }
    reading.across.end(found);
  }

  // The keys [first, stop) that each row has; rows that have the same as those before are not told apart.
  int32_t look_of_rows(const Reading& reading, int64_t first, int64_t stop) {
    uint64_t* const begin = looks_.next(reading.rows.size() * (1 + words_));
    uint64_t* at = begin;
    for (const Rows& rows : reading.rows) {
      std::fill_n(at + 1, words_, 0);
      for (const Interval* run = rows.run; run->first < stop; ++run) {
        set_bits(at + 1, words_, run->first - first, run->stop - first);
      }
      if (at == begin || !std::equal(at + 1, at + 1 + words_, at - words_)) *at = uint64_t(rows.row), at += 1 + words_;
    }
    return looks_.number(Look::kRows, at - begin);
  }

  // From the farthest range to the nearest, whose keys are the last ones.
  void find_along(const Clause& clause, Along& own) {
    const int64_t rest = row_ % keys_.block, block = keys_.block, number = &clause - clauses_.data();
    std::vector<Stretch>& list = own.stretches;
    list.clear();
    const auto divided = [&](int64_t first, int64_t stop) {
      if (!list.empty()) first = std::max<int64_t>(first, list.back().stop);  // a tile that another range divides, too
      for (int64_t tile = first; tile < stop; ++tile) {
        uint64_t* const words = looks_.next(2);
        words[0] = uint64_t(number), words[1] = uint64_t(rest - tile * block);
        list.push_back({int32_t(tile), int32_t(tile + 1), looks_.number(Look::kDiagonal, 2)});
      }
    };
    for (auto range = clause.ranges.rbegin(); range != clause.ranges.rend(); ++range) {
      const int64_t first = floor_of(rest - range->stop + 1, block),
                    stop = floor_of(rest + rows_ - 1 - range->first, block) + 1;
      const int64_t first_whole = floor_of(rest + rows_ - range->stop + block - 1, block);
      const int64_t stop_whole = floor_of(rest - range->first + 1, block);
      if (first_whole < stop_whole) {
        divided(first, first_whole);
        list.push_back({int32_t(first_whole), int32_t(stop_whole), kWhole});
        divided(stop_whole, stop);
      } else {
        divided(first, stop);
      }
    }
    own.begin = own.end = list.size(), own.known = true;
  }

  // The bitmask of a look, and how many pairs it allows; kUnseen: not yet known.
  struct Seen {
    int32_t mask;
    int64_t pairs;
  };
  static constexpr int32_t kUnseen = -3;

  void look_at(int32_t look) {
    seen_.resize(std::max<size_t>(seen_.size(), looks_.size()), {kUnseen, 0});
    uint64_t* const mask = masks_.next();
    drawing_.draw(look, mask);
    const int64_t pairs = count_pairs(mask, rows_ * words_);
    Seen& seen = seen_[look];
    seen.pairs = pairs;
    if (pairs == rows_ * keys_.block) {
      seen.mask = kFullTile;
    } else if (!pairs) {
      seen.mask = kEmptyTile;
    } else if (rows_ == queries_.block) {
      seen.mask = masks_.number();
    } else {  // padding may be anything: what others have is used where it agrees with the rows that are there
      seen.mask = masks_.number_alike({{0, rows_ * words_}});
    }
  }

  static constexpr size_t kMostChoices = 4;  // bands of a query tile whose choices are numbered

  Side queries_, keys_;
  int64_t words_;
  int32_t key_tiles_;
  int64_t step_;  // query tiles begin so many keys, or a multiple of it, behind a key tile
  int shift_;
  Bitmasks& masks_;
  RunLists& lists_;
  std::vector<Clause> clauses_;
  std::vector<Reading> readings_;
  int64_t row_ = 0, rows_ = 0;  // of the query tile at hand
  int64_t pairs_ = 0;
  Looks looks_;
  Drawing drawing_;
  std::vector<Seen> seen_;  // by look
  StretchList there_, along_, shared_[2];
  std::vector<Rows> found_rows_;
  std::vector<Reader> readers_;
};

inline int64_t find_tiles(const Side& queries, const Side& keys, const std::vector<ClauseArrays>& clauses, int64_t most,
                          Bitmasks& masks, RunLists& lists) {
  return Sweep(queries, keys, clauses, masks, lists).run(most);
}

}  // namespace spattn
