// Items of few queries that each have one tile of interleaved keys, as boxes of an image have them: several at a time,
// so that where one waits, for the largest score of a row or the logarithm of its sum, others go on.
//
//   rows of S, P, O: box after box, the cells of its query tile within
//   floor: multiply-adds; measured by benchmarks/grids_cpu.py
#pragma once
#include "decode/decode.h"
#include "finish/exact.h"
#include "finish/finish.h"
#include "kernels.h"
#include "tile/item.h"
#include <new>

namespace spattn {
namespace SPATTN_ISA {

template <class T> struct Box {
  const Work* work;
  Mask mask;
  int64_t cells, row;  // of the query tile; the first of its rows
  int64_t keys;        // cells of the key tile
  Runs<T> runs;
};

// The boxes with which a list of items begins, as many as there is room for, in rows and for their keys.
template <class E> struct Boxes {
  using T = typename E::Compute;
  alignas(Box<T>) char room[kMostBoxes * sizeof(Box<T>)];
  int64_t count = 0, rows = 0;

  Boxes(const Call& call, int64_t batch, int64_t head, const Work* work, int64_t items, const KeyHead& keys,
        const DecodeScratch<T>& s) {
    if (!s.interleaved) return;
    int64_t first = call.kv_len, last = 0;
    for (; count < items && count < kMostBoxes && work[count].end - work[count].begin == 1; ++count) {
      const Item item = {call, batch, head, work[count]};
      const Listed at = item.first();
      const Tile queries = item.query_tile(), tile = item.key_tile(at);
      first = tile.start < first ? tile.start : first, last = tile.last() > last ? tile.last() : last;
      if (!Runs<T>::pay(tile) || rows + queries.cells() > s.width.query) return;
      if (count && !s.interleaved.holds(first, last)) return;
      Box<T>* box = new (room + count * sizeof(Box<T>)) Box<T>{work + count, item.mask(at), queries.cells(), rows, tile.cells(), s.runs.of_tile(count)};
      box->runs.template list<E>(tile, keys, s.interleaved, call);
      rows += list_positions(queries, s.position.query + rows);
    }
  }

  template <class Visit> void each(const Visit& visit) const {
    for (int64_t i = 0; i < count; ++i) visit(reinterpret_cast<const Box<T>*>(room)[i]);
  }
};

template <class E, class T = typename E::Compute>
void decode(const Boxes<E>& boxes, const Call& call, int64_t batch, int64_t head, DecodeScratch<T>& s) {
  const Logits<T> logits(call.scale);
  const int64_t L = kLanes<T>, vectors = (boxes.rows + L - 1) / L;
  gather_queries<E>(Head(call.q, batch, head), 0, boxes.rows, boxes.rows, call.head_dim, s.width.key, s.position.query, s.query);
  give_sign(boxes.rows, logits, s);
  boxes.each([&](const Box<T>& box) {
    score_runs(box.runs, call.head_dim, box.row, box.row + box.cells, s);
    pad_scores(box.keys, box.row, box.row + box.cells, s);
    find_largest(box.mask, box.cells, round_up(box.keys, L), box.cells, s.scores + box.row * s.ld, s.ld,
                 s.rows.from(box.row));
  });
  s.rows.set_reference(vectors, logits);
  boxes.each([&](const Box<T>& box) {
    weigh_scores(true, round_up(box.keys, L), box.cells, logits, s.scores + box.row * s.ld, s.ld, s.rows.from(box.row));
  });
  boxes.each([&](const Box<T>& box) {
    add_values<Native<T>>(box.runs, box.keys, true, box.row, box.row + box.cells, s);
  });
  s.rows.find_lse(boxes.rows, logits);
  boxes.each([&](const Box<T>& box) {
    const Item item = {call, batch, head, *box.work};
    const RowStatistics<T> own = s.rows.from(box.row);
    const ExactRowBuffer exact = s.exact.from(box.row);
    leave_marked(item, box.cells, s.position.key, exact);
    write_rows<E>(item, box.cells, own.row_sum, s.position.from(box.row), own, s.output.from(box.row), exact);
  });
}

}  // namespace SPATTN_ISA
}  // namespace spattn
