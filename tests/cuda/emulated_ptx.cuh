// sm80/ptx.cuh for the emulator: the same functions in C++.
#pragma once
#include "common/element.cuh"
#include "common/shared_address.cuh"

namespace spattn::sm80 {

template <class T>
void copy(unsigned destination, const void* source, bool inside) {
  if (inside) memcpy(shared_pointer<T>(destination), source, sizeof(T));
  else memset(shared_pointer<T>(destination), 0, sizeof(T));
}
inline void copy_async(unsigned destination, const void* source, bool inside) {
  copy<uint4>(destination, source, inside);
}
inline void copy_async8(unsigned destination, const void* source, bool inside) {
  copy<uint2>(destination, source, inside);
}
inline void copies_wait() {}

template <bool kTransposed>
void load_four(unsigned (&out)[4], unsigned address) {
  exchange(address, [&](const unsigned* lanes) {
    const int lane = threadIdx.x % 32;
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        const int row = kTransposed ? lane % 4 * 2 + i : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
        pair[i] = shared_pointer<const uint16_t>(lanes[8 * matrix + row])[column];
      }
      memcpy(&out[matrix], pair, 4);
    }
    return 0;
  });
}
inline void load_matrices(unsigned (&out)[4], unsigned address) { load_four<false>(out, address); }
inline void load_matrices_transposed(unsigned (&out)[4], unsigned address) { load_four<true>(out, address); }

struct Fragments {
  unsigned a[4], b[2];
};

// c += a b, where number(x, i) is element i of a register, of which there are kPacked.
template <int kPacked, class Number>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Number number) {
  const Fragments own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  exchange(own, [&](const Fragments* lanes) {
    const int quad = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < 8 * kPacked; ++k) {
        const int lane = k / kPacked % 4, half = k / kPacked / 4, element = k % kPacked;
        const float x = number(lanes[quad * 4 + lane].a[2 * half + i / 2], element);
        sum += x * number(lanes[(t * 2 + i % 2) * 4 + lane].b[half], element);
      }
      c[i] += sum;
    }
    return 0;
  });
}
template <class Type>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Type) {
  multiply_add<2>(c, a, b0, b1, [](unsigned bits, int element) {
    Type pair[2];
    memcpy(pair, &bits, 4);
    return widen(pair[element]);
  });
}
inline void multiply_add_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_add<1>(c, a, b0, b1, [](unsigned bits, int) { return __uint_as_float(bits & 0xffffe000u); });
}
inline unsigned round_to_tf32(float x) { return x == x ? (__float_as_uint(x) + 0x1000u) & 0xffffe000u : 0x7fffffffu; }

}  // namespace spattn::sm80
