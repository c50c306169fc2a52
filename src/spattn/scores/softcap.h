// Soft-cap: cap * tanh(score / cap), with one cap per query head (Gemma 2).
#pragma once

struct Softcap {
  // `T` is a number or a vector of numbers; the including kernel defines score_tanh() for it. Products with 1 / cap: one
  // division per row, not per pair.
  template <class T, class P> static SPATTN_SCORE T value(T score, P, P, T cap) {
    return cap * score_tanh(score * ((T{} + 1) / cap));
  }

  // The derivative with respect to the score.
  template <class T, class P> static SPATTN_SCORE T derivative(T score, P, P, T cap) {
    const T t = score_tanh(score * ((T{} + 1) / cap));
    return T{} + 1 - t * t;
  }
};
