// Warpgroup matrix products (WGMMA) and their fences. One PTX instruction per function.
//
// D (64 x N, float32, registers) += A (64 x 16) B (16 x N) for the element type SPATTN_PTX_TYPE (bf16 or f16).
// Accumulator 4 i + 2 h + b of lane l in warp w is row 16 w + 8 h + l / 4, column 8 i + 2 (l % 4) + b. An A operand in
// registers has the same order: four 32-bit pairs cover 16 columns. PTX ISA, "Asynchronous Warpgroup Level Matrix".
#pragma once

#include <cstdint>

#include "common/element.cuh"

// Types, depth and transpositions of Product<128>; 8-bit operands have 32 columns and are K-major.
#if SPATTN_FLOAT8
#define SPATTN_PTX_PRODUCT "k32.f32.e4m3.e4m3 "
#define SPATTN_PTX_ROWS ""
#define SPATTN_PTX_COLUMNS ""
#else
#define SPATTN_PTX_PRODUCT "k16.f32." SPATTN_PTX_TYPE "." SPATTN_PTX_TYPE " "
#define SPATTN_PTX_ROWS ", 0, 0"
#define SPATTN_PTX_COLUMNS ", 1"
#endif

namespace spattn::sm90 {

// Packs two floats as 16-bit elements of an operand, `low` in the low half.
__device__ __forceinline__ uint32_t narrow2(float low, float high) {
  Element2 pair;
  narrow(low, high, pair);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// Describes a shared-memory operand in the 128-byte swizzle. Strides are in bytes; the tile is aligned to 1024 bytes.
//   K-major, 64 contiguous elements of K:          `eight` = 1024 (eight rows), `panel` unused; 16 of K are 32 bytes.
//   M- or N-major, 64 contiguous elements of it:   `eight` = 1024 (eight of K), `panel` = stride to the next 64.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t panel, uint32_t eight) {
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(panel >> 4) << 16 |
         static_cast<uint64_t>(eight >> 4) << 32 | kSwizzle128 << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Stores four 8 x 8 matrices of 16-bit elements, in accumulator order, to the shared rows that the lanes address.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements, transposed, from the shared rows that the lanes address.
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Packs four floats as float8_e4m3fn, `a` in the lowest byte; larger ones become 448.
__device__ __forceinline__ uint32_t narrow4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

template <int kColumns>
struct Product;

template <>
struct Product<32> {
  static constexpr int kCount = 16;

  // See Product<64>::shared.
  template <int kTransposed = 0>
  __device__ __forceinline__ static void shared(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." SPATTN_PTX_TYPE "." SPATTN_PTX_TYPE
        " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, keep, 1, 1, %19, %19;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed));
  }
};

template <>
struct Product<64> {
  static constexpr int kCount = 32;

  // A and B from shared memory, K-major or (kTransposed) M- and N-major. `accumulate` = 0 overwrites D.
  template <int kTransposed = 0>
  __device__ __forceinline__ static void shared(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." SPATTN_PTX_TYPE "." SPATTN_PTX_TYPE
        " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, keep, 1, 1, %35, %35;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposed));
  }

  // A from registers, B from shared memory, N-major. `accumulate` = 0 overwrites D.
  __device__ __forceinline__ static void registers(float* d, const uint32_t* a, uint64_t b, int accumulate = 1) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." SPATTN_PTX_TYPE "." SPATTN_PTX_TYPE
        " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, keep, 1, 1, 1;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
};

template <>
struct Product<128> {
  static constexpr int kCount = 64;

  // A and B from shared memory, both K-major. `accumulate` = 0 overwrites D.
  __device__ __forceinline__ static void shared(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128" SPATTN_PTX_PRODUCT
        "{"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, %64, %65, keep, 1, 1" SPATTN_PTX_ROWS ";\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
  }

  // A from registers, B from shared memory, N-major. `accumulate` = 0 overwrites D.
  __device__ __forceinline__ static void registers(float* d, const uint32_t* a, uint64_t b, int accumulate = 1) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128" SPATTN_PTX_PRODUCT
        "{"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, {%64, %65, %66, %67}, %68, keep, 1, 1" SPATTN_PTX_COLUMNS ";\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
  }
};

}  // namespace spattn::sm90
