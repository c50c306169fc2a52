// Items of few queries that each have one tile of interleaved keys, as boxes of an image have them: several at a time,
// so that where one waits, for the largest score of a row or the logarithm of its sum, others go on. As all keys of a
// row are there, nothing is ever rescaled.
//
//   rows of S, P, O: box after box, the cells of its query tile within
//   floor: multiply-adds; measured by benchmarks/grids_cpu.py
#pragma once
#include "decode/decode.h"
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

// Items of one head that are computed together. What is in the ring of interleaved keys is theirs as long as they are.
template <class E> struct Boxes {
  using T = typename E::Compute;

  struct Box {
    const Work* work;
    Mask mask;
    int64_t cells, row;  // of the query tile; the first of its rows
    int64_t keys;        // cells of the key tile
    Tile tile;
    Runs<T> runs;
    const Reach* reached;  // by its rows, as find_reached() leaves it

    // Do its rows reach the cells that those of another one do?
    bool reaches_as(const Box& other) const {
      return mask.bits == other.mask.bits && keys == other.keys && cells == other.cells && runs.step == other.runs.step;
    }
  };

  const Call& call;
  int64_t batch, head;
  KeyHead keys;
  Logits<T> logits;
  DecodeScratch<T>& s;
  int64_t count, rows;
  Box boxes[kMostBoxes];

  Boxes(const Item& any, const KeyHead& keys, DecodeScratch<T>& s)
      : call(any.call), batch(any.batch), head(any.head), keys(keys), logits(any.call.scale), s(s) {
    for (int64_t i = 0; i < kMostBoxes; ++i) boxes[i].runs = s.runs.of_tile(i);
  }

  // Takes those with which a list of items begins, as many as there is room for, in rows and for their keys. Returns
  // how many.
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
      if (i && box.reaches_as(boxes[i - 1])) {
        box.reached = boxes[i - 1].reached;
      } else {
        find_reached<T>(box.mask, box.runs.step, box.cells, box.keys, box.cells, s.reached + box.row);
        box.reached = s.reached + box.row;
      }
    }
    return count;
  }

  Item item(const Box& box) const { return {call, batch, head, *box.work}; }

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
  boxes.each([&](const Box& box) { s.meetings.add(box.runs, box.row, box.row + box.cells, box.reached); });
  s.meetings.score(s.query, call.head_dim, s.scores);
  boxes.each([&](const Box& box) {
    pad_scores(box.keys, box.row, box.row + box.cells, s);
    find_largest(box.mask, box.cells, box.reached, box.cells, s.scores + box.row * s.ld, s.ld, s.rows.from(box.row));
  });
  s.rows.set_reference(vectors, logits);
  s.output.prefetch(boxes.rows);  // the room in a cache that Q and K had is free
  boxes.each([&](const Box& box) {
    weigh_scores(true, box.reached, box.cells, logits, s.scores + box.row * s.ld, s.ld, s.rows.from(box.row));
  });
  for (int64_t row = 0; row < vectors * L; row += L) {
    store(s.rows.rescale + row, T(1) / load<Vec<T>>(s.rows.row_sum + row));
  }
  bool finite = true;
  boxes.each([&](const Box& box) {
    const int64_t end = box.row + box.cells;
    finite &= add_values<Native<T>>(box.runs, box.row, end, box.reached, OutputFactors<T>{nullptr, s.rows.rescale}, s);
  });
  s.rows.find_lse(boxes.rows, logits);
  boxes.each([&](const Box& box) {
    const Item item = boxes.item(box);
    const RowStatistics<T> own = s.rows.from(box.row);
    const ExactRowBuffer exact = s.exact.from(box.row);
    leave_marked(item, box.cells, s.position.key, exact);
    write_rows<E>(item, box.cells, s.position.from(box.row), own, s.output.from(box.row), exact,
                  [&](int64_t, T* row) { return finite || scale_row(row, s.output.ld, T(1)); });
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
