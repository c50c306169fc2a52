// ALiBi: score + slope * (key - query), with one slope per query head (arXiv:2108.12409).
#pragma once

struct Alibi {
  // `T` and `P` are numbers or vectors of numbers: scores, and positions of the query and the key.
  template <class T, class P> static SPATTN_SCORE T value(T score, P query, P key, T slope) {
    return score + slope * score_number<T>(key - query);
  }

  // The derivative with respect to the score.
  template <class T, class P> static SPATTN_SCORE T derivative(T, P, P, T) { return T{} + 1; }
};
