// Detects the instruction sets of this CPU and operating system, and reads exact accumulators. Compiled without
// instruction-set flags.
#include "kernels.h"

#include <math.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spattn {
namespace {

#if defined(__x86_64__)
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // zero if the processor lacks the leaf

  explicit Leaf(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

[[maybe_unused]] bool has_avx2() noexcept {  // clang 14: __builtin_cpu_supports lacks f16c
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (Leaf(1).ecx & bit_F16C);
}

[[maybe_unused]] bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_avx512bf16() noexcept {  // __builtin_cpu_supports has the name from clang 19 on
  return has_avx512() && (Leaf(7, 1).eax & bit_AVX512BF16);
}

// True if `vdpbf16ps` is faster than the multiply-adds that it replaces. It is on AMD Zen 5 (417 vs. 251 GF/s a core),
// but not on an Intel core with AMX (84 vs. 194): docs/cpu-roofline.md, Ceilings. We assume the same for other models
// of either vendor. A benchmark at run time could change the last bits of results between processes.
[[maybe_unused]] bool fast_dot_products() noexcept { return __builtin_cpu_is("amd"); }

// True if the processor has AMX for bfloat16 and Linux grants this process the tile registers, which it must request.
[[maybe_unused]] bool has_amx() noexcept {
#if defined(SPATTN_AMX_EMULATED)
  return has_avx512bf16();
#elif defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22, kSaved = 3u << 17, kOsxsave = 1u << 27;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, missing in old asm/prctl.h
  const bool there = (Leaf(7).edx & (kTile | kBf16)) == (kTile | kBf16) && (Leaf(1).ecx & kOsxsave);
  if (!has_avx512bf16() || !there) return false;
  unsigned low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kSaved) == kSaved && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

int find_tables(const KernelTable** tables) noexcept {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(SPATTN_HAVE_AMX) && !defined(SPATTN_AMX_EMULATED)
  if (has_amx()) tables[count++] = &amx::table;
#endif
#if defined(SPATTN_HAVE_AVX512BF16)
  if (has_avx512bf16() && fast_dot_products()) tables[count++] = &avx512bf16::table;
#endif
#if defined(SPATTN_HAVE_AVX512)
  if (has_avx512()) tables[count++] = &avx512::table;
#endif
#if defined(SPATTN_HAVE_AVX512BF16)
  if (has_avx512bf16() && !fast_dot_products()) tables[count++] = &avx512bf16::table;
#endif
#if defined(SPATTN_HAVE_AMX) && defined(SPATTN_AMX_EMULATED)  // correct, but slow
  if (has_amx()) tables[count++] = &amx::table;
#endif
#if defined(SPATTN_HAVE_AVX2)
  if (has_avx2()) tables[count++] = &avx2::table;
#endif
  tables[count++] = &baseline::table;
  return count;
}

}  // namespace

double exact_sum(const int64_t* words) noexcept {
  constexpr int kDigits = kSumWords - 1;
  const int64_t flags = words[kDigits];
  if (flags & kNotANumber || (flags & kPlusInfinity && flags & kMinusInfinity)) return __builtin_nan("");
  if (flags) return flags & kPlusInfinity ? __builtin_inf() : -__builtin_inf();
  int64_t digits[kDigits], any = 0;
  for (int i = 0; i < kDigits; ++i) any |= digits[i] = words[i];
  if (!any) return 0;
  const auto carry = [&] {
    for (int i = 0; i + 1 < kDigits; ++i) digits[i + 1] += digits[i] >> 32, digits[i] &= 0xffffffff;
  };
  carry();
  const bool negative = digits[kDigits - 1] < 0;
  if (negative) {
    for (int64_t& digit : digits) digit = -digit;
    carry();
  }
  double sum = 0;
  for (int i = 0; i < kDigits; ++i) sum += ::ldexp(double(digits[i]), 32 * i - 160);
  return negative ? -sum : sum;
}

int usable_tables(const KernelTable** tables) noexcept {
  static const KernelTable* found[kMaxTables];
  static const int count = find_tables(found);
  for (int i = 0; i < count; ++i) tables[i] = found[i];
  return count;
}

}  // namespace spattn
