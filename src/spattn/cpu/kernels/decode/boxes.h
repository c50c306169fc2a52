// Batches of few-query items with one interleaved key tile each, as boxes of an image have them: several items run
// interleaved, to hide the latency of row maxima and logarithms. As all keys of a row are present, nothing is rescaled.
//
//   rows of S, P, O: box by box, within a box the cells of its query tile
//   floor: multiply-adds; measured by benchmarks/regressions/grids_cpu.py
#pragma once
#include "decode/decode.h"
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

// Items of one head that run together. Their keys stay in the ring of interleaved keys meanwhile.
template <class E> struct Boxes {
  using T = typename E::Compute;

  struct Box {
    const Work* work;
    Mask mask;
    int64_t cells, row;  // of the query tile; its first row
    int64_t keys;        // cells of the key tile
    Tile tile;
    Runs<T> runs;
    const Reach* reached;  // by row, from find_reached()

    int64_t end() const { return row + cells; }
  };

  // The inputs of find_reached() for a box, and its list.
  struct Reached {
    const uint64_t* mask;
    int64_t cells, keys, step;
    Reach* rows;

    bool same(const Reached& other) const {
      return mask == other.mask && cells == other.cells && keys == other.keys && step == other.step;
    }
  };

  const Call& call;
  int64_t batch, head;
  KeyHead keys;
  Logits<T> logits;
  DecodeScratch<T>& s;
  int64_t count, rows;
  Box boxes[kMostBoxes];
  Reached last = {};  // of the previous box: most are equal
  int64_t lists = 0;

  Boxes(const Item& any, const KeyHead& keys, DecodeScratch<T>& s)
      : call(any.call), batch(any.batch), head(any.head), keys(keys), logits(any.call), s(s) {
    for (int64_t i = 0; i < kMostBoxes; ++i) boxes[i].runs = s.runs.of_tile(i);
  }

  // Takes items from the front of a list while their rows and keys fit. Returns their number.
  int64_t take(const Work* work, int64_t items) {
    count = rows = 0;
    if (!s.interleaved) return 0;
    for (int64_t low = call.kv_len, high = 0; count < items && count < kMostBoxes; ++count) {
      const Item item = {call, batch, head, work[count]};
      if (item.work.end - item.work.begin != 1) break;
      const Listed at = item.first();
      const Tile queries = item.query_tile();
      Box& box = boxes[count];
      const Tile& tile = box.tile = item.key_tile(at);
      box.work = work + count, box.mask = item.mask(at);
      box.cells = queries.cells(), box.row = rows, box.keys = tile.cells();
      if (!Runs<T>::pay(tile) || rows + box.cells > s.width.query) break;
      tile.cover(low, high);
      if (count && !s.interleaved.holds(low, high)) break;
      list_positions(queries, s.position.query + rows);
      find_rows<E>(item, box.cells, s.position.query + rows, rows, logits, s);
      rows += box.cells;
    }
    for (int64_t i = 0; i < count; ++i) {
      Box& box = boxes[i];
      box.runs.template list<E>(box.tile, keys, s.interleaved, call);
      box.reached = reached_by(box);
    }
    return count;
  }

  // The reach of a box's rows. The ring of lists has an entry for every box of a batch.
  const Reach* reached_by(const Box& box) {
    const Reached own = {box.mask.bits, box.cells, box.keys, box.runs.step,
                         s.reached_by_boxes + lists % kMostBoxes * call.plan.block_q};
    if (!own.same(last)) {
      find_reached<T>(box.mask, own.step, own.cells, own.keys, own.cells, own.rows);
      last = own, ++lists;
    }
    return last.rows;
  }

  Item item(const Box& box) const { return {call, batch, head, *box.work}; }

  // True if finite rows are final: no float64 fallback, no split-KV partials.
  bool finished() const {
    bool all = !call.marked;
    for (int64_t i = 0; i < count; ++i) all &= boxes[i].work->slot < 0;
    return all;
  }

  void write() const {
    const Results<E> results(call, batch, head);
    const int64_t* const position = s.position.query;
    for (int64_t row = 0; row < rows; ++row) {
      if (position[row] != kPadding) results.write(position[row], s.output.row(row), T(s.rows.lse[row]));
    }
  }

  template <class Visit> void each(const Visit& visit) const {
    for (int64_t i = 0; i < count; ++i) visit(boxes[i]);
  }
};

template <class E, class T = typename E::Compute>
void decode(const Boxes<E>& boxes, DecodeScratch<T>& s) {
  using Box = typename Boxes<E>::Box;
  const Call& call = boxes.call;
  const Logits<T>& logits = boxes.logits;
  const int64_t L = kLanes<T>, vectors = (boxes.rows + L - 1) / L;
  s.meetings.clear();
  boxes.each([&](const Box& box) { s.meetings.add(box.runs, box.row, box.end(), box.reached); });
  s.meetings.score(s.query, call.head_dim, s.scores);
  boxes.each([&](const Box& box) {
    pad_scores(box.keys, box.row, box.end(), s);
    find_largest(box.mask, box.cells, box.reached, box.cells, s.scores + box.row * s.ld, s.ld, s.rows.from(box.row));
  });
  s.rows.set_reference(vectors, logits);
  boxes.each([&](const Box& box) {
    s.output.from(box.row).prefetch(box.cells);  // Q and K no longer need their cache lines
    weigh_scores(true, box.reached, box.cells, logits, s.scores + box.row * s.ld, s.ld, s.rows.from(box.row));
  });
  for (int64_t row = 0; row < vectors * L; row += L) {
    store(s.rows.rescale + row, T(1) / load<Vec<T>>(s.rows.row_sum + row));
  }
  alignas(64) T sum[kLanes<T>] = {};
  const DividedOutput<T> divided = {s.rows.rescale, sum};
  boxes.each([&](const Box& box) { add_values<Native<T>>(box.runs, box.row, box.end(), box.reached, divided, s); });
  const bool finite = divided.finite();
  s.rows.find_lse(boxes.rows, logits);
  if (finite && boxes.finished()) return boxes.write();
  boxes.each([&](const Box& box) {
    const Item item = boxes.item(box);
    const RowStatistics<T> own = s.rows.from(box.row);
    const FallbackRowBuffer exact = s.exact.from(box.row);
    leave_marked(item, box.cells, s.position.key, exact);
    write_rows<E>(item, box.cells, s.position.from(box.row), own, s.output.from(box.row), exact,
                  [&](int64_t, T* row) { return finite || scale_row(row, s.output.ld, T(1)); });
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
