// Register blocking of the matrix products, which determines the layout of scratch and masks.
//
// Scores are transposed, one row per key: S' = K Q' reads keys as scalars without packing, the softmax statistics of
// adjacent queries share a vector, so that no reduction crosses lanes, and P' is already the packed left operand of
// O += P V.
#pragma once

namespace spattn {
namespace SPATTN_ISA {

// Accumulators fill the register file, except for one row of the right operand and a broadcast scalar.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;                  // vector registers
constexpr int kKeyRows = 8, kQueryVectors = 3;  // S': 8 keys by 3 vectors of queries
constexpr int kOutputRows = 6, kOutputVectors = 4;
#else
constexpr int kRegisters = 16;
constexpr int kKeyRows = 4, kQueryVectors = 3;
constexpr int kOutputRows = 6, kOutputVectors = 2;
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
