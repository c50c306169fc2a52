// Programmatic dependent launch (PTX ISA, "griddepcontrol").
//
// A kernel starts its successor early, and waits for its predecessor before touching shared buffers or, at the latest,
// before ending.
#pragma once

namespace spattn {

// Waits until the preceding launch, and hence every one before it, has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch start once every CTA has called this.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace spattn
