// Compiled once per instruction set, with -DSPATTN_ISA=name and that set's flags, into a library of its own.
#include "forward.h"
#include "kernels.h"
#include "output.h"

#define SPATTN_STRING_(x) #x
#define SPATTN_STRING(x) SPATTN_STRING_(x)

namespace spattn {
namespace SPATTN_ISA {

extern const KernelTable table = {
    SPATTN_STRING(SPATTN_ISA),
    {scratch_bytes<float>, scratch_bytes<double>, scratch_bytes<float>, scratch_bytes<float>},
    {forward<Float32>, forward<Float64>, forward<Float16>, forward<Bfloat16>},
    {merge<Float32>, merge<Float64>, merge<Float16>, merge<Bfloat16>},
};

}  // namespace SPATTN_ISA
}  // namespace spattn
