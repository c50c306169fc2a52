// Backward kernels. Each instruction set compiles this file into its library, with -DSPATTN_ISA=name.
#include "backward/backward.h"
#include "backward/sink_gradient.h"
#include "finish/results.h"
#include "kernels.h"
#include "pairwise/backward.h"
#if defined(SPATTN_AMX)
#include "amx/backward.h"
#endif

namespace spattn {
namespace SPATTN_ISA {

// Backward dispatch: runs the pairwise kernel for plans with one-query tiles, else `kTiles`.
template <class E, BackwardFunction kTiles = backward<E>, class Scratch = BackwardScratch<typename E::Compute>>
struct BackwardByRows {
  static size_t bytes(const Call& call) noexcept {
    return by_pairs(call) ? scratch_bytes<PairwiseBackwardScratch<typename E::Compute>>(call)
                          : scratch_bytes<Scratch>(call);
  }

  static void run(const Call& call, int64_t batch, int64_t head, const Work& work, const Sums& sums,
                  char* scratch) noexcept {
    if (call.score && !takes_part({call, batch, head, work}, scratch)) return;
    by_pairs(call) ? pairwise_backward<E>({call, batch, head, work}, sums, scratch)
                   : kTiles(call, batch, head, work, sums, scratch);
  }
};

#if defined(SPATTN_AMX)
using BackwardBfloat16 = BackwardByRows<Bfloat16, tile_backward, TileBackwardScratch>;
#else
using BackwardBfloat16 = BackwardByRows<Bfloat16>;
#endif

template <class E, class ByRows = BackwardByRows<E>>
constexpr BackwardKernels kernels = {ByRows::bytes, normalise<E>, ByRows::run,
                                     merge_dq<E>,   add_units<E>, sink_gradient<E>};

extern const BackwardKernels backward_float32 = kernels<Float32>;
extern const BackwardKernels backward_float64 = kernels<Float64>;
extern const BackwardKernels backward_float16 = kernels<Float16>;
extern const BackwardKernels backward_bfloat16 = kernels<Bfloat16, BackwardBfloat16>;

}  // namespace SPATTN_ISA
}  // namespace spattn
