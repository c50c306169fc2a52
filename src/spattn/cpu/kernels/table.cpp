// Kernel table of an instruction set, and the operations of score programs, which both passes call. Each set compiles
// it into a library of its own, with -DSPATTN_ISA=name. The kernels are other files, to be compiled side by side.
#define SPATTN_DEFINES_OPERATIONS
#include "kernels.h"
#include "softmax/operations.h"

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

namespace spattn {
namespace SPATTN_ISA {

extern const ForwardKernels forward_float32, forward_float64, forward_float16, forward_bfloat16;
extern const BackwardKernels backward_float32, backward_float64, backward_float16, backward_bfloat16;

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {&forward_float32, &forward_float64, &forward_float16, &forward_bfloat16},
    {&backward_float32, &backward_float64, &backward_float16, &backward_bfloat16},
};

template void execute<float>(int, const Target<float>&, const Source<float>*);
template void execute<double>(int, const Target<double>&, const Source<double>*);
template void look_up<float>(const ScoreTable&, const Target<float>&, const Source<float>*);
template void look_up<double>(const ScoreTable&, const Target<double>&, const Source<double>*);

}  // namespace SPATTN_ISA
}  // namespace spattn
