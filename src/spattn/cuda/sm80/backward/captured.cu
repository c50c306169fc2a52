// Formula    target = the value of each exact accumulator.
// Grid       one thread per element, flat.
// Target     compute capability 8.0 and later.
// Types      float32, float64.
// Test       tests/cuda/test_traced_scores.py      Bound  memory: reads each accumulator once.

#include "common/element.cuh"
#include "common/accumulator.cuh"
#include "sm80/params.cuh"

namespace spattn::sm80_backward {

constexpr int kThreads = 256;

extern "C" __constant__ int launch_shape[3] = {kThreads, 0, sizeof(Accumulated)};

extern "C" __global__ void __launch_bounds__(kThreads) captured(const __grid_constant__ Accumulated p) {
  const long long element = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= p.count) return;
  const void* first = p.gate != nullptr && *p.gate != 0 ? p.exact : p.words;
  const unsigned long long* words = static_cast<const unsigned long long*>(first) + element * kWords;
  static_cast<Sum*>(p.target)[element] = static_cast<Sum>(accumulated(words));
}

}  // namespace spattn::sm80_backward
