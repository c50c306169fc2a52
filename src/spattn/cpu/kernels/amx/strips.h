// Products on AMX tiles that wait for their turn.
//
// A product keeps the multiplier of tiles busy for about a hundred cycles and needs few instructions. Run one by one
// between stretches of vector instructions that do not depend on them, products cost next to nothing.
#pragma once
#include "amx/tiles.h"

namespace spattn {
namespace SPATTN_ISA {

// C = A B, or C += A B, for 2 by 2 tiles of C, or 2 by 1.
struct Strip {
  TileFactor a, b;
  int64_t steps;
  float* c;
  int64_t ld;  // bytes
  bool add, wide;

  void run() const {
    if (wide) {
      tile_product<2, 2>(a, b, steps, add, c, ld);
    } else {
      tile_product<2, 1>(a, b, steps, add, c, ld);
    }
  }
};

struct Strips {
  Strip* list;
  int64_t count = 0, done = 0;

  explicit Strips(Strip* memory) : list(memory) {}

  // A product with 2 by `columns` tiles of C.
  void push(const TileFactor& a, TileFactor b, int64_t steps, bool add, float* c, int64_t ld, int64_t columns) {
    for (; columns > 0; columns -= 2, c += 2 * kTileColumns) {
      list[count++] = {a, b, steps, c, ld, add, columns > 1};
      b.data = b.at(2, 0, 0);
    }
  }

  // Runs one of `shares` shares of what waits.
  void run(int64_t shares) {
    for (const int64_t end = done + (count - done + shares - 1) / shares; done < end; ++done) list[done].run();
  }

  void finish() {
    run(1);
    count = done = 0;
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
