// Backward dispatch: plans with one-query tiles run pair by pair, others `kTiles`.
#pragma once
#include "backward/backward.h"
#include "kernels.h"
#include "pairwise/backward.h"
#include "tile/arena.h"
#include "tile/item.h"

namespace spattn {
namespace SPATTN_ISA {

template <class E, BackwardFunction kTiles = backward<E>, class Scratch = BackwardScratch<typename E::Compute>>
struct BackwardByRows {
  static size_t bytes(const Call& call) noexcept {
    return by_pairs(call) ? scratch_bytes<PairwiseBackwardScratch<typename E::Compute>>(call)
                          : scratch_bytes<Scratch>(call);
  }

  static void run(const Call& call, int64_t batch, int64_t head, const Work& work, const Sums& sums,
                  char* scratch) noexcept {
    by_pairs(call) ? pairwise_backward<E>({call, batch, head, work}, sums, scratch)
                   : kTiles(call, batch, head, work, sums, scratch);
  }
};

}  // namespace SPATTN_ISA
}  // namespace spattn
