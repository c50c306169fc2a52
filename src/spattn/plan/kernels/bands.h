// Clauses, sorted and counted from the first query and the first key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

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

// Behind the last run of a band stands kNever.
constexpr Interval kNever{INT64_MAX, INT64_MAX};

struct Clause {
  Clause(const ClauseArrays& arrays, const Side& queries, const Side& keys) {
    starts.reserve(arrays.bands + 1), ends.reserve(arrays.bands + 1), ends.push_back(0);
    runs.resize(arrays.indptr[arrays.bands] + arrays.bands + 1, kNever);
    Interval* at = runs.data();
    const int64_t whole = keys.tiles() * keys.block;
    for (int64_t band = 0; band < arrays.bands; ++band) {
      Interval* const begin = at;
      bool sorted = true;
      for (int64_t n = arrays.indptr[band], last = -1; n < arrays.indptr[band + 1]; ++n) {
        const int64_t first = std::max<int64_t>(arrays.first[n] - keys.offset, 0), stop = arrays.stop[n] - keys.offset;
        if (first >= std::min(stop, keys.cells)) continue;
        sorted &= first > last, last = stop < keys.cells ? stop : whole;
        *at++ = {first, last};
      }
      if (!sorted) at = begin + join_intervals(begin, at - begin);
      *at++ = kNever;
      starts.push_back(arrays.start[band] - queries.offset);
      ends.push_back(at - runs.data());
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

  std::vector<int64_t> starts;         // of the bands, and where the last one ends
  std::vector<size_t> ends;            // where the runs of each band start
  std::vector<Interval> runs, ranges;  // none meets another; one run more may be read than there are
};

}  // namespace spattn
