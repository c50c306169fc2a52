// Compiled once per instruction set, with -DSPATTN_ISA=name and that set's flags, into a library of its own.
#include "backward/backward.h"
#include "decode/decode.h"
#include "forward/forward.h"
#include "kernels.h"
#include "finish/results.h"
#if defined(SPATTN_AMX)
#include "amx/backward.h"
#include "amx/forward.h"
#endif

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

namespace spattn {
namespace SPATTN_ISA {

// How each type is computed: by vectors of queries, or by tiles, where the rows fill them.
template <class Path> struct Multiply {
  static constexpr ItemFunction forward = SPATTN_ISA::forward<Path>;
  static constexpr ScratchFunction bytes = tile_scratch_bytes<typename Path::T>;
};
#if defined(SPATTN_AMX)
template <class Path> struct MultiplyTiles {
  static constexpr ItemFunction forward = amx_forward<Path>;
  static constexpr ScratchFunction bytes = amx_scratch_bytes<Path>;
};
using ForwardBfloat16 = ByRows<Bfloat16, MultiplyTiles<WholeParts>, kLanes<float> / 2>;
using ForwardFloat16 = ByRows<Float16, MultiplyTiles<TwoParts>, kLanes<float> / 2>;
#elif defined(__AVX512BF16__)
using ForwardBfloat16 = ByRows<Bfloat16, Multiply<Paired>, kLanes<float> / 2>;  // at half the price of multiply-adds
using ForwardFloat16 = ByRows<Float16, Multiply<Plain<Float16>>, kLanes<float>>;
#else
using ForwardBfloat16 = ByRows<Bfloat16, Multiply<Plain<Bfloat16>>, kLanes<float>>;
using ForwardFloat16 = ByRows<Float16, Multiply<Plain<Float16>>, kLanes<float>>;
#endif
using ForwardFloat32 = ByRows<Float32, Multiply<Plain<Float32>>, kLanes<float>>;
using ForwardFloat64 = ByRows<Float64, Multiply<Plain<Float64>>, kLanes<double>>;

#if defined(SPATTN_AMX)
constexpr BackwardFunction kBfloat16Backward = tile_backward;
constexpr ScratchFunction kBfloat16BackwardScratch = tile_backward_scratch_bytes;
#else
constexpr BackwardFunction kBfloat16Backward = backward<Bfloat16>;
constexpr ScratchFunction kBfloat16BackwardScratch = backward_scratch_bytes<float>;
#endif

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {ForwardFloat32::bytes, ForwardFloat64::bytes, ForwardFloat16::bytes, ForwardBfloat16::bytes},
    {ForwardFloat32::forward, ForwardFloat64::forward, ForwardFloat16::forward, ForwardBfloat16::forward},
    {merge<Float32>, merge<Float64>, merge<Float16>, merge<Bfloat16>},
    {backward_scratch_bytes<float>, backward_scratch_bytes<double>, backward_scratch_bytes<float>,
     kBfloat16BackwardScratch},
    {normalise<Float32>, normalise<Float64>, normalise<Float16>, normalise<Bfloat16>},
    {backward<Float32>, backward<Float64>, backward<Float16>, kBfloat16Backward},
    {merge_dq<Float32>, merge_dq<Float64>, merge_dq<Float16>, merge_dq<Bfloat16>},
    {add_units<Float32>, add_units<Float64>, add_units<Float16>, add_units<Bfloat16>},
};

}  // namespace SPATTN_ISA
}  // namespace spattn
