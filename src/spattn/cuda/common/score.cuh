// Score function of a kernel. For kernels with one, generated source (score/source.py) precedes the kernel file: it
// defines SPATTN_SCORED, ScoreArgs and Score.
//
//   ScoreArgs                                  captured numbers and arrays of a call
//   Score::Head<T>                             values that are the same for all pairs of a batch entry and query head
//   Score::open<T>(args, offset, batch, head)  computes a Head; `offset` is kv_len - q_len
//   Score::value, Score::derivative            take the scaled score (natural units), the positions of query and key,
//                                              and a Head
//   Score::inside                              whether value<true>(), which checks no index, may be used in a tile
//   Score::kRelative                           value() and derivative() depend on positions by key - query alone
//   Score::kDiagonal                           value() depends on positions by one number only: diagonal() computes it,
//                                              value_on() takes it
//   Score::Uses                                the uses of captured arrays that need a gradient
//   Score::kDrops, Head::dropout               whether weights are dropped after the softmax; which (dropout.cuh)
//   Score::kIdentity                           value() returns the score: calls with dropout alone
//
// Kernels apply value() and derivative() before the mask, so that their results for masked pairs may be arbitrary.
#pragma once

#include "common/element.cuh"
#include "common/score_functions.cuh"

#ifndef SPATTN_SCORED
#define SPATTN_SCORED 0
#endif

namespace spattn {

constexpr bool kScored = SPATTN_SCORED;  // there are ScoreArgs

#if !SPATTN_SCORED
struct ScoreArgs {};

struct Score {  // the identity
  template <class T>
  struct Head {
    NoDropout<T> dropout;
  };
  static constexpr bool kDrops = false, kIdentity = true;

  template <class T>
  static SPATTN_SCORE Head<T> open(const ScoreArgs&, int, int, int) {
    return {};
  }
  template <bool kInside = false, class T>
  static SPATTN_SCORE T value(T score, int, int, const Head<T>&) {
    return score;
  }
  template <bool kInside = false, class T>
  static SPATTN_SCORE T derivative(T, int, int, const Head<T>&) {
    return T(1);
  }
  static constexpr bool kPositions = false, kRelative = false, kDiagonal = false;
  template <class T>
  using Diagonal = int;
  template <class T>
  static SPATTN_SCORE bool inside(int, int, int, int, const Head<T>&) {
    return true;
  }
  using Uses = ScoreUses<>;
};
#endif

constexpr bool kModified = !Score::kIdentity;

}  // namespace spattn
