// 32-bit shared-memory addresses for PTX.
#pragma once

namespace spattn {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace spattn
