// Element types, and their conversion to and from the compute type.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

template <class To, class From> SPATTN_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct Float32 {
  using Storage = float;
  using Compute = float;
  static SPATTN_INLINE float decode(float x) { return x; }
  static SPATTN_INLINE float encode(float x) { return x; }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  static SPATTN_INLINE double decode(double x) { return x; }
  static SPATTN_INLINE double encode(double x) { return x; }
};

struct Bfloat16 {
  using Storage = uint16_t;
  using Compute = float;
  static SPATTN_INLINE float decode(uint16_t x) { return bit_cast<float>(uint32_t(x) << 16); }
  static SPATTN_INLINE uint16_t encode(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // round to nearest even
    return uint16_t(x == x ? rounded : (bits >> 16 | 0x40));            // a NaN must not round up to infinity
  }
};

struct Float16 {
  using Storage = uint16_t;
  using Compute = float;
  static SPATTN_INLINE float decode(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff, sign = uint32_t(x & 0x8000) << 16;
    const uint32_t special = magnitude >= 0x7c00 ? 0x38000000u : 0;  // Inf and NaN: exponent 31 becomes 255
    const uint32_t normal = (magnitude << 13) + 0x38000000u + special;
    const uint32_t subnormal = bit_cast<uint32_t>(float(int32_t(magnitude)) * 0x1p-24f);
    return bit_cast<float>((magnitude < 0x400 ? subnormal : normal) | sign);
  }
  static SPATTN_INLINE uint16_t encode(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536 or more
    if (magnitude < 0x38800000) {                       // subnormal: an addition rounds to multiples of 2^-24
      return sign | uint16_t(bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000);
    }
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }
};

// The element type that is stored as compute type T.
template <class T> using Native = typename std::conditional<sizeof(T) == sizeof(float), Float32, Float64>::type;

// Loads and converts a vector of adjacent elements with any alignment.
template <class E> SPATTN_INLINE Vec<typename E::Compute> load_elements(const char* from) {
  Vec<typename E::Compute> found;
  typename E::Storage stored[kLanes<typename E::Compute>];
  memcpy(stored, from, sizeof stored);
  for (int i = 0; i < kLanes<typename E::Compute>; ++i) found[i] = E::decode(stored[i]);
  return found;
}

template <> SPATTN_INLINE Vec<float> load_elements<Float32>(const char* from) { return load<Vec<float>>(from); }
template <> SPATTN_INLINE Vec<double> load_elements<Float64>(const char* from) { return load<Vec<double>>(from); }
#if defined(__AVX512F__)  // the generic conversion compiles to three times as many instructions
template <> SPATTN_INLINE Vec<float> load_elements<Bfloat16>(const char* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Vec<float>)((BitsVec<float>)_mm512_cvtepu16_epi32(halves) << 16);
}
template <> SPATTN_INLINE Vec<float> load_elements<Float16>(const char* from) {
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#elif defined(__AVX2__)
template <> SPATTN_INLINE Vec<float> load_elements<Bfloat16>(const char* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Vec<float>)((BitsVec<float>)_mm256_cvtepu16_epi32(halves) << 16);
}
template <> SPATTN_INLINE Vec<float> load_elements<Float16>(const char* from) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#endif

// Reads and converts `count` elements, `stride` bytes apart, with any alignment.
template <class E>
SPATTN_INLINE void read_strided(const char* from, int64_t stride, int64_t count, typename E::Compute* out) {
  for (int64_t i = 0; i < count; ++i) {
    typename E::Storage x;
    memcpy(&x, from + i * stride, sizeof x);
    out[i] = E::decode(x);
  }
}

// As read_strided(); uses vector loads if the elements are adjacent.
template <class E> inline void read_row(const char* from, int64_t stride, int64_t count, typename E::Compute* out) {
  constexpr int64_t L = kLanes<typename E::Compute>, size = sizeof(typename E::Storage);
  if (stride == size) {
    for (; count >= L; count -= L, from += L * size, out += L) store(out, load_elements<E>(from));
  }
  read_strided<E>(from, stride, count, out);
}

template <class E>
SPATTN_INLINE void write_strided(char* to, int64_t stride, int64_t count, const typename E::Compute* from) {
  for (int64_t i = 0; i < count; ++i) {
    const typename E::Storage x = E::encode(from[i]);
    memcpy(to + i * stride, &x, sizeof x);
  }
}

template <class E> inline void write_row(char* to, int64_t stride, int64_t count, const typename E::Compute* from) {
  constexpr int64_t L = kLanes<typename E::Compute>, size = sizeof(typename E::Storage);
  if (stride == size) {
    for (; count >= L; count -= L, from += L, to += L * size) write_strided<E>(to, size, L, from);
  }
  write_strided<E>(to, stride, count, from);
}

}  // namespace SPATTN_ISA
}  // namespace spattn
