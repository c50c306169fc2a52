// Finds the tiles of bands (consecutive queries with equal runs of keys) and of ranges of query-key distances.
//
// A conjunct allows a pair whose key lies in a run of the query's band, or whose distance lies in a range. The pattern
// allows a pair if all conjuncts do. For each query tile a conjunct has two lists of key tile runs. Query tiles with
// the same bands share the list of the bands. The list of the ranges is the same, up to a shift, for query tiles with
// the same offset from a key tile boundary. The sweep merges the two lists, then intersects the results of all
// conjuncts. Tiles of one class (looks.h) share one bitmask, which is expanded once.
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
  Sweep(const Side& queries, const Side& keys, const std::vector<ConjunctArrays>& conjuncts, Bitmasks& masks,
        RunLists& lists)
      : queries_(queries), keys_(keys), words_(masks.row_words()), key_tiles_(int32_t(keys.tiles())),
        step_(std::gcd(queries.block, keys.block)), tile_of_(keys.block), masks_(masks), lists_(lists),
        drawing_(queries.block, keys.block, looks_) {
    for (const ConjunctArrays& arrays : conjuncts) conjuncts_.emplace_back(arrays, queries, keys);
    for (const Conjunct& conjunct : conjuncts_) {
      readings_.push_back({&conjunct});
      readings_.back().along.resize(keys.block / step_);
    }
  }

  // Appends the runs of all query tiles and returns the number of allowed pairs. Stops early after more than `most`
  // runs or too many bitmasks.
  int64_t run(int64_t most) {
    const int64_t before = lists_.runs();
    const int64_t phases = keys_.block / step_, further = queries_.block / step_ % phases;
    for (row_ = phase_ = 0; row_ < queries_.cells; row_ += queries_.block) {
      const int64_t rows = std::min(queries_.block, queries_.cells - row_);
      if (rows != rows_) begin_rows(rows);
      if (find_stretches()) {
        const int64_t before = pairs_;
        find_runs();
        pairs_of_list_ = pairs_ - before;
      } else {
        lists_.repeat_list();
        pairs_ += pairs_of_list_;
      }
      if (lists_.runs() - before > most || masks_.too_many()) break;
      phase_ += further, phase_ -= phase_ < phases ? 0 : phases;
    }
    return pairs_;
  }

 private:
  // The rows of a query tile that belong to one band, from `row` on, and the band's runs that reach past the current
  // key tile.
  struct Rows {
    int64_t row, band, count;  // count: number of the band's runs
    const Stretch* stretches;
    bool operator==(const Rows& other) const { return row == other.row && band == other.band; }
  };
  static constexpr int64_t kNoBand = -1;
  static constexpr int32_t kNoKeys = -1;  // the class of a band that has no keys in a tile

  // The runs of a conjunct's ranges, for query tiles with one offset from a key tile boundary. Key tile numbers are
  // relative to the tile that contains the first query's diagonal. Runs [begin, end) overlap the sequence; both indices
  // decrease with each query tile.
  struct Along {
    bool known = false;
    std::vector<Stretch> stretches;
    int64_t begin, end;
  };

  // The state of the sweep in one conjunct.
  struct Reading {
    const Conjunct* conjunct;
    int64_t band = 0;  // the first band that ends after the query tile's first row
    std::vector<Rows> rows{};
    StretchList across{};  // runs of these rows' bands
    // Caches the class of a tile in which each band has all keys or none; bit n of the index says which, for the n-th
    // band from the last. kWhole: not cached yet.
    std::vector<int32_t> mask_classes_of_choices{};
    std::vector<Along> along{};  // one for each offset of a query tile from a key tile boundary
    StretchList joined{};        // union of the runs of bands and ranges
    const StretchList& list() const { return conjunct->ranges.empty() ? across : joined; }
  };

  static int64_t floor_of(int64_t number, int64_t by) { return number / by - (number % by < 0); }

  // Resets the state before query tiles with another number of real rows.
  void begin_rows(int64_t rows) {
    rows_ = rows, known_ = false;
    looks_ = MaskClasses();
    seen_.assign(1, {kFullTile, int32_t(rows * keys_.block)});
    Stretch* there = there_.begin(2);
    *there++ = {0, key_tiles_, kWhole};
    if (keys_.cells % keys_.block) {
      uint64_t* const keys = looks_.next(1 + words_);
      std::fill_n(keys, 1 + words_, 0);
      set_bits(keys + 1, words_, 0, keys_.cells % keys_.block);
      there[-1].stop = key_tiles_ - 1;
      *there++ = {key_tiles_ - 1, key_tiles_, looks_.number(MaskClass::kRows, 1 + words_)};
    }
    there_.end(there);
    for (Reading& reading : readings_) {
      reading.rows.clear(), reading.across.clear();
      for (Along& own : reading.along) own.known = false;
    }
  }

  // Finds the runs of all conjuncts for the current query tile; returns false if they equal the previous tile's runs.
  bool find_stretches() {
    bool others = !known_;
    for (Reading& reading : readings_) {
      others |= find_rows(reading);
      if (reading.conjunct->ranges.empty()) continue;
      others = true;
      add_along(reading);
    }
    known_ = true;
    return others;
  }

  // Intersects the runs of all conjuncts for the current query tile.
  void find_runs() {
    const auto joined = [this](int32_t one, int32_t other) {
      return one == kWhole ? other : other == kWhole ? one : looks_.pair(MaskClass::kBoth, one, other);
    };
    const StretchList* found = there_.size() == 1 ? nullptr : &there_;  // nullptr: all keys, no padding
    for (const Reading& reading : readings_) {
      if (found) {
        both(*found, reading.list(), joined, shared_[0]);
        std::swap(shared_[0], shared_[1]);
        found = &shared_[1];
      } else {
        found = &reading.list();
      }
    }
    add_runs(found ? *found : there_);
  }

  // Appends a list and merges adjacent runs with equal bitmasks.
  void add_runs(const StretchList& list) {
    const RunLists::Room room = lists_.next(list.size());
    seen_.resize(looks_.size(), {kUnseen, 0});
    int64_t runs = 0, tiles = room.tiles, pairs = pairs_;
    int32_t stop = 0, last = kEmptyTile;  // end and bitmask of the previous run
    for (const Stretch* at = list.begin(); at->first != kEnd; ++at) {
      if (seen_[at->look].mask == kUnseen) look_at(at->look);
      const Seen own = seen_[at->look];
      if (own.mask == kEmptyTile) continue;
      room.key_tile[runs] = at->first, room.mask[runs] = own.mask;  // ignored if the run is merged
      runs += (own.mask != last) | (at->first != stop);
      last = own.mask, stop = at->stop;
      tiles += at->stop - at->first, pairs += int64_t(at->stop - at->first) * own.pairs;
      room.tile_indptr[runs - 1] = tiles;
    }
    pairs_ = pairs;
    lists_.add(runs), lists_.end_list();
  }

  // Merges the runs of a conjunct's ranges with those of its bands.
  void add_along(Reading& reading) {
    Along& own = reading.along[phase_];
    if (!own.known) find_along(*reading.conjunct, own);
    const std::vector<Stretch>& list = own.stretches;
    const int32_t by = int32_t(tile_of_(row_));  // the key tile that contains the first query's diagonal
    while (own.begin && list[own.begin - 1].stop + by > 0) --own.begin;
    while (own.end && list[own.end - 1].first + by >= key_tiles_) --own.end;
    StretchList& along = reading.across.empty() ? reading.joined : along_;
    const int64_t count = std::max<int64_t>(own.end - own.begin, 0);
    Stretch* const moved = along.begin(count);
    for (int64_t n = 0; n < count; ++n) {
      const Stretch& one = list[own.begin + n];
      moved[n] = {one.first + by, one.stop + by, one.look};
    }
    moved[0].first = std::max(moved[0].first, 0);  // moved[0] exists even if count is 0
    if (count) moved[count - 1].stop = std::min(moved[count - 1].stop, key_tiles_);
    along.end(moved + count);
    if (reading.across.empty()) return;
    const auto joined = [this](int32_t rows, int32_t diagonal) {
      return rows == kWhole || diagonal == kWhole ? kWhole : looks_.pair(MaskClass::kEither, rows, diagonal);
    };
    const auto same = [](int32_t look, bool) { return look; };
    Stretch* const found = reading.joined.begin(2 * (reading.across.size() + along_.size()));
    reading.joined.end(either(reading.across.begin(), along_.begin(), same, joined, found));
  }

  // Finds the bands of the current query tile and their runs; returns false if they equal the previous tile's.
  bool find_rows(Reading& reading) {
    const Conjunct& conjunct = *reading.conjunct;
    const int64_t bands = int64_t(conjunct.starts.size()) - 1;
    while (reading.band < bands && conjunct.starts[reading.band + 1] <= row_) ++reading.band;
    const bool goes_on = reading.rows.size() == 1 && reading.rows[0].band == reading.band;
    if (!bands || (goes_on && conjunct.starts[reading.band + 1] >= row_ + rows_)) return false;
    found_rows_.clear();
    int64_t row = row_;
    for (int64_t band = reading.band; band < bands && conjunct.starts[band] < row_ + rows_; ++band) {
      if (conjunct.starts[band + 1] <= row) continue;
      if (conjunct.starts[band] > row) found_rows_.push_back({row - row_, kNoBand, 0, &kLastStretch});
      row = std::max(row, conjunct.starts[band]);
      const size_t begin = conjunct.ends[band];
      found_rows_.push_back(
          {row - row_, band, int64_t(conjunct.ends[band + 1] - begin), conjunct.stretches.get() + begin});
      row = conjunct.starts[band + 1];
    }
    if (bands && row < row_ + rows_) found_rows_.push_back({row - row_, kNoBand, 0, &kLastStretch});
    if (found_rows_ == reading.rows) return false;
    const auto same_row = [](const Rows& one, const Rows& other) { return one.row == other.row; };
    if (!std::equal(found_rows_.begin(), found_rows_.end(), reading.rows.begin(), reading.rows.end(), same_row)) {
      reading.mask_classes_of_choices.assign(found_rows_.size() <= kMostChoices ? size_t{1} << found_rows_.size() : 0,
                                             kWhole);
    }
    reading.rows.swap(found_rows_);
    switch (reading.rows.size()) {
      case 1:
        find_across_one(reading);
        break;
      case 2:
        find_across_two(reading);
        break;
      default:
        find_across(reading);
    }
    return true;
  }

  // Finds the runs of a query tile with one band.
  void find_across_one(Reading& reading) {
    const Rows& rows = reading.rows[0];
    Stretch* found = reading.across.begin(rows.count);
    for (const Stretch* own = rows.stretches; own->first != kEnd; ++own) {
      *found++ = {own->first, own->stop, own->look == kWhole ? kWhole : mask_class_of_rows(reading, &own->look)};
    }
    reading.across.end(found);
  }

  // Finds the union of the runs of two bands.
  void find_across_two(Reading& reading) {
    const Rows &one = reading.rows[0], &other = reading.rows[1];
    const auto look = [&](int32_t mask_class_of_one, int32_t mask_class_of_other) {
      const int32_t looks[] = {mask_class_of_one, mask_class_of_other};
      return mask_class_of_rows(reading, looks);
    };
    const int32_t alone[] = {look(kWhole, kNoKeys), look(kNoKeys, kWhole)};
    const auto of_either = [&](int32_t own, bool of_one) {
      if (own == kWhole) return of_one ? alone[0] : alone[1];
      return of_one ? look(own, kNoKeys) : look(kNoKeys, own);
    };
    Stretch* const found = reading.across.begin(2 * (one.count + other.count));
    reading.across.end(either(one.stretches, other.stretches, of_either, look, found));
  }

  // Finds the union of the runs of any number of bands, from one run boundary to the next.
  void find_across(Reading& reading) {
    const size_t count = reading.rows.size();
    int64_t most = 0;
    for (const Rows& rows : reading.rows) most += 2 * rows.count;
    Stretch* found = reading.across.begin(most);
    mask_classes_of_bands_.resize(count);
    for (int32_t at = 0;;) {
      int32_t next = kEnd, same = kEnd;
      for (Rows& rows : reading.rows) {
        while (rows.stretches->stop <= at) ++rows.stretches;
        next = std::min(next, rows.stretches->first);
      }
      if (next == kEnd) break;
      at = std::max(at, next);
      for (size_t n = 0; n < count; ++n) {
        const Stretch& own = *reading.rows[n].stretches;
        const bool any = own.first <= at;
        mask_classes_of_bands_[n] = any ? own.look : kNoKeys;
        same = std::min(same, any ? own.stop : own.first);
      }
      *found++ = {at, same, mask_class_of_rows(reading, mask_classes_of_bands_.data())};
      at = same;
    }
    reading.across.end(found);
  }

  // Returns the class of a tile in which each band's rows have the keys of the given class.
  int32_t mask_class_of_rows(Reading& reading, const int32_t* looks) {
    const size_t count = reading.rows.size();
    bool all = true, divided = false;
    uint64_t choice = 0;
    for (size_t n = 0; n < count; ++n) {
      all &= looks[n] == kWhole, divided |= looks[n] > kWhole, choice = choice << 1 | (looks[n] == kWhole);
    }
    if (all) return kWhole;
    const bool numbered = !divided & (count <= kMostChoices);
    if (numbered && reading.mask_classes_of_choices[choice] != kWhole) return reading.mask_classes_of_choices[choice];
    uint64_t* const begin = looks_.next(count * (1 + words_));
    uint64_t* at = begin;
    for (size_t n = 0; n < count; ++n) {
      if (looks[n] > kWhole) {
        std::copy_n(reading.conjunct->divided(looks[n]), words_, at + 1);
      } else {
        std::fill_n(at + 1, words_, looks[n] == kWhole ? ~uint64_t{0} : 0);
      }
      // Rows with the same keys as the rows before need no entry.
      const bool same = at != begin && std::equal(at + 1, at + 1 + words_, at - words_);
      if (!same) *at = uint64_t(reading.rows[n].row), at += 1 + words_;
    }
    const int32_t look = looks_.number(MaskClass::kRows, at - begin);
    if (numbered) reading.mask_classes_of_choices[choice] = look;
    return look;
  }

  // Finds the runs of a conjunct's ranges, from the farthest range to the nearest, which has the last keys.
  void find_along(const Conjunct& conjunct, Along& own) {
    const int64_t rest = phase_ * step_, block = keys_.block;
    const int64_t distances = queries_.block + block - 1, words = distances / 64 + 1;  // distinct distances in a tile
    std::vector<Stretch>& list = own.stretches;
    list.clear();
    const auto divided = [&](int64_t first, int64_t stop) {
      if (!list.empty()) first = std::max<int64_t>(first, list.back().stop);  // another range added the tiles before
      for (int64_t tile = first; tile < stop; ++tile) {
        uint64_t* const bits = looks_.next(words);
        conjunct.mark_distances(rest - tile * block + queries_.block - 1, distances, bits, words);
        list.push_back({int32_t(tile), int32_t(tile + 1), looks_.number(MaskClass::kDiagonal, words)});
      }
    };
    for (auto range = conjunct.ranges.rbegin(); range != conjunct.ranges.rend(); ++range) {
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

  // The bitmask and the number of pairs of a class; the bitmask is kUnseen until they are computed.
  struct Seen {
    int32_t mask, pairs;
  };
  static constexpr int32_t kUnseen = -3;

  void look_at(int32_t look) {
    uint64_t* const mask = masks_.next();
    // Known bitmasks may have other padding rows, so a tile with padding is drawn from the descriptors alone.
    drawing_.draw(look, mask, [this](int32_t known) -> const uint64_t* {
      const bool drawn = seen_[known].mask >= 0 && rows_ == queries_.block;
      return drawn ? masks_.of(seen_[known].mask) : nullptr;
    });
    const int64_t pairs = count_pairs(mask, rows_ * words_);
    Seen& seen = seen_[look];
    seen.pairs = int32_t(pairs);
    if (pairs == rows_ * keys_.block) {
      seen.mask = kFullTile;
    } else if (!pairs) {
      seen.mask = kEmptyTile;
    } else if (rows_ == queries_.block) {
      seen.mask = masks_.number();
    } else {  // padding rows are undefined, so a bitmask that agrees in the real rows suffices
      seen.mask = masks_.number_alike({{0, rows_ * words_}});
    }
  }

  static constexpr size_t kMostChoices = 4;  // with more bands, mask_classes_of_choices stays empty

  Side queries_, keys_;
  int64_t words_;
  int32_t key_tiles_;
  int64_t step_;    // query tiles start at multiples of step_ after key tile boundaries
  TileOf tile_of_;  // key tile of a key
  Bitmasks& masks_;
  RunLists& lists_;
  std::vector<Conjunct> conjuncts_;
  std::vector<Reading> readings_;
  int64_t row_ = 0, rows_ = 0, phase_ = 0;  // the query tile, which starts phase_ * step_ after a key tile boundary
  int64_t pairs_ = 0, pairs_of_list_ = 0;   // number of pairs of all lists, and of the last list
  bool known_ = false;                      // whether the previous query tile had as many real rows
  MaskClasses looks_;
  Drawing drawing_;
  std::vector<Seen> seen_;  // of each class
  StretchList there_, along_, shared_[2];
  std::vector<Rows> found_rows_;
  std::vector<int32_t> mask_classes_of_bands_;
};

inline int64_t find_tiles(const Side& queries, const Side& keys, const std::vector<ConjunctArrays>& conjuncts,
                          int64_t most, Bitmasks& masks, RunLists& lists) {
  return Sweep(queries, keys, conjuncts, masks, lists).run(most);
}

}  // namespace spattn
