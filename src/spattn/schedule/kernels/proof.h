// Prove that each row has one writer: one item, or one combine that reads each partial of the row once.
//
// The proof derives the rows from the definitions in docs/contract.rst (views, tiles of the items, merge_* fields). It
// shares no arithmetic with schedule/items.py, which decides which item writes which rows. It checks that
//
//   1. no two items without a partial have the same tile (one bit for each tile);
//   2. the tiles of these items and the combined rows are disjoint and cover all rows (one bit for each row);
//   3. each source of a combined row is a real cell of that row, no row has a source twice, and rows have as many
//      sources in total as partials have real cells. As combined rows differ (2), each cell is then read once.
//
// Cost: one word operation for 64 rows of a contiguous lattice, one comparison for each source.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "records.h"

namespace spattn {

// A field of a structured array.
template <typename T>
struct Column {
  const char* data;
  ptrdiff_t stride;

  T operator[](int64_t n) const { return *reinterpret_cast<const T*>(data + n * stride); }
};

struct Writers {
  const View* views;
  int64_t views_count;
  const int32_t* query_view;  // one for each owner: a component or, for dK/dV, a view
  int64_t owners;
  Column<int32_t> owner, tile;  // one for each item
  Column<int64_t> slot;
  const int32_t *rows, *indptr, *sources;  // combines
  int64_t merges, sources_count;
  int64_t length;           // number of rows of a variant
  int64_t block, together;  // a tile has `block` cells, an item `together` tiles
  int64_t slots;
};

enum Fault : int { kSound, kBadTile, kBadRow, kTwice, kMissing, kBadSlot, kBadSource, kUnread };

struct Finding {
  int fault;
  int64_t at;
};

class RowProof {
 public:
  explicit RowProof(const Writers& writers) : w_(writers), written_((writers.length + 63) / 64) {
    if ((w_.block & (w_.block - 1)) == 0)
      while (int64_t(1) << (shift_ + 1) <= w_.block) ++shift_;
  }

  // Checks a variant with the items [first, last) and the combined rows [first_merge, last_merge). `order` is its
  // permutation of rows, or null.
  Finding check(int64_t first, int64_t last, int64_t first_merge, int64_t last_merge, const int32_t* order) {
    finding_ = {kSound, 0};
    order_ = order;
    std::fill(written_.begin(), written_.end(), 0);
    marked_ = 0;
    if (!find_tiles(first, last) || !mark_items() || !mark_merges(first_merge, last_merge)) return finding_;
    if (marked_ != w_.length) return report(kMissing, first_missing());
    check_sources(first_merge, last_merge);
    return finding_;
  }

 private:
  // The lattice of the real cells of a tile, or of a whole view.
  struct Cells {
    int64_t offset, stride[3];
    int64_t real[3];
  };

  // One tile of a partial. If its cells lie on one axis, there are `real` of them, and cell c is at position
  // base + c * step; else real < 0, and `base` is the tile's index in boxes_. If real is 0, no item has this partial.
  // From this tile's first source up to source `end` (exclusive), which may be in a later tile, rows are `step` apart.
  struct Partial {
    int32_t base, step, real, end;
  };
  struct Tile {
    int32_t view, tile;
  };

  Finding report(int fault, int64_t at) { return finding_ = {fault, at}; }
  bool fails(int fault, int64_t at) { return report(fault, at), false; }

  static int64_t tiles_of(const View& view) {
    int64_t tiles = 1;
    for (int axis = 0; axis < 3; ++axis) tiles *= (int64_t(view.extent[axis]) + view.box[axis] - 1) / view.box[axis];
    return tiles;
  }

  // Returns whether all positions are in [0, length).
  bool inside(const Cells& cells) const {
    int64_t low = cells.offset, high = cells.offset;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t stride = cells.stride[axis], steps = cells.real[axis] - 1;
      if (steps < 0 || (steps > 0 && (stride > w_.length || stride < -w_.length))) return false;
      (stride < 0 ? low : high) += steps ? stride * steps : 0;
    }
    return low >= 0 && high < w_.length;
  }

  static Cells cells_of(const View& view, int64_t tile) {
    Cells found{view.offset, {}, {}};
    for (int axis = 2; axis >= 0; --axis) {
      const int64_t grid = (int64_t(view.extent[axis]) + view.box[axis] - 1) / view.box[axis];
      const int64_t number = axis ? tile % grid : tile;
      tile = axis ? tile / grid : 0;
      found.stride[axis] = view.stride[axis];
      found.real[axis] = std::min<int64_t>(view.box[axis], view.extent[axis] - number * view.box[axis]);
      found.offset += number * view.box[axis] * view.stride[axis];
    }
    return found;
  }

  // Finds the tiles of each view that items write without a partial, and the tiles of the partials.
  bool find_tiles(int64_t first, int64_t last) {
    starts_.assign(w_.views_count, -1);
    used_.clear();
    alone_.clear();
    partials_.clear();
    partials_.reserve(w_.slots * w_.together);
    boxes_.clear();
    cells_ = 0;
    for (int64_t n = first; n < last;) {
      const int64_t owner = w_.owner[n];
      if (owner < 0 || owner >= w_.owners) return fails(kBadTile, n);
      const int64_t number = w_.query_view[owner];
      if (number < 0 || number >= w_.views_count) return fails(kBadTile, n);
      if (starts_[number] < 0 && !add_view(number)) return false;
      const int64_t tiles = tiles_[number];
      uint8_t* marks = alone_.data() + starts_[number];
      for (; n < last && w_.owner[n] == owner; ++n) {
        const int64_t slot = w_.slot[n], tile = w_.tile[n];
        if (tile < 0 || tile >= tiles) return fails(kBadTile, n);
        if (slot >= 0) {
          if (!add_slot(slot, number, tile, tiles)) return false;
          continue;
        }
        const int64_t end = std::min(tile + w_.together, tiles);
        for (int64_t own = tile; own < end; ++own) {
          if (marks[own]) return fails(kTwice, first_row(number, own));
          marks[own] = 1;
        }
      }
    }
    return true;
  }

  bool add_view(int64_t number) {
    const View& view = w_.views[number];
    for (int axis = 0; axis < 3; ++axis)
      if (view.extent[axis] < 1 || view.box[axis] < 1) return fails(kBadTile, number);
    if (int64_t(view.box[0]) * view.box[1] * view.box[2] != w_.block) return fails(kBadTile, number);
    if (!inside(whole(view))) return fails(kBadRow, view.offset);
    tiles_.resize(w_.views_count);
    starts_[number] = int64_t(alone_.size());
    tiles_[number] = tiles_of(view);
    alone_.resize(alone_.size() + tiles_[number]);
    used_.push_back(number);
    return true;
  }

  static Cells whole(const View& view) {
    Cells found{view.offset, {}, {}};
    for (int axis = 0; axis < 3; ++axis) found.stride[axis] = view.stride[axis], found.real[axis] = view.extent[axis];
    return found;
  }

  bool add_slot(int64_t slot, int64_t number, int64_t tile, int64_t tiles) {
    const size_t at = slot * w_.together;
    if (slot >= w_.slots || int64_t(at + w_.together) * w_.block > INT32_MAX) return fails(kBadSlot, slot);
    if (at + w_.together > partials_.size()) partials_.resize(at + w_.together);
    if (partials_[at].real) return fails(kBadSlot, slot);
    const View& view = w_.views[number];
    const int64_t end = std::min(tile + w_.together, tiles);
    Partial* own = &partials_[at];
    if (view.extent[0] == 1 && view.extent[1] == 1) {
      for (; tile < end; ++tile, ++own) {
        const int64_t first = tile * view.box[2], real = std::min<int64_t>(view.box[2], view.extent[2] - first);
        *own = on_axis(view.offset + first * view.stride[2], view, real);
        cells_ += real;
      }
      return true;
    }
    for (; tile < end; ++tile, ++own) {
      const Cells cells = cells_of(view, tile);
      if (cells.real[0] == 1 && cells.real[1] == 1) {
        *own = on_axis(cells.offset, view, cells.real[2]);
      } else {
        *own = {int32_t(boxes_.size()), 1, -1, 0};
        boxes_.push_back({int32_t(number), int32_t(tile)});
      }
      cells_ += cells.real[0] * cells.real[1] * cells.real[2];
    }
    return true;
  }

  static Partial on_axis(int64_t base, const View& view, int64_t real) {
    return {int32_t(base), real == 1 ? 1 : view.stride[2], int32_t(real), 0};
  }

  int64_t first_row(int64_t number, int64_t tile) const {
    const int64_t position = cells_of(w_.views[number], tile).offset;
    return order_ ? order_[position] : position;
  }

  bool mark_items() {
    for (size_t n = 0; n < used_.size();) {
      const int64_t number = used_[n], tiles = tiles_[number];
      const uint8_t* alone = alone_.data() + starts_[number];
      const int64_t count = std::count(alone, alone + tiles, 1);
      int64_t views = 1;
      if (count == tiles) {
        views = mark_views(n);
        if (!views) return false;
      } else if (count) {
        for (int64_t tile = 0; tile < tiles; ++tile)
          if (alone[tile] && !mark(cells_of(w_.views[number], tile))) return false;
      }
      n += views;
    }
    return true;
  }

  // Marks all rows of view used_[n], whose tiles all have one writer. Returns the number of marked views, or 0 if a row
  // was marked already. Fast path: `stride` views at adjacent offsets are disjoint, because their positions differ
  // modulo `stride`. If they have as many rows as the range that they span, they fill it.
  int64_t mark_views(size_t n) {
    const View& first = w_.views[used_[n]];
    const int64_t stride = first.stride[2];
    if (order_ || stride < 2 || n + stride > used_.size()) return mark(whole(first)) ? 1 : 0;
    int64_t rows = 0, end = first.offset;
    for (int64_t k = 0; k < stride; ++k) {
      const int64_t number = used_[n + k], tiles = tiles_[number];
      const View& view = w_.views[number];
      const uint8_t* alone = alone_.data() + starts_[number];
      const bool follows = view.offset == first.offset + k && view.stride[2] == stride && view.extent[0] == 1 &&
                           view.extent[1] == 1 && std::count(alone, alone + tiles, 1) == tiles;
      if (!follows) return mark(whole(first)) ? 1 : 0;
      rows += view.extent[2];
      end = std::max(end, view.offset + stride * (view.extent[2] - 1) + 1);
    }
    if (rows != end - first.offset) return mark(whole(first)) ? 1 : 0;
    marked_ += rows;
    return mark_range(first.offset, rows) ? stride : 0;
  }

  // Marks the rows of a lattice; returns false if one was marked already.
  bool mark(Cells cells) {
    if (order_) return mark_in_order(cells);
    marked_ += cells.real[0] * cells.real[1] * cells.real[2];
    for (int axis = 0; axis < 3; ++axis) {  // make strides positive
      if (cells.real[axis] == 1) cells.stride[axis] = 0;
      if (cells.stride[axis] < 0) {
        cells.offset += cells.stride[axis] * (cells.real[axis] - 1);
        cells.stride[axis] = -cells.stride[axis];
      }
    }
    int axes[3] = {0, 1, 2};  // axes with one position first, then by descending stride
    const auto length = [&](int axis) { return cells.stride[axis] ? cells.stride[axis] : INT64_MAX; };
    std::stable_sort(axes, axes + 3, [&](int one, int other) { return length(one) > length(other); });
    int64_t stride[3], count[3];
    for (int axis = 0; axis < 3; ++axis) stride[axis] = cells.stride[axes[axis]], count[axis] = cells.real[axes[axis]];
    for (int axis = 1; axis >= 0; --axis)  // join axes whose positions are contiguous
      if (count[axis] > 1 && stride[axis] == stride[2] * count[2] && (axis == 1 || count[1] == 1)) {
        count[2] *= count[axis];
        count[axis] = 1;
      }
    for (int64_t outer = 0; outer < count[0]; ++outer)
      for (int64_t inner = 0; inner < count[1]; ++inner)
        if (!mark_run(cells.offset + outer * stride[0] + inner * stride[1], stride[2], count[2])) return false;
    return true;
  }

  bool mark_in_order(const Cells& cells) {
    for (int64_t a = 0; a < cells.real[0]; ++a)
      for (int64_t b = 0; b < cells.real[1]; ++b)
        for (int64_t c = 0; c < cells.real[2]; ++c) {
          const int64_t place = cells.offset + a * cells.stride[0] + b * cells.stride[1] + c * cells.stride[2];
          if (!mark_row(order_[place])) return false;
        }
    return true;
  }

  bool mark_row(int64_t row) {
    if (row < 0 || row >= w_.length) return fails(kBadRow, row);
    ++marked_;
    return mark_word(row >> 6, uint64_t(1) << (row & 63));
  }

  bool mark_word(int64_t word, uint64_t bits) {
    const uint64_t again = written_[word] & bits;
    written_[word] |= bits;
    return again ? fails(kTwice, 64 * word + __builtin_ctzll(again)) : true;
  }

  // Marks `count` rows that are `stride` >= 0 apart; the stride of one row is ignored.
  bool mark_run(int64_t row, int64_t stride, int64_t count) {
    if (count == 1) return mark_word(row >> 6, uint64_t(1) << (row & 63));
    if (stride == 0) return fails(kTwice, row);
    if (stride == 1) return mark_range(row, count);
    if (stride >= 64) {
      uint64_t again = 0;
      for (int64_t n = 0, at = row; n < count; ++n, at += stride) {
        uint64_t& word = written_[at >> 6];
        const uint64_t bit = uint64_t(1) << (at & 63);
        again |= word & bit;
        word |= bit;
      }
      return again ? fails(kTwice, row) : true;
    }
    uint64_t comb = 0;
    for (int64_t bit = 0; bit < 64; bit += stride) comb |= uint64_t(1) << bit;
    int64_t word = row >> 6, phase = row & 63;
    while (count > 0) {
      uint64_t bits = comb << phase;
      int64_t here = uint32_t(63 - phase) / uint32_t(stride) + 1;
      if (here > count) {
        here = count;
        bits &= (uint64_t(2) << (phase + (count - 1) * stride)) - 1;
      }
      if (!mark_word(word, bits)) return false;
      count -= here;
      phase += here * stride - 64;
      ++word;
    }
    return true;
  }

  bool mark_range(int64_t row, int64_t count) {
    const int64_t end = row + count, first = row >> 6, last = (end - 1) >> 6;
    const uint64_t low = ~uint64_t(0) << (row & 63), high = ~uint64_t(0) >> (63 - ((end - 1) & 63));
    if (first == last) return mark_word(first, low & high);
    uint64_t again = 0;
    for (int64_t word = first + 1; word < last; ++word) again |= written_[word], written_[word] = ~uint64_t(0);
    if (again) return fails(kTwice, row);
    return mark_word(first, low) && mark_word(last, high);
  }

  bool mark_merges(int64_t first, int64_t last) {
    const int32_t* rows = w_.rows;
    for (int64_t m = first; m < last;) {
      const int64_t count = std::min<int64_t>(kRun, last - m);
      const int64_t row = rows[m];
      uint32_t differs = 0;
      for (int64_t n = 0; n < count; ++n) differs |= uint32_t(rows[m + n]) - uint32_t(row + n);
      if (!differs && row >= 0 && row + count <= w_.length) {
        marked_ += count;
        if (!mark_range(row, count)) return false;
      } else {
        for (int64_t n = 0; n < count; ++n)
          if (!mark_row(rows[m + n])) return false;
      }
      m += count;
    }
    return true;
  }

  int64_t first_missing() const {
    for (size_t word = 0; word < written_.size(); ++word)
      if (~written_[word]) return std::min<int64_t>(64 * word + __builtin_ctzll(~written_[word]), w_.length - 1);
    return w_.length - 1;
  }

  // Returns the row of a cell of a partial, -1 for padding.
  int64_t row_of_cell(const Partial& own, int64_t cell) const {
    int64_t position = own.base + cell * own.step;
    if (own.real >= 0) {
      if (cell >= own.real) return -1;
      return order_ ? order_[position] : position;
    }
    const Tile& tile = boxes_[own.base];
    const View& view = w_.views[tile.view];
    const Cells cells = cells_of(view, tile.tile);
    position = cells.offset;
    for (int axis = 2; axis >= 0; --axis) {
      const int64_t at = cell % view.box[axis];
      cell /= view.box[axis];
      if (at >= cells.real[axis]) return -1;
      position += at * cells.stride[axis];
    }
    return order_ ? order_[position] : position;
  }

  bool check_sources(int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m)
      if (w_.indptr[m + 1] < w_.indptr[m]) return fails(kBadSource, w_.rows[m]);
    if (first < last && (w_.indptr[first] < 0 || w_.indptr[last] > w_.sources_count)) return fails(kBadSource, first);
    find_ends();
    for (int64_t m = first; m < last;) {
      const int64_t period = check_period(m, last);
      if (!period) return false;
      m += period + repeated(m, last);
    }
    const int64_t read = first < last ? w_.indptr[last] - w_.indptr[first] : 0;
    if (read != cells_) return fails(kUnread, cells_ - read);
    return true;
  }

  void find_ends() {
    for (int64_t n = int64_t(partials_.size()) - 1; n >= 0; --n) {
      Partial& own = partials_[n];
      const bool last = n + 1 == int64_t(partials_.size()) || own.real != w_.block || partials_[n + 1].real <= 0;
      const bool goes_on = !last && partials_[n + 1].step == own.step &&
                           partials_[n + 1].base == int64_t(own.base) + int64_t(own.real) * own.step;
      own.end = goes_on ? partials_[n + 1].end : int32_t(n * w_.block + std::max(own.real, 0));
    }
  }

  // Checks combined rows from row m on, source by source, and returns how many it checked, 0 for a fault. Sets period_
  // to this number if it is a common multiple of the steps of the rows' partials, else to 0.
  int64_t check_period(int64_t m, int64_t last) {
    const int32_t *indptr = w_.indptr, *sources = w_.sources;
    const uint32_t count = uint32_t(partials_.size()), block = uint32_t(w_.block);
    int64_t common = 1, n = m, stop = std::min(m + (order_ ? kLongestPeriod : kShortestPeriod), last);
    bool goes_on = !order_;
    for (; n < stop; ++n) {
      const int32_t row = w_.rows[n];
      bool sound = true, rises = true;
      int32_t before = -1;
      for (int32_t at = indptr[n]; at < indptr[n + 1]; ++at) {
        const uint32_t source = uint32_t(sources[at]), number = shift_ < 0 ? source / block : source >> shift_;
        if (number >= count || !partials_[number].real) return fails(kBadSource, row), 0;
        const Partial& own = partials_[number];
        const int64_t cell = int64_t(source) - int64_t(number) * block;
        if (own.real < 0 || order_) {
          sound &= row_of_cell(own, cell) == row;
          goes_on = false;
        } else {
          sound &= (cell < own.real) & (own.base + cell * own.step == row);
          if (goes_on && uint32_t(common) % uint32_t(own.step)) {
            common = own.step > 0 ? std::lcm(common, int64_t(own.step)) : kLongestPeriod;
            goes_on = common < kLongestPeriod;
            const int64_t multiple = goes_on ? (kShortestPeriod + common - 1) / common * common : kShortestPeriod;
            stop = std::min(m + multiple, last);
          }
        }
        rises &= int32_t(source) > before;
        before = int32_t(source);
      }
      if (!sound || (!rises && repeats(sources + indptr[n], indptr[n + 1] - indptr[n])))
        return fails(kBadSource, row), 0;
    }
    period_ = goes_on && (n - m) % common == 0 ? n - m : 0;
    return n - m;
  }

  // Combined rows [m, m + period_) were checked. Returns how many rows after them repeat them: each row is period_
  // larger than its counterpart, and each source is the cell that has this row.
  int64_t repeated(int64_t m, int64_t last) {
    const int64_t period = period_;
    if (!period || m + 2 * period > last) return 0;
    const int32_t *rows = w_.rows + m, *indptr = w_.indptr + m, *sources = w_.sources + indptr[0];
    const int64_t count = indptr[period] - indptr[0];
    int64_t times = (last - m) / period - 1;
    if (count) times = std::min(times, (w_.sources_count - indptr[0]) / count - 1);
    by_.resize(count);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t number = sources[n] / w_.block;
      by_[n] = int32_t(period / partials_[number].step);
      times = std::min<int64_t>(times, (partials_[number].end - 1 - sources[n]) / by_[n]);
    }
    for (int64_t n = 0; n < period; ++n)  // if sources ascend in the first and in the last period, they do in all
      for (int64_t at = indptr[n] + 1; at < indptr[n + 1]; ++at) {
        const int64_t own = at - indptr[0];
        if (sources[own - 1] >= sources[own] ||
            sources[own - 1] + times * by_[own - 1] >= sources[own] + times * by_[own])
          return 0;
      }
    uint32_t differs = 0;
    for (int64_t time = 0; time < times && !differs; ++time) {
      for (int64_t n = 0; n < period; ++n) {
        differs |= uint32_t(rows[n + period]) - uint32_t(rows[n] + period);
        differs |= uint32_t(indptr[n + period]) - uint32_t(indptr[n] + count);
      }
      differs |= uint32_t(indptr[2 * period]) - uint32_t(indptr[period] + count);
      for (int64_t n = 0; n < count; ++n) differs |= uint32_t(sources[n + count]) - uint32_t(sources[n] + by_[n]);
      rows += period, indptr += period, sources += count;
    }
    return differs ? 0 : times * period;
  }

  bool repeats(const int32_t* sources, int64_t count) {
    sorted_.assign(sources, sources + count);
    std::sort(sorted_.begin(), sorted_.end());
    return std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end();
  }

  static constexpr int64_t kRun = 64;                                    // number of combined rows marked at once
  static constexpr int64_t kShortestPeriod = 64, kLongestPeriod = 4096;  // in combined rows

  const Writers w_;
  std::vector<uint64_t> written_;
  std::vector<int64_t> starts_, tiles_, used_;
  std::vector<uint8_t> alone_;
  std::vector<Partial> partials_;
  std::vector<Tile> boxes_;
  std::vector<int32_t> sorted_, by_;
  const int32_t* order_ = nullptr;
  int shift_ = -1;  // block == 1 << shift_; -1 if block is no power of two
  int64_t marked_ = 0, cells_ = 0, period_ = 0;
  Finding finding_{kSound, 0};
};

}  // namespace spattn
