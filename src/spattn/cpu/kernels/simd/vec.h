// Vectors of the target instruction set: GCC and Clang vector extensions, one source for SSE2, AVX2, AVX-512 and NEON.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define SPATTN_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SPATTN_VECTOR_BYTES 32
#else
#define SPATTN_VECTOR_BYTES 16
#endif

#if defined(__clang__)
#define SPATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SPATTN_UNROLL _Pragma("GCC unroll 64")
#endif
#define SPATTN_INLINE inline __attribute__((always_inline))

namespace spattn {
namespace SPATTN_ISA {

constexpr int kVectorBytes = SPATTN_VECTOR_BYTES;

template <class T> struct VectorOf;
template <> struct VectorOf<float> {
  typedef float Vec __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  typedef int32_t Int __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  typedef uint32_t Bits __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  using Word = uint32_t;
};
template <> struct VectorOf<double> {
  typedef double Vec __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  typedef int64_t Int __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  typedef uint64_t Bits __attribute__((vector_size(SPATTN_VECTOR_BYTES)));
  using Word = uint64_t;
};
template <class T> using Vec = typename VectorOf<T>::Vec;
template <class T> using IntVec = typename VectorOf<T>::Int;
template <class T> using BitsVec = typename VectorOf<T>::Bits;
template <class T> using Word = typename VectorOf<T>::Word;  // unsigned integer of the size of a lane

template <class T> constexpr int kLanes = kVectorBytes / int(sizeof(T));
template <class T> constexpr T kInfinity = T(__builtin_inf());

template <class V, class T> SPATTN_INLINE V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);  // compiles to one unaligned load
  return v;
}
template <class V, class T> SPATTN_INLINE void store(T* p, V v) { memcpy(p, &v, sizeof v); }

// Broadcasts x. x - 0 equals x for every x, including -0, so compilers drop the subtraction.
template <class T> SPATTN_INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }
template <class T> SPATTN_INLINE BitsVec<T> splat_bits(Word<T> x) { return x - BitsVec<T>{}; }

// Returns a * b - c, rounded once if kFused. Uses intrinsics, because compilers fuse the expression only at some
// optimization levels, and results must not depend on the level.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif
#if defined(__AVX512F__)
SPATTN_INLINE Vec<float> multiply_subtract(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm512_fmsub_ps((__m512)a, (__m512)b, (__m512)c);
}
SPATTN_INLINE Vec<double> multiply_subtract(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm512_fmsub_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__FMA__)
SPATTN_INLINE Vec<float> multiply_subtract(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c);
}
SPATTN_INLINE Vec<double> multiply_subtract(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm256_fmsub_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#elif defined(__aarch64__)
SPATTN_INLINE Vec<float> multiply_subtract(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)vfmaq_f32(vnegq_f32((float32x4_t)c), (float32x4_t)a, (float32x4_t)b);
}
SPATTN_INLINE Vec<double> multiply_subtract(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)vfmaq_f64(vnegq_f64((float64x2_t)c), (float64x2_t)a, (float64x2_t)b);
}
#else
template <class V> SPATTN_INLINE V multiply_subtract(V a, V b, V c) { return a * b - c; }
#endif

// True if any bit is set.
template <class V> SPATTN_INLINE bool any(V bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof bits == 64) return _mm512_test_epi64_mask((__m512i)bits, (__m512i)bits);
#endif
  uint64_t words[sizeof(V) / 8], found = 0;
  memcpy(words, &bits, sizeof bits);
  for (uint64_t word : words) found |= word;
  return found != 0;
}

// Sets the lanes that are infinite or NaN: inf - inf is NaN.
template <class V> SPATTN_INLINE auto not_finite(V x) { return x - x != V{}; }

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int... I> struct Lane {};
template <int N, int... I> struct MakeLanes : MakeLanes<N - 1, N - 1, I...> {};
template <int... I> struct MakeLanes<0, I...> {
  using type = Lane<I...>;
};

// Divide the L lanes into groups of S. first_groups() interleaves the even groups of `a` and `b`, second_groups() the
// odd groups.
template <int L, int S, class V, int... I> SPATTN_INLINE V first_groups(V a, V b, Lane<I...>) {
  return __builtin_shufflevector(a, b, (I & S ? L + I - S : I)...);
}
template <int L, int S, class V, int... I> SPATTN_INLINE V second_groups(V a, V b, Lane<I...>) {
  return __builtin_shufflevector(a, b, (I & S ? L + I : I + S)...);
}
// Within each block of B lanes, zip_low() interleaves the first halves of `a` and `b`, zip_high() the second halves.
template <int L, int B, class V, int... I> SPATTN_INLINE V zip_low(V a, V b, Lane<I...>) {
  return __builtin_shufflevector(a, b, (I / B * B + I % B / 2 + I % 2 * L)...);
}
template <int L, int B, class V, int... I> SPATTN_INLINE V zip_high(V a, V b, Lane<I...>) {
  return __builtin_shufflevector(a, b, (I / B * B + I % B / 2 + I % 2 * L + B / 2)...);
}

// Transposes a matrix of Least x Least blocks: swaps groups of S lanes between rows S apart, then halves S.
template <int S, int Least, class V, int L> SPATTN_INLINE void swap_groups(V (&rows)[L]) {
  using All = typename MakeLanes<L>::type;
  if constexpr (S >= Least) {
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) {
      if (i & S) continue;
      const V low = rows[i], high = rows[i + S];
      rows[i] = first_groups<L, S>(low, high, All{}), rows[i + S] = second_groups<L, S>(low, high, All{});
    }
    swap_groups<S / 2, Least>(rows);
  }
}

// Transposes `rows`. Few instructions cross 16-byte blocks, so it swaps whole blocks first, then transposes within the
// blocks by perfect shuffles.
template <class T> SPATTN_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int L = kLanes<T>, kBlock = 16 / sizeof(T);
  using All = typename MakeLanes<L>::type;
  swap_groups<L / 2, kBlock>(rows);
  SPATTN_UNROLL
  for (int round = 1; round < kBlock; round *= 2) {
    Vec<T> zipped[L];
    SPATTN_UNROLL
    for (int first = 0; first < L; first += kBlock) {
      SPATTN_UNROLL
      for (int i = 0; i < kBlock / 2; ++i) {
        const Vec<T> low = rows[first + i], high = rows[first + i + kBlock / 2];
        zipped[first + 2 * i] = zip_low<L, kBlock>(low, high, All{});
        zipped[first + 2 * i + 1] = zip_high<L, kBlock>(low, high, All{});
      }
    }
    SPATTN_UNROLL
    for (int i = 0; i < L; ++i) rows[i] = zipped[i];
  }
}

}  // namespace SPATTN_ISA
}  // namespace spattn
