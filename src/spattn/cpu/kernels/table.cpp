// Compiled once per instruction set, with -DSPATTN_ISA=name and that set's flags, into a library of its own.
#include "backward.h"
#include "few_queries.h"
#include "forward.h"
#include "kernels.h"
#include "output.h"

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

namespace spattn {
namespace SPATTN_ISA {

// How each type is computed: by vectors of queries where the rows fill one, which `vdpbf16ps` does at half the price.
template <class Path> struct Multiply {
  static constexpr ItemFunction forward = SPATTN_ISA::forward<Path>;
  static constexpr ScratchFunction bytes = scratch_bytes<typename Path::T>;
};
#if defined(__AVX512BF16__)
using ForwardBfloat16 = ByRows<Bfloat16, Multiply<Paired>, kLanes<float> / 2>;
#else
using ForwardBfloat16 = ByRows<Bfloat16, Multiply<Plain<Bfloat16>>, kLanes<float>>;
#endif
using ForwardFloat32 = ByRows<Float32, Multiply<Plain<Float32>>, kLanes<float>>;
using ForwardFloat64 = ByRows<Float64, Multiply<Plain<Float64>>, kLanes<double>>;
using ForwardFloat16 = ByRows<Float16, Multiply<Plain<Float16>>, kLanes<float>>;

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {ForwardFloat32::bytes, ForwardFloat64::bytes, ForwardFloat16::bytes, ForwardBfloat16::bytes},
    {ForwardFloat32::forward, ForwardFloat64::forward, ForwardFloat16::forward, ForwardBfloat16::forward},
    {merge<Float32>, merge<Float64>, merge<Float16>, merge<Bfloat16>},
    {backward_scratch_bytes<float>, backward_scratch_bytes<double>, backward_scratch_bytes<float>,
     backward_scratch_bytes<float>},
    {backward<Float32>, backward<Float64>, backward<Float16>, backward<Bfloat16>},
    {merge_dq<Float32>, merge_dq<Float64>, merge_dq<Float16>, merge_dq<Bfloat16>},
    {add_units<Float32>, add_units<Float64>, add_units<Float16>, add_units<Bfloat16>},
};

}  // namespace SPATTN_ISA
}  // namespace spattn
