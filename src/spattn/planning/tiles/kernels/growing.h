// A growable array in memory that Python owns and exposes without a copy.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

namespace spattn {

// An allocator. more(holder, bytes) resizes the memory and returns its address, or nullptr on failure. `usual` is a
// hint for the final size, in bytes.
struct Memory {
  void* holder;
  char* (*more)(void* holder, int64_t bytes);
  int64_t usual;
};

template <class T> class Growing {
 public:
  explicit Growing(const Memory& memory) : memory_(memory) {}

  // Returns room for `count` more elements, which add() then commits.
  T* next(int64_t count) {
    if (size_ + count > room_) grow(size_ + count);
    return data_ + size_;
  }
  void add(int64_t count) { size_ += count; }
  void push(T element) { *next(1) = element, ++size_; }

  const T* data() const { return data_; }
  T& back() { return data_[size_ - 1]; }
  int64_t size() const { return size_; }
  // Shrinks the capacity to the size.
  void fit() { resize(size_); }

 private:
  void grow(int64_t least) { resize(std::max({least, 2 * size_, kLeast, memory_.usual / int64_t(sizeof(T))})); }

  void resize(int64_t room) {
    char* const data = memory_.more(memory_.holder, room * int64_t(sizeof(T)));
    if (!data) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(data), room_ = room;
  }

  static constexpr int64_t kLeast = 1 << 12;

  Memory memory_;
  T* data_ = nullptr;
  int64_t size_ = 0, room_ = 0;
};

}  // namespace spattn
