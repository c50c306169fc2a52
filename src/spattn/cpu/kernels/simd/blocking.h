// The register blocking of the matrix products, which the layout of scratch and masks follows.
//
// Scores are kept transposed, one row per key: the keys of a tile then enter S' = K Q' as scalars and need no packing,
// the softmax statistics of neighbouring queries lie side by side in one vector, so that no reduction crosses lanes,
// and P' is at once the packed left operand of O += P V.
#pragma once

namespace spattn {
namespace SPATTN_ISA {

// Accumulators fill the register file, leaving room for one row of the right operand and a broadcast scalar.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;                  // that hold vectors
constexpr int kKeyRows = 8, kQueryVectors = 3;  // S': 8 keys by 3 vectors of queries
constexpr int kOutputRows = 6, kOutputVectors = 4;
#else
constexpr int kRegisters = 16;
constexpr int kKeyRows = 4, kQueryVectors = 3;
constexpr int kOutputRows = 6, kOutputVectors = 2;
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
