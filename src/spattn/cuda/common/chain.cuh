// Programmatic dependent launch (PTX ISA, "griddepcontrol").
//
// A kernel lets its successor start early, and waits for its predecessor before touching shared buffers or ending.
#pragma once

namespace spattn {

// Waits until the preceding launch, and hence all earlier ones, has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next launch start once every CTA has called this.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace spattn
