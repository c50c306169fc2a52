// Operations of score programs on rows of vectors: loops over blocks of registers, and look-ups in tables.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd/element.h"
#include "simd/exp2.h"
#include "simd/tanh.h"
#include "simd/vec.h"

namespace spattn {
namespace SPATTN_ISA {

// A register as an operand: element (row, column) is data[row * step + column], or data[row * step] if the register is
// the same for all columns. Integers and truth values (0 or -1) have the size of T.
template <class T> struct Source {
  const T* data;
  int64_t step;
  bool vector;
};

// The result of an instruction: `rows` x `columns` elements; `columns` is rounded up to vectors.
template <class T> struct Target {
  T* out;
  int64_t step, rows, columns;
};

// Signed integer of the size of a lane.
template <class T> using Whole = typename std::make_signed<Word<T>>::type;

template <class V, class T> SPATTN_INLINE V broadcast(const T* from) {
  decltype(V{}[0] + 0) value;
  static_assert(sizeof value == sizeof(T), "lanes have the size of T");
  memcpy(&value, from, sizeof value);
  return V{} + value;
}

// A row of an operand, read as vectors of V.
template <class V, bool kVector, class T> struct RowReader {
  const T* at;
  V value;

  SPATTN_INLINE RowReader(const Source<T>& source, int64_t row) : at(source.data + row * source.step) {
    if constexpr (!kVector) value = broadcast<V>(at);
  }
  SPATTN_INLINE V operator[](int64_t column) const {
    if constexpr (kVector) return load<V>(at + column);
    return value;
  }
};

template <class A, class T, class F> SPATTN_INLINE void unary(const Target<T>& block, const Source<T>* in, F f) {
  for (int64_t row = 0; row < block.rows; ++row) {
    const RowReader<A, true, T> a(in[0], row);
    T* const out = block.out + row * block.step;
    for (int64_t column = 0; column < block.columns; column += kLanes<T>) store(out + column, f(a[column]));
  }
}

template <class A, class B, bool kA, bool kB, class T, class F>
SPATTN_INLINE void combine_rows(const Target<T>& block, const Source<T>* in, F f) {
  for (int64_t row = 0; row < block.rows; ++row) {
    const RowReader<A, kA, T> a(in[0], row);
    const RowReader<B, kB, T> b(in[1], row);
    T* const out = block.out + row * block.step;
    for (int64_t column = 0; column < block.columns; column += kLanes<T>) store(out + column, f(a[column], b[column]));
  }
}

// Requires that at least one operand is a vector along the columns.
template <class A, class B, class T, class F>
SPATTN_INLINE void binary(const Target<T>& block, const Source<T>* in, F f) {
  if (!in[1].vector) return combine_rows<A, B, true, false>(block, in, f);
  return in[0].vector ? combine_rows<A, B, true, true>(block, in, f) : combine_rows<A, B, false, true>(block, in, f);
}

template <class A, class B, class C, bool kA, bool kB, bool kC, class T, class F>
SPATTN_INLINE void select_rows(const Target<T>& block, const Source<T>* in, F f) {
  for (int64_t row = 0; row < block.rows; ++row) {
    const RowReader<A, kA, T> a(in[0], row);
    const RowReader<B, kB, T> b(in[1], row);
    const RowReader<C, kC, T> c(in[2], row);
    T* const out = block.out + row * block.step;
    for (int64_t column = 0; column < block.columns; column += kLanes<T>) {
      store(out + column, f(a[column], b[column], c[column]));
    }
  }
}

template <class A, class B, class C, bool kA, bool kB, class T, class F>
SPATTN_INLINE void ternary(const Target<T>& block, const Source<T>* in, F f) {
  return in[2].vector ? select_rows<A, B, C, kA, kB, true>(block, in, f)
                      : select_rows<A, B, C, kA, kB, false>(block, in, f);
}

template <class A, class B, class C, class T, class F>
SPATTN_INLINE void ternary(const Target<T>& block, const Source<T>* in, F f) {
  if (in[0].vector) {
    return in[1].vector ? ternary<A, B, C, true, true>(block, in, f) : ternary<A, B, C, true, false>(block, in, f);
  }
  return in[1].vector ? ternary<A, B, C, false, true>(block, in, f) : ternary<A, B, C, false, false>(block, in, f);
}

// Calls f(lane of a, lane of b) for each lane.
template <class V, class F> SPATTN_INLINE V each_lane(V a, V b, F f) {
  V found = a;
  for (int i = 0; i < int(sizeof(V) / sizeof(a[0])); ++i) found[i] = f(a[i], b[i]);
  return found;
}

// Python's floor division and remainder of integers; 0 for a divisor of 0. Wraps, and never traps.
template <class Int> inline Int floor_quotient(Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return Int(-typename std::make_unsigned<Int>::type(a));
  const Int quotient = a / b;
  return quotient - Int(a % b != 0 && (a < 0) != (b < 0));
}
template <class Int> inline Int floor_remainder(Int a, Int b) {
  if (b == 0 || b == -1) return 0;
  const Int rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// NumPy's remainder and floor_divide of floats.
template <class T> inline T float_remainder(T a, T b) {
  const T rest = ::fmod(a, b);
  if (rest == T(0)) return ::copysign(T(0), b);
  return (rest < T(0)) != (b < T(0)) ? rest + b : rest;
}
template <class T> inline T float_quotient(T a, T b) {
  if (b == T(0)) return a / b;
  const T quotient = (a - float_remainder(a, b)) / b, whole = ::floor(quotient);
  return quotient - whole > T(0.5) ? whole + T(1) : whole;
}

// e^x = 2^f * 2^n with |f| <= 1/2. Multiplies by 2^n in two steps, because n may exceed the range of exponents.
template <class T> struct Exponential;
template <> struct Exponential<float> {
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f, kLeast = -110.0f, kMost = 90.0f;
};
template <> struct Exponential<double> {
  static constexpr double kHigh = 6.93145751953125e-1, kLow = 1.42860682030941723212e-6, kLeast = -750.0, kMost = 715.0;
};
template <class T> SPATTN_INLINE Vec<T> exponential(Vec<T> x) {
  using E = Exponential<T>;
  constexpr int kBits = Exp2<T>::kMantissaBits;
  constexpr int64_t kBias = sizeof(T) == 4 ? 127 : 1023;
  x = larger(splat(E::kLeast), x);  // keeps NaN
  x = x > E::kMost ? splat(E::kMost) : x;
  const Vec<T> n = (x * T(1.4426950408889634074) + Exp2<T>::kRound) - Exp2<T>::kRound;
  const Vec<T> f = ((x - n * E::kHigh) - n * E::kLow) * T(1.4426950408889634074);
  const IntVec<T> whole = __builtin_convertvector(n, IntVec<T>), half = whole >> 1;
  const Vec<T> first = (Vec<T>)((BitsVec<T>)(half + Whole<T>(kBias)) << kBits);
  const Vec<T> second = (Vec<T>)((BitsVec<T>)(whole - half + Whole<T>(kBias)) << kBits);
  return exp2<T>(f) * first * second;
}

// Divides each row by one divisor. If the reciprocal of the divisor is a normal number, multiplies by it instead: a
// division costs as much as ten multiplications, and the results agree to about an ulp.
template <class T> SPATTN_INLINE void divide_rows(const Target<T>& block, const Source<T>* in) {
  constexpr T kFar = sizeof(T) == 4 ? T(0x1p126) : T(0x1p1022);
  for (int64_t row = 0; row < block.rows; ++row) {
    const Target<T> own = {block.out + row * block.step, block.step, 1, block.columns};
    Source<T> of_row[2] = {in[0], in[1]};
    of_row[0].data += row * in[0].step;
    const T divisor = in[1].data[row * in[1].step], size = divisor < T(0) ? -divisor : divisor;
    if (size < kFar && size > T(1) / kFar) {
      const Vec<T> factor = splat(T(1) / divisor);
      unary<Vec<T>>(own, of_row, [&](Vec<T> a) { return a * factor; });
    } else {
      of_row[1].data += row * in[1].step;
      combine_rows<Vec<T>, Vec<T>, true, false>(own, of_row, [](Vec<T> a, Vec<T> b) { return a / b; });
    }
  }
}

// Truncates; returns the least integer for NaN and numbers out of range.
template <class T> SPATTN_INLINE IntVec<T> truncated(Vec<T> x) {
  constexpr T kEnd = sizeof(T) == 4 ? T(0x1p31) : T(0x1p63);
  constexpr Whole<T> kLeast = Whole<T>(Word<T>(1) << (8 * sizeof(T) - 1));
  const IntVec<T> fits = (x >= -kEnd) & (x < kEnd);
  const IntVec<T> whole = __builtin_convertvector(fits ? x : Vec<T>{}, IntVec<T>);
  return fits ? whole : IntVec<T>{} + kLeast;
}

template <class T> SPATTN_INLINE Vec<T> reals(IntVec<T> x) { return __builtin_convertvector(x, Vec<T>); }

// Runs an instruction, except inputs, numbers and look-ups.
template <class T> __attribute__((noinline)) void execute(int operation, const Target<T>& block, const Source<T>* in) {
  using R = Vec<T>;
  using I = IntVec<T>;
  using U = BitsVec<T>;
  const auto real = [&](auto f) __attribute__((always_inline)) { binary<R, R>(block, in, f); };
  const auto whole = [&](auto f) __attribute__((always_inline)) { binary<I, I>(block, in, f); };
  const auto wrapped = [&](auto f) __attribute__((always_inline)) { binary<U, U>(block, in, f); };
  const auto lanes = [&](auto f) __attribute__((always_inline)) {
    binary<R, R>(block, in, [&](R a, R b) { return each_lane(a, b, f); });
  };
  const auto one = [&](auto f) __attribute__((always_inline)) { unary<R>(block, in, f); };
  const auto one_whole = [&](auto f) __attribute__((always_inline)) { unary<I>(block, in, f); };
  const auto each = [&](auto f) __attribute__((always_inline)) {
    unary<R>(block, in, [&](R a) { return each_lane(a, a, [&](T x, T) { return f(x); }); });
  };
  switch (operation) {
    case k_add_f:
      return real([](R a, R b) { return a + b; });
    case k_sub_f:
      return real([](R a, R b) { return a - b; });
    case k_mul_f:
      return real([](R a, R b) { return a * b; });
    case k_div_f:
      if (in[1].vector) return real([](R a, R b) { return a / b; });
      return divide_rows(block, in);
    case k_floordiv_f:
      return lanes([](T a, T b) { return float_quotient(a, b); });
    case k_mod_f:
      return lanes([](T a, T b) { return float_remainder(a, b); });
    case k_pow_f:
      return lanes([](T a, T b) { return T(::pow(double(a), double(b))); });
    case k_neg_f:
      return one([](R a) { return -a; });
    case k_abs_f:
      return one([](R a) { return (R)((U)a & splat_bits<T>(~Word<T>(0) >> 1)); });
    case k_minimum_f:
      return real([](R a, R b) { return (a < b) | (a != a) ? a : b; });
    case k_maximum_f:
      return real([](R a, R b) { return (a > b) | (a != a) ? a : b; });
    case k_exp_f:
      return one([](R a) { return exponential<T>(a); });
    case k_log_f:
      return each([](T x) { return T(::log(double(x))); });
    case k_tanh_f:
      return one([](R a) { return tanh<T>(a); });
    case k_sigmoid_f:
      return one([](R a) { return T(1) / (T(1) + exponential<T>(-a)); });
    case k_sqrt_f:
      return each([](T x) { return T(::sqrt(x)); });
    case k_sign_f:
      return one([](R a) { return a > R{} ? splat(T(1)) : a < R{} ? splat(T(-1)) : a; });
    case k_adjoint_f:
      return real([](R a, R b) { return a == R{} ? R{} : a * b; });
    case k_multiply_add_f:
      return ternary<R, R, R>(block, in, [](R a, R b, R c) { return a * b + c; });
    case k_where_f:
      return ternary<I, R, R>(block, in, [](I test, R a, R b) { return test ? a : b; });
    case k_eq_f:
      return real([](R a, R b) { return a == b; });
    case k_ne_f:
      return real([](R a, R b) { return a != b; });
    case k_lt_f:
      return real([](R a, R b) { return a < b; });
    case k_le_f:
      return real([](R a, R b) { return a <= b; });
    case k_to_int_f:
      return one([](R a) { return truncated<T>(a); });
    case k_add_i:
      return wrapped([](U a, U b) { return a + b; });
    case k_sub_i:
      return wrapped([](U a, U b) { return a - b; });
    case k_mul_i:
      return wrapped([](U a, U b) { return a * b; });
    case k_floordiv_i:
      return whole(
          [](I a, I b) { return each_lane(a, b, [](auto x, auto y) { return floor_quotient<Whole<T>>(x, y); }); });
    case k_mod_i:
      return whole(
          [](I a, I b) { return each_lane(a, b, [](auto x, auto y) { return floor_remainder<Whole<T>>(x, y); }); });
    case k_neg_i:
      return one_whole([](I a) { return (I)(U{} - (U)a); });
    case k_abs_i:
      return one_whole([](I a) { return a < I{} ? (I)(U{} - (U)a) : a; });
    case k_minimum_i:
      return whole([](I a, I b) { return a < b ? a : b; });
    case k_maximum_i:
      return whole([](I a, I b) { return a > b ? a : b; });
    case k_where_i:
      return ternary<I, I, I>(block, in, [](I test, I a, I b) { return test ? a : b; });
    case k_eq_i:
      return whole([](I a, I b) { return a == b; });
    case k_ne_i:
      return whole([](I a, I b) { return a != b; });
    case k_lt_i:
      return whole([](I a, I b) { return a < b; });
    case k_le_i:
      return whole([](I a, I b) { return a <= b; });
    case k_to_float_i:
      return one_whole([](I a) { return reals<T>(a); });
    case k_and_b:
      return whole([](I a, I b) { return a & b; });
    case k_or_b:
      return whole([](I a, I b) { return a | b; });
    case k_xor_b:
      return whole([](I a, I b) { return a ^ b; });
    case k_not_b:
      return one_whole([](I a) { return ~a; });
    case k_to_int_b:
      return one_whole([](I a) { return (I)(U{} - (U)a); });
    case k_to_float_b:
      return one_whole([](I a) { return reals<T>((I)(U{} - (U)a)); });
  }
}

// Adds `stride` times the indices along an axis to `offsets`; negative indices count from the end. Makes entries of
// `outside` negative where an index is out of range.
template <class T>
SPATTN_INLINE void add_axis(const Source<T>& index, int64_t row, int64_t column, int64_t count, int64_t length,
                            int64_t stride, int64_t* offsets, int64_t* outside) {
  const T* const at = index.data + row * index.step + (index.vector ? column : 0);
  const auto add = [&](int64_t i, int64_t from) __attribute__((always_inline)) {
    Whole<T> given;
    memcpy(&given, at + from, sizeof given);
    const int64_t wrapped = int64_t(given) + (given < 0 ? length : 0);
    outside[i] |= wrapped | (length - 1 - wrapped);  // negative if either is
    offsets[i] += wrapped * stride;
  };
  if (index.vector) {
    for (int64_t i = 0; i < count; ++i) add(i, i);
  } else {
    for (int64_t i = 0; i < count; ++i) add(i, 0);
  }
}

template <class Stored> struct TableElement {
  using Storage = Stored;
  static SPATTN_INLINE Stored decode(Stored x) { return x; }
};

struct TruthElement {
  using Storage = uint8_t;
  static SPATTN_INLINE int decode(uint8_t x) { return x ? -1 : 0; }
};

// Reads the elements of a row at `offsets`, in bytes; writes `missing` where a lane is outside the table.
template <class E, class To>
SPATTN_INLINE void read_elements(const char* data, const int64_t* offsets, const int64_t* outside, int64_t count,
                                 To missing, To* out) {
  for (int64_t i = 0; i < count; ++i) {
    To value = missing;
    if (outside[i] >= 0) {
      typename E::Storage x;
      memcpy(&x, data + offsets[i], sizeof x);
      value = To(E::decode(x));
    }
    memcpy(out + i, &value, sizeof value);
  }
}

#if defined(__AVX512F__)
SPATTN_INLINE void read_elements_of_floats(const char* data, const int64_t* offsets, const int64_t* outside,
                                           int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += 8) {
    const __mmask8 inside = _mm512_cmpge_epi64_mask(load<__m512i>(outside + i), _mm512_setzero_si512());
    const __m256 missing = _mm256_set1_ps(__builtin_nanf(""));
    store(out + i, _mm512_mask_i64gather_ps(missing, inside, load<__m512i>(offsets + i), data, 1));
  }
}
#endif

// Looks up elements of a table: floats as T, integers and truth values as Whole<T>. Indices out of range give NaN, the
// least int32 or false.
template <class T>
__attribute__((noinline)) void look_up(const ScoreTable& table, const Target<T>& block, const Source<T>* indices) {
  constexpr int64_t kAtOnce = 4 * kLanes<T>;
  using W = Whole<T>;
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t column = 0; column < block.columns; column += kAtOnce) {
      const int64_t count = block.columns - column < kAtOnce ? block.columns - column : kAtOnce;
      int64_t offsets[kAtOnce] = {};
      int64_t outside[kAtOnce] = {};
      for (int axis = 0; axis < table.axes; ++axis) {
        add_axis(indices[axis], row, column, count, table.shape[axis], table.stride[axis], offsets, outside);
      }
      T* const to = block.out + row * block.step + column;
      const auto real = [&](auto type) {
        read_elements<decltype(type)>(table.data, offsets, outside, count, T(__builtin_nan("")), to);
      };
      const auto whole = [&](auto type, W missing) {
        read_elements<decltype(type)>(table.data, offsets, outside, count, missing, reinterpret_cast<W*>(to));
      };
      constexpr W kNone = W(INT32_MIN);
      switch (table.dtype) {
        case kTableFloat32:
          real(Float32{});
          break;
        case kTableFloat64:
          real(Float64{});
          break;
        case kTableFloat16:
          real(Float16{});
          break;
        case kTableBfloat16:
          real(Bfloat16{});
          break;
        case kTableInt8:
          whole(TableElement<int8_t>{}, kNone);
          break;
        case kTableInt16:
          whole(TableElement<int16_t>{}, kNone);
          break;
        case kTableInt32:
          whole(TableElement<int32_t>{}, kNone);
          break;
        case kTableInt64:
          whole(TableElement<int64_t>{}, kNone);
          break;
        case kTableUint8:
          whole(TableElement<uint8_t>{}, kNone);
          break;
        case kTableUint16:
          whole(TableElement<uint16_t>{}, kNone);
          break;
        case kTableUint32:
          whole(TableElement<uint32_t>{}, kNone);
          break;
        case kTableUint64:
          whole(TableElement<uint64_t>{}, kNone);
          break;
        case kTableBool:
          whole(TruthElement{}, W(0));
          break;
      }
    }
  }
}

#if !defined(SPATTN_DEFINES_OPERATIONS)  // table.cpp
extern template void execute<float>(int, const Target<float>&, const Source<float>*);
extern template void execute<double>(int, const Target<double>&, const Source<double>*);
extern template void look_up<float>(const ScoreTable&, const Target<float>&, const Source<float>*);
extern template void look_up<double>(const ScoreTable&, const Target<double>&, const Source<double>*);
#endif

}  // namespace SPATTN_ISA
}  // namespace spattn
