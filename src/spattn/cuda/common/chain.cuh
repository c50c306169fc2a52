// Kernels that follow each other without a gap: each lets the next one's blocks start as soon as SMs have room, and waits
// itself for the one before: before it reads or writes what that may write or read, or, where there is no such thing,
// before it ends (programmatic dependent launch; PTX ISA, "griddepcontrol").
#pragma once

namespace spattn {

// All that the launch before has written is there: it has ended, and so has, for the same reason, every one before it.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next launch may start once every block has come here.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace spattn
