// Conjuncts of a pattern: bands and ranges of distances, relative to the first query and the first key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bits.h"
#include "looks.h"
#include "stretches.h"

namespace spattn {

// The arrays of a conjunct, as defined in spattn/patterns/hints/closed_forms.py.
struct ConjunctArrays {
  const int64_t* start;
  const int64_t* indptr;
  const int64_t* first;
  const int64_t* stop;
  const int64_t* near;
  int64_t bands, ranges;
};

// Consecutive positions, divided into tiles.
struct Side {
  int64_t offset, cells, block;
  int64_t tiles() const { return (cells + block - 1) / block; }
};

// Maps a cell to its tile: with a shift if the tile size is a power of two, else with a division.
class TileOf {
 public:
  explicit TileOf(int64_t block) : block_(block), shift_(block & (block - 1) ? -1 : __builtin_ctzll(block)) {}
  int64_t operator()(int64_t cell) const { return shift_ < 0 ? cell / block_ : cell >> shift_; }

 private:
  int64_t block_;
  int shift_;
};

// An interval [first, stop) of keys or distances, relative to the first query and key.
struct Interval {
  int64_t first, stop;
};

// Sorts intervals and merges those that overlap or touch. Returns the number of remaining intervals.
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

// A conjunct. Its bands are stored as runs of key tiles, computed once for all query tiles.
class Conjunct {
 public:
  Conjunct(const ConjunctArrays& arrays, const Side& queries, const Side& keys)
      : block_(keys.block), words_(keys.block / 64), tile_of_(keys.block) {
    starts.reserve(arrays.bands + 1), ends.reserve(arrays.bands + 1), ends.push_back(0);
    const int64_t count = arrays.indptr[arrays.bands], whole = keys.tiles() * keys.block;
    stretches.reset(new Stretch[3 * count + arrays.bands]);  // a run of keys has full tiles and up to 2 partial ones
    end_ = stretches.get();
    std::vector<Interval> runs;
    for (int64_t band = 0; band < arrays.bands; ++band) {
      runs.resize(std::max<int64_t>(runs.size(), arrays.indptr[band + 1] - arrays.indptr[band]));
      bool sorted = true;
      int64_t kept = 0;
      for (int64_t n = arrays.indptr[band], last = -1; n < arrays.indptr[band + 1]; ++n) {
        const int64_t first = std::max<int64_t>(arrays.first[n] - keys.offset, 0), stop = arrays.stop[n] - keys.offset;
        if (first >= std::min(stop, keys.cells)) continue;
        sorted &= first > last, last = stop < keys.cells ? stop : whole;
        runs[kept++] = {first, last};
      }
      if (!sorted) kept = join_intervals(runs.data(), kept);
      for (int64_t n = 0; n < kept; ++n) add(runs[n]);
      *end_++ = kLastStretch;
      starts.push_back(arrays.start[band] - queries.offset);
      ends.push_back(end_ - stretches.get());
    }
    starts.push_back(arrays.bands ? arrays.start[arrays.bands] - queries.offset : 0);
    const int64_t apart = queries.offset - keys.offset;
    for (int64_t n = 0; n < arrays.ranges; ++n) {
      const int64_t first = std::max(arrays.near[2 * n] - apart, -whole);
      const int64_t stop = std::min(arrays.near[2 * n + 1] - apart, queries.cells + queries.block);
      if (first < stop) ranges.push_back({first, stop});
    }
    ranges.resize(join_intervals(ranges.data(), ranges.size()));
  }

  // Returns the bitmask of the keys that a band has in a partial tile of this class.
  const uint64_t* divided(int32_t look) const { return divided_.data() + (look - 1) * words_; }

  // Writes `words` words, in which bit n < count is set if the distance most - n is in a range.
  void mark_distances(int64_t most, int64_t count, uint64_t* bits, int64_t words) const {
    std::fill_n(bits, words, 0);
    auto range = std::upper_bound(ranges.begin(), ranges.end(), most,
                                  [](int64_t distance, const Interval& own) { return distance < own.first; });
    while (range != ranges.begin() && (--range)->stop > most - count + 1) {
      set_bits(bits, words, most - range->stop + 1, std::min(most - range->first + 1, count));
    }
  }

  std::vector<int64_t> starts;  // first query of each band, and the end of the last band
  std::vector<size_t> ends;     // offset in `stretches` at which each band's runs end
  // A run has class kWhole if the band has all keys of its tiles, else a class whose keys divided() returns. A
  // kLastStretch ends the runs of each band.
  std::unique_ptr<Stretch[]> stretches;
  std::vector<Interval> ranges;  // disjoint

 private:
  // Adds a run of keys to the current band. It must lie after the band's other runs.
  void add(const Interval& run) {
    const int64_t first = tile_of_(run.first), stop = tile_of_(run.stop);
    const int64_t begin = first + (first * block_ < run.first);
    if (first < begin) add_divided(first, run);
    if (begin < stop) *end_++ = {int32_t(begin), int32_t(stop), kWhole};
    if (begin <= stop && stop * block_ < run.stop) add_divided(stop, run);
  }

  void add_divided(int64_t tile, const Interval& run) {
    if (end_ == stretches.get() + ends.back() || end_[-1].first < tile) {
      divided_.resize(divided_.size() + words_);
      *end_++ = {int32_t(tile), int32_t(tile + 1), int32_t(divided_.size() / words_)};
    }
    set_bits(divided_.data() + divided_.size() - words_, words_, run.first - tile * block_, run.stop - tile * block_);
  }

  int64_t block_, words_;
  TileOf tile_of_;
  Stretch* end_;
  std::vector<uint64_t> divided_;
};

}  // namespace spattn
