// Forward kernels of float16 and bfloat16. Each instruction set compiles this file into its library, with -DSPATTN_ISA=name.
#include "forward/by_rows.h"
#include "forward/forward.h"
#include "forward/paired.h"
#include "forward/plain.h"
#include "kernels.h"
#if defined(SPATTN_AMX)
#include "amx/forward.h"
#endif

namespace spattn {
namespace SPATTN_ISA {

// AMX kernels need enough queries to fill their tiles; the others have one query per vector lane.
#if defined(SPATTN_AMX)
using ForwardBfloat16 = ByRows<Bfloat16, TileForward<WholeParts>, kLanes<float> / 2>;
using ForwardFloat16 = ByRows<Float16, TileForward<TwoParts>, kLanes<float> / 2>;
#else
#if defined(__AVX512BF16__)
using ForwardBfloat16 = ByRows<Bfloat16, VectorForward<Paired>, kLanes<float> / 2>;
#else
using ForwardBfloat16 = ByRows<Bfloat16, VectorForward<Plain<Bfloat16> >, kLanes<float> >;
#endif
using ForwardFloat16 = ByRows<Float16, VectorForward<Plain<Float16> >, kLanes<float> >;
#endif

extern const ForwardKernels forward_float16 = forward_kernels<Float16, ForwardFloat16>();
extern const ForwardKernels forward_bfloat16 = forward_kernels<Bfloat16, ForwardBfloat16>();

}  // namespace SPATTN_ISA
}  // namespace spattn
