// Compiled once per instruction set, with -DSPATTN_ISA=name and that set's flags, into a library of its own.
#include "backward.h"
#include "forward.h"
#include "kernels.h"
#include "output.h"
#if defined(SPATTN_AMX)
#include "amx_backward.h"
#endif

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

namespace spattn {
namespace SPATTN_ISA {

#if defined(__AVX512BF16__)
using Bfloat16Path = Paired;
#else
using Bfloat16Path = Plain<Bfloat16>;
#endif

#if defined(SPATTN_AMX)
constexpr BackwardFunction kBfloat16Backward = tile_backward;
constexpr ScratchFunction kBfloat16BackwardScratch = tile_backward_scratch_bytes;
#else
constexpr BackwardFunction kBfloat16Backward = backward<Bfloat16>;
constexpr ScratchFunction kBfloat16BackwardScratch = backward_scratch_bytes<float>;
#endif

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {scratch_bytes<float>, scratch_bytes<double>, scratch_bytes<float>, scratch_bytes<float>},
    {forward<Plain<Float32>>, forward<Plain<Float64>>, forward<Plain<Float16>>, forward<Bfloat16Path>},
    {merge<Float32>, merge<Float64>, merge<Float16>, merge<Bfloat16>},
    {backward_scratch_bytes<float>, backward_scratch_bytes<double>, backward_scratch_bytes<float>,
     kBfloat16BackwardScratch},
    {backward<Float32>, backward<Float64>, backward<Float16>, kBfloat16Backward},
    {merge_dq<Float32>, merge_dq<Float64>, merge_dq<Float16>, merge_dq<Bfloat16>},
    {add_units<Float32>, add_units<Float64>, add_units<Float16>, add_units<Bfloat16>},
};

}  // namespace SPATTN_ISA
}  // namespace spattn
