// Microbenchmarks of one core: each loop does only the operation that it is named after.
//
// Built by __init__.py with `cc -O3 -march=native`. Every function returns its work (flops, exponentials, bytes), or 0
// if the processor or the compiler lacks the instruction; the caller measures the time.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / 4)
typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Bits __attribute__((vector_size(VECTOR_BYTES)));

// 12 chains hide a latency of four cycles at two operations per cycle and fit AVX2's sixteen registers.
enum { kChains = 12 };

static volatile float sink;

static Vec splat(float x) { return x - (Vec){0}; }

static float total(const Vec* sums, int count) {
  float result = 0;
  for (int i = 0; i < count; ++i)
    for (int lane = 0; lane < LANES; ++lane) result += sums[i][lane];
  return result;
}

int64_t vector_bytes(void) { return VECTOR_BYTES; }

// Flops of `rounds` rounds of independent fused multiply-adds on registers.
int64_t fma_fp32(int64_t rounds) {
  Vec sums[kChains];
  const Vec x = splat(0.999f), y = splat(1e-3f);
  for (int i = 0; i < kChains; ++i) sums[i] = splat(0.1f * i);
  for (int64_t n = 0; n < rounds; ++n)
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * x + y;
  sink = total(sums, kChains);
  return rounds * kChains * LANES * 2;
}

// Flops of vdpbf16ps: two bfloat16 products per lane, accumulated in float32.
int64_t dot_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
  __m512 sums[kChains];
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80), y = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(0.1f * i);
  for (int64_t n = 0; n < rounds; ++n)
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], x, y);
  sink = total((const Vec*)sums, kChains);
  return rounds * kChains * 16 * 4;
#else
  (void)rounds;
  return 0;
#endif
}

#if defined(__AMX_BF16__) && defined(__linux__)
// gcc 12 reorders tile intrinsics; nothing may cross this.
#define FENCE() __asm__ volatile("" ::: "memory")

typedef struct __attribute__((packed)) {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

static int configure_tiles(void) {
  enum { kRequestPermission = 0x1023, kTileData = 18 };
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData)) return 0;
  TileShapes shapes;
  memset(&shapes, 0, sizeof shapes);
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
  _tile_loadconfig(&shapes);
  FENCE();
  return 1;
}

// 2 × 2 register blocking; operand tiles come from `panels` pairs of tiles of A and B.
static inline __attribute__((always_inline)) int64_t multiply_tiles(int64_t rounds, int64_t panels, int load) {
  static char a[32 << 10] __attribute__((aligned(64))), b[32 << 10] __attribute__((aligned(64))), c[4][1024];
  if (!configure_tiles()) return 0;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, a, 64);
  _tile_loadd(5, a + 1024, 64);
  _tile_loadd(6, b, 64);
  _tile_loadd(7, b + 1024, 64);
  for (int64_t n = 0; n < rounds; ++n) {
    const int64_t at = n % panels * 2048;
    FENCE();
    if (load) {
      _tile_loadd(4, a + at, 64);
      _tile_loadd(6, b + at, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    if (load) {
      _tile_loadd(7, b + at + 1024, 64);
    }
    _tile_dpbf16ps(1, 4, 7);
    if (load) {
      _tile_loadd(5, a + at + 1024, 64);
    }
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  FENCE();
  _tile_stored(0, c[0], 64);
  _tile_stored(1, c[1], 64);
  _tile_stored(2, c[2], 64);
  _tile_stored(3, c[3], 64);
  _tile_release();
  sink = c[0][0];
  return rounds * 4 * 16 * 16 * 32 * 2;
}
#else
static int64_t multiply_tiles(int64_t rounds, int64_t panels, int load) {
  (void)rounds, (void)panels, (void)load;
  return 0;
}
#endif

// Flops of AMX tile products whose operands stay in tile registers.
int64_t amx_registers(int64_t rounds) {
  return multiply_tiles(rounds, 1, 0);
}

// Flops of AMX tile products that load every operand from L1 (16 KiB), as kernels do.
int64_t amx_l1(int64_t rounds) {
  return multiply_tiles(rounds, 4, 1);
}

// 2^x for softmax, rounded to nearest by a magic number. AVX-512: a table of 16 powers in a register and a polynomial of
// degree 3; otherwise degree 6.
#if defined(__AVX512F__)
static inline Vec exp2_vector(Vec x) {
  const Vec powers = {1.0f,        1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f,
                      1.29683955f, 1.35425555f, 1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f,
                      1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
  const Bits place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i table = (__m512i)((Bits)powers - (place << 19));
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ);
  const Vec shifted = x + 786432.0f, f = x - (shifted - 786432.0f);
  const Vec power = (Vec)((Bits)_mm512_permutexvar_epi32((__m512i)shifted, table) + ((Bits)shifted << 19));
  const Vec slope = (5.55054098e-2f * f + 2.40233555e-1f) * f + 6.93147182e-1f;
  return (Vec)_mm512_maskz_fmadd_ps(normal, (__m512)(slope * f), (__m512)power, (__m512)power);
}
#else
static inline Vec exp2_vector(Vec x) {
  static const float c[] = {1.5345812e-4f, 1.3399931e-3f, 9.6184890e-3f, 5.5503288e-2f, 2.40226469e-1f, 6.93147206e-1f, 1.0f};
  const Vec low = splat(-127.0f);
  const Bits below = x < low;
  x = (Vec)((below & (Bits)low) | (~below & (Bits)x));
  const Vec shifted = x + (12582912.0f + 127.0f);
  const Vec f = x - (shifted - (12582912.0f + 127.0f));
  Vec power = splat(c[0]);
  for (int i = 1; i < 7; ++i) power = power * f + c[i];
  return power * (Vec)((Bits)shifted << 23);
}
#endif

// Exponentials: 2^(scale·x − shift) over a buffer in L1, with the row sum: a softmax without the maximum.
int64_t exp_fp32(float* restrict values, float* restrict results, int64_t count, int64_t rounds) {
  const Vec* from = (const Vec*)values;
  Vec* to = (Vec*)results;
  Vec sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = splat(0);
  for (int64_t n = 0; n < rounds; ++n) {
    for (int64_t at = 0; at < count / LANES; at += 4)
      for (int i = 0; i < 4; ++i) {
        const Vec power = exp2_vector(from[at + i] * 1.25f - 0.5f);
        to[at + i] = power;
        sums[i] += power;
      }
    __asm__ volatile("" ::: "memory");
  }
  sink = total(sums, 4);
  return rounds * count;
}

// Bytes read sequentially from a buffer of `bytes` (a multiple of 512).
int64_t read_memory(const char* buffer, int64_t bytes, int64_t rounds) {
  const Vec* from = (const Vec*)buffer;
  Vec sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = splat(0);
  for (int64_t n = 0; n < rounds; ++n) {
    for (int64_t at = 0; at < bytes / VECTOR_BYTES; at += 8)
      for (int i = 0; i < 8; ++i) sums[i] += from[at + i];
    __asm__ volatile("" ::: "memory");
  }
  sink = total(sums, 8);
  return rounds * bytes;
}
