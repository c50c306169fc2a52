// Bump allocator for a thread's scratch; aligns arrays to cache lines.
#pragma once
#include "kernels.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

class Arena {
 public:
  explicit Arena(char* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_) {}

  template <class U> U* array(int64_t count) {
    const uintptr_t found = end_;
    end_ += uintptr_t(round_up(count * int64_t(sizeof(U)), 64));
    return reinterpret_cast<U*>(found);
  }

  size_t bytes() const { return end_ - begin_; }

 private:
  uintptr_t begin_, end_;
};

// Returns the size of a scratch struct: constructs it at address 0 without touching its arrays.
template <class Scratch> size_t scratch_bytes(const Call& call) noexcept {
  Arena arena(nullptr);
  [[maybe_unused]] const Scratch measured(call, arena);
  return arena.bytes();
}

}  // namespace SPATTN_ISA
}  // namespace spattn
