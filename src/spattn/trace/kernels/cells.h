// Evaluates programs of elementwise operations (trace/native.py) on cells, a block of lanes at a time.
//
// A register holds a block of int64, float32 or float64 values; truth values are the int64 numbers 0 and 1. Each
// operation rounds and wraps as NumPy's does, and writes a register that it does not read.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace spattn {

// Names end with the type of the operands: i (int64), f (float32) or d (float64).
// clang-format off
#define SPATTN_FLOAT_OPERATIONS(X, t) \
  X(add_##t) X(sub_##t) X(mul_##t) X(div_##t) X(neg_##t) X(abs_##t) X(min_##t) X(max_##t) X(sqrt_##t) X(floor_##t) \
  X(ceil_##t) X(trunc_##t) X(rint_##t) X(eq_##t) X(ne_##t) X(lt_##t) X(le_##t) X(where_##t) X(look_up_##t)
#define SPATTN_CELL_OPERATIONS(X) \
  X(add_i) X(sub_i) X(mul_i) X(neg_i) X(abs_i) X(min_i) X(max_i) X(sign_i) X(and_i) X(or_i) X(xor_i) X(not_i) \
  X(shl_i) X(shr_i) X(mod_i) X(div_i) X(eq_i) X(ne_i) X(lt_i) X(le_i) X(where_i) X(look_up_i) X(index_i) X(member_i) \
  SPATTN_FLOAT_OPERATIONS(X, f) SPATTN_FLOAT_OPERATIONS(X, d) \
  X(cast_i_f) X(cast_i_d) X(cast_f_i) X(cast_f_d) X(cast_d_i) X(cast_d_f)
// clang-format on
#define SPATTN_CELL_NAME(name) k_##name,
enum CellOperation { SPATTN_CELL_OPERATIONS(SPATTN_CELL_NAME) kCellOperations };
#undef SPATTN_CELL_NAME
#define SPATTN_CELL_NAME(name) #name,
constexpr const char* kCellOperationNames[] = {SPATTN_CELL_OPERATIONS(SPATTN_CELL_NAME)};
#undef SPATTN_CELL_NAME

// Registers of the result and of the operands, and a shift, a divisor, the length of an axis or the index of a table.
struct CellStep {
  int64_t operation, out, a, b, c, number;
};

// Types of the elements of tables and inputs: _cells.pyx. Truth values are uint8.
enum CellType { kCellInt64, kCellFloat32, kCellFloat64, kCellUint8, kCellInt8, kCellInt16, kCellInt32 };

struct CellTable {
  const char* data;
  int64_t size, type;
};

// An array that broadcasts to three axes, and the register of its values; strides are in bytes.
struct CellInput {
  const char* data;
  int64_t out, type, stride[3];
};

struct CellProgram {
  const CellStep* steps;
  int64_t count;
  const CellTable* tables;
  const CellInput* inputs;
  int64_t input_count, result;
};

constexpr int64_t kCellLanes = 512;  // 4 KiB a register, so that those of most programs fit into the L1 cache

// The widest vectors that the processor has: Cython modules are compiled for the oldest one.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__clang__) && __GNUC__ >= 12
#define SPATTN_CELL_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SPATTN_CELL_CLONES
#endif
#define SPATTN_CELL_INLINE inline __attribute__((always_inline))

// Divides by a positive number, rounding down.
SPATTN_CELL_INLINE void divide_cells(const int64_t* __restrict a, int64_t divisor, int64_t* __restrict out, int64_t n,
                                     bool remainder) {
  int64_t large = divisor;
  for (int64_t i = 0; i < n; ++i) large |= a[i] ^ (a[i] >> 63);
  if (large >> 50) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t quotient = a[i] / divisor, rest = a[i] - quotient * divisor;
      out[i] = remainder ? rest + (rest < 0 ? divisor : 0) : quotient - (rest < 0);
    }
    return;
  }
  // The product in float64 differs from the exact quotient by less than 1, and so does rounding it towards zero.
  const double inverse = 1 / double(divisor);
  for (int64_t i = 0; i < n; ++i) {
    int64_t quotient = int64_t(double(a[i]) * inverse) - (a[i] < 0), rest = a[i] - quotient * divisor;
    const int64_t above = rest >> 63;  // -1 if the quotient is too large by one
    quotient += above, rest += above & divisor;
    const int64_t below = ~((rest - divisor) >> 63);  // -1 if it is too small by one
    quotient -= below, rest -= below & divisor;
    out[i] = remainder ? rest : quotient;
  }
}

template <class T, class Out>
SPATTN_CELL_INLINE void take_cells(const char* table, const int64_t* __restrict at, Out* __restrict out, int64_t n) {
  const T* const data = reinterpret_cast<const T*>(table);
  for (int64_t i = 0; i < n; ++i) out[i] = Out(data[at[i]]);
}

SPATTN_CELL_INLINE void take_integers(const CellTable& table, const int64_t* at, int64_t* out, int64_t n) {
  switch (table.type) {
    case kCellInt64:
      return take_cells<int64_t>(table.data, at, out, n);
    case kCellUint8:
      return take_cells<uint8_t>(table.data, at, out, n);
    case kCellInt8:
      return take_cells<int8_t>(table.data, at, out, n);
    case kCellInt16:
      return take_cells<int16_t>(table.data, at, out, n);
    case kCellInt32:
      return take_cells<int32_t>(table.data, at, out, n);
  }
}

// Returns whether `value` is in a sorted table of int64 numbers.
SPATTN_CELL_INLINE int64_t is_member(const CellTable& table, int64_t value) {
  const int64_t* const data = reinterpret_cast<const int64_t*>(table.data);
  int64_t low = 0, high = table.size;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    data[middle] < value ? low = middle + 1 : high = middle;
  }
  return low < table.size && data[low] == value;
}

template <class T> SPATTN_CELL_INLINE T* cells_of(char* registers, int64_t number) {
  return reinterpret_cast<T*>(registers + number * kCellLanes * 8);
}

// Each case runs one operation on `n` lanes.
#define SPATTN_CELLS(name, In, Out, value)                          \
  case k_##name: {                                                  \
    const In* const __restrict a = cells_of<In>(registers, step.a); \
    const In* const __restrict b = cells_of<In>(registers, step.b); \
    Out* const __restrict out = cells_of<Out>(registers, step.out); \
    (void)b;                                                        \
    for (int64_t i = 0; i < n; ++i) out[i] = value;                 \
    break;                                                          \
  }
#define SPATTN_WHERE_CELLS(name, T)                                              \
  case k_##name: {                                                               \
    const int64_t* const __restrict test = cells_of<int64_t>(registers, step.c); \
    const T* const __restrict a = cells_of<T>(registers, step.a);                \
    const T* const __restrict b = cells_of<T>(registers, step.b);                \
    T* const __restrict out = cells_of<T>(registers, step.out);                  \
    for (int64_t i = 0; i < n; ++i) out[i] = test[i] ? a[i] : b[i];              \
    break;                                                                       \
  }
// minimum and maximum: NaN if either operand is NaN.
#define SPATTN_FLOAT_CELLS(t, T)                                                                           \
  SPATTN_CELLS(add_##t, T, T, a[i] + b[i])                                                                 \
  SPATTN_CELLS(sub_##t, T, T, a[i] - b[i])                                                                 \
  SPATTN_CELLS(mul_##t, T, T, a[i] * b[i])                                                                 \
  SPATTN_CELLS(div_##t, T, T, a[i] / b[i])                                                                 \
  SPATTN_CELLS(neg_##t, T, T, -a[i])                                                                       \
  SPATTN_CELLS(abs_##t, T, T, T(__builtin_fabs(a[i])))                                                     \
  SPATTN_CELLS(min_##t, T, T, a[i] <= b[i] || a[i] != a[i] ? a[i] : b[i])                                  \
  SPATTN_CELLS(max_##t, T, T, a[i] >= b[i] || a[i] != a[i] ? a[i] : b[i])                                  \
  SPATTN_CELLS(sqrt_##t, T, T, sizeof(T) == 4 ? T(__builtin_sqrtf(float(a[i]))) : T(__builtin_sqrt(a[i]))) \
  SPATTN_CELLS(floor_##t, T, T, T(__builtin_floor(a[i])))                                                  \
  SPATTN_CELLS(ceil_##t, T, T, T(__builtin_ceil(a[i])))                                                    \
  SPATTN_CELLS(trunc_##t, T, T, T(__builtin_trunc(a[i])))                                                  \
  SPATTN_CELLS(rint_##t, T, T, T(__builtin_rint(a[i])))                                                    \
  SPATTN_CELLS(eq_##t, T, int64_t, a[i] == b[i])                                                           \
  SPATTN_CELLS(ne_##t, T, int64_t, a[i] != b[i])                                                           \
  SPATTN_CELLS(lt_##t, T, int64_t, a[i] < b[i])                                                            \
  SPATTN_CELLS(le_##t, T, int64_t, a[i] <= b[i])                                                           \
  SPATTN_WHERE_CELLS(where_##t, T)                                                                         \
  case k_look_up_##t:                                                                                      \
    take_cells<T>(program.tables[step.number].data, cells_of<int64_t>(registers, step.a),                  \
                  cells_of<T>(registers, step.out), n);                                                    \
    break;

// Runs the steps on `n` lanes and writes the result; returns false if an index is out of range.
SPATTN_CELL_CLONES bool run_cells(const CellProgram& program, char* registers, int64_t n, uint8_t* result) {
  for (const CellStep* at = program.steps; at < program.steps + program.count; ++at) {
    const CellStep& step = *at;
    switch (step.operation) {
      SPATTN_CELLS(add_i, uint64_t, uint64_t, a[i] + b[i])
      SPATTN_CELLS(sub_i, uint64_t, uint64_t, a[i] - b[i])
      SPATTN_CELLS(mul_i, uint64_t, uint64_t, a[i] * b[i])
      SPATTN_CELLS(neg_i, uint64_t, uint64_t, 0 - a[i])
      SPATTN_CELLS(abs_i, int64_t, uint64_t, a[i] < 0 ? 0 - uint64_t(a[i]) : uint64_t(a[i]))
      SPATTN_CELLS(min_i, int64_t, int64_t, a[i] < b[i] ? a[i] : b[i])
      SPATTN_CELLS(max_i, int64_t, int64_t, a[i] > b[i] ? a[i] : b[i])
      SPATTN_CELLS(sign_i, int64_t, int64_t, (a[i] > 0) - (a[i] < 0))
      SPATTN_CELLS(and_i, int64_t, int64_t, a[i] & b[i])
      SPATTN_CELLS(or_i, int64_t, int64_t, a[i] | b[i])
      SPATTN_CELLS(xor_i, int64_t, int64_t, a[i] ^ b[i])
      SPATTN_CELLS(not_i, int64_t, int64_t, ~a[i])
      SPATTN_CELLS(shl_i, uint64_t, uint64_t, a[i] << step.number)
      SPATTN_CELLS(shr_i, int64_t, int64_t, a[i] >> step.number)
      SPATTN_CELLS(eq_i, int64_t, int64_t, a[i] == b[i])
      SPATTN_CELLS(ne_i, int64_t, int64_t, a[i] != b[i])
      SPATTN_CELLS(lt_i, int64_t, int64_t, a[i] < b[i])
      SPATTN_CELLS(le_i, int64_t, int64_t, a[i] <= b[i])
      SPATTN_WHERE_CELLS(where_i, int64_t)
      SPATTN_FLOAT_CELLS(f, float)
      SPATTN_FLOAT_CELLS(d, double)
      SPATTN_CELLS(cast_i_f, int64_t, float, float(a[i]))
      SPATTN_CELLS(cast_i_d, int64_t, double, double(a[i]))
      SPATTN_CELLS(cast_f_i, float, int64_t, int64_t(a[i]))
      SPATTN_CELLS(cast_f_d, float, double, double(a[i]))
      SPATTN_CELLS(cast_d_i, double, int64_t, int64_t(a[i]))
      SPATTN_CELLS(cast_d_f, double, float, float(a[i]))
      case k_mod_i:
      case k_div_i:
        divide_cells(cells_of<int64_t>(registers, step.a), step.number, cells_of<int64_t>(registers, step.out), n,
                     step.operation == k_mod_i);
        break;
      case k_look_up_i:
        take_integers(program.tables[step.number], cells_of<int64_t>(registers, step.a),
                      cells_of<int64_t>(registers, step.out), n);
        break;
        SPATTN_CELLS(member_i, int64_t, int64_t, is_member(program.tables[step.number], a[i]))
      case k_index_i: {  // row-major: a * length + b, where b may count from the end
        const int64_t* const __restrict a = cells_of<int64_t>(registers, step.a), length = step.number;
        const int64_t* const __restrict b = cells_of<int64_t>(registers, step.b);
        int64_t* const __restrict out = cells_of<int64_t>(registers, step.out);
        int64_t outside = 0;
        for (int64_t i = 0; i < n; ++i) {
          const int64_t index = b[i] + (length & (b[i] >> 63));
          outside |= index | (length - 1 - index);  // negative if either is
          out[i] = a[i] * length + index;
        }
        if (outside < 0) return false;
        break;
      }
    }
  }
  const int64_t* const found = cells_of<int64_t>(registers, program.result);
  for (int64_t i = 0; i < n; ++i) result[i] = uint8_t(found[i]);
  return true;
}

template <class Stored, class T> void read_cells(const char* from, int64_t stride, T* out, int64_t n) {
  const auto read = [&](int64_t step) __attribute__((always_inline)) {
    for (int64_t i = 0; i < n; ++i) {
      Stored value;
      memcpy(&value, from + i * step, sizeof value);
      out[i] = T(value);
    }
  };
  stride == 0 ? read(0) : stride == sizeof(Stored) ? read(sizeof(Stored)) : read(stride);  // constants vectorize
}

// Evaluates a program on an array of cells of this shape; `registers` hold its constants. Returns false if an index is
// out of range.
inline bool evaluate_cells(const CellProgram& program, const int64_t (&shape)[3], char* registers, uint8_t* out) {
  const int64_t columns = shape[2], rows = shape[0] * shape[1];
  const int64_t width = columns < kCellLanes ? columns : kCellLanes, together = kCellLanes / width;
  for (int64_t first = 0; first < rows; first += together) {
    const int64_t some = rows - first < together ? rows - first : together;
    for (int64_t column = 0; column < columns; column += width) {
      const int64_t count = columns - column < width ? columns - column : width;  // `width` if several rows
      for (const CellInput* input = program.inputs; input < program.inputs + program.input_count; ++input) {
        for (int64_t row = 0; row < some; ++row) {
          const int64_t at = first + row, lane = row * count;
          const char* const from = input->data + at / shape[1] * input->stride[0] + at % shape[1] * input->stride[1] +
                                   column * input->stride[2];
          int64_t* const to = cells_of<int64_t>(registers, input->out) + lane;
          switch (input->type) {
            case kCellInt64:
              read_cells<int64_t>(from, input->stride[2], to, count);
              break;
            case kCellUint8:
              read_cells<uint8_t>(from, input->stride[2], to, count);
              break;
            case kCellFloat32:
              read_cells<float>(from, input->stride[2], cells_of<float>(registers, input->out) + lane, count);
              break;
            case kCellFloat64:
              read_cells<double>(from, input->stride[2], cells_of<double>(registers, input->out) + lane, count);
              break;
          }
        }
      }
      if (!run_cells(program, registers, some * count, out + first * columns + column)) return false;
    }
  }
  return true;
}

}  // namespace spattn
