// Kernel table of an instruction set. Each set compiles this file to a library of its own, with -DSPATTN_ISA=name.
#include "backward/backward.h"
#include "backward/sink_gradient.h"
#include "finish/results.h"
#include "forward/by_rows.h"
#include "forward/forward.h"
#include "forward/paired.h"
#include "forward/plain.h"
#include "kernels.h"
#include "pairwise/backward.h"
#if defined(SPATTN_AMX)
#include "amx/backward.h"
#include "amx/forward.h"
#endif

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

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

// Kernels by dtype. AMX kernels need enough queries to fill their tiles; the others have one query per vector lane.
#if defined(SPATTN_AMX)
using ForwardBfloat16 = ByRows<Bfloat16, TileForward<WholeParts>, kLanes<float> / 2>;
using ForwardFloat16 = ByRows<Float16, TileForward<TwoParts>, kLanes<float> / 2>;
using BackwardBfloat16 = BackwardByRows<Bfloat16, tile_backward, TileBackwardScratch>;
#else
#if defined(__AVX512BF16__)
using ForwardBfloat16 = ByRows<Bfloat16, VectorForward<Paired>, kLanes<float> / 2>;
#else
using ForwardBfloat16 = ByRows<Bfloat16, VectorForward<Plain<Bfloat16>>, kLanes<float>>;
#endif
using ForwardFloat16 = ByRows<Float16, VectorForward<Plain<Float16>>, kLanes<float>>;
using BackwardBfloat16 = BackwardByRows<Bfloat16>;
#endif
using ForwardFloat32 = ByRows<Float32, VectorForward<Plain<Float32>>, kLanes<float>>;
using ForwardFloat64 = ByRows<Float64, VectorForward<Plain<Float64>>, kLanes<double>>;
using BackwardFloat32 = BackwardByRows<Float32>;
using BackwardFloat64 = BackwardByRows<Float64>;
using BackwardFloat16 = BackwardByRows<Float16>;

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {ForwardFloat32::bytes, ForwardFloat64::bytes, ForwardFloat16::bytes, ForwardBfloat16::bytes},
    {ForwardFloat32::forward, ForwardFloat64::forward, ForwardFloat16::forward, ForwardBfloat16::forward},
    {merge<Float32>, merge<Float64>, merge<Float16>, merge<Bfloat16>},
    {BackwardFloat32::bytes, BackwardFloat64::bytes, BackwardFloat16::bytes, BackwardBfloat16::bytes},
    {normalise<Float32>, normalise<Float64>, normalise<Float16>, normalise<Bfloat16>},
    {BackwardFloat32::run, BackwardFloat64::run, BackwardFloat16::run, BackwardBfloat16::run},
    {merge_dq<Float32>, merge_dq<Float64>, merge_dq<Float16>, merge_dq<Bfloat16>},
    {add_units<Float32>, add_units<Float64>, add_units<Float16>, add_units<Bfloat16>},
    {sink_gradient<Float32>, sink_gradient<Float64>, sink_gradient<Float16>, sink_gradient<Bfloat16>},
};

}  // namespace SPATTN_ISA
}  // namespace spattn
