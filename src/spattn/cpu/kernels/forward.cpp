// Forward kernels of float32 and float64. Each instruction set compiles this file into its library, with -DSPATTN_ISA=name.
#include "forward/by_rows.h"
#include "forward/forward.h"
#include "forward/plain.h"
#include "kernels.h"

namespace spattn {
namespace SPATTN_ISA {

extern const ForwardKernels forward_float32 =
    forward_kernels<Float32, ByRows<Float32, VectorForward<Plain<Float32>>, kLanes<float>>>();
extern const ForwardKernels forward_float64 =
    forward_kernels<Float64, ByRows<Float64, VectorForward<Plain<Float64>>, kLanes<double>>>();

}  // namespace SPATTN_ISA
}  // namespace spattn
