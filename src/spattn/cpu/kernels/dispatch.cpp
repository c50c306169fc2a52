// Which instruction sets this machine (CPU and operating system) can run. Compiled without any instruction-set flag.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace spattn {
namespace {

#if defined(SPATTN_HAVE_AVX2) || defined(SPATTN_HAVE_AVX512) || defined(SPATTN_HAVE_AVX512BF16)
bool has_f16c() noexcept {  // __builtin_cpu_supports does not know the name in clang 14
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool has_avx2() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
#endif

#if defined(SPATTN_HAVE_AVX512) || defined(SPATTN_HAVE_AVX512BF16)
bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

#if defined(SPATTN_HAVE_AVX512BF16)
bool has_avx512bf16() noexcept {  // __builtin_cpu_supports knows the name from clang 19 on
  unsigned eax, ebx, ecx, edx;
  return has_avx512() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & bit_AVX512BF16);
}

// Is `vdpbf16ps` faster than the multiply-adds that it replaces? Measured on two machines: twice as fast on AMD Zen 5
// (466 against 232 GF/s per core), slower on an Intel core with AMX (DESIGN.md, 4). Other models are taken to be like
// their vendor's. Not decided by a measurement at run time, because the choice changes the last bits of results.
bool fast_dot_products() noexcept { return __builtin_cpu_is("amd"); }
#endif

}  // namespace

int usable_tables(const KernelTable** tables) noexcept {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
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
#if defined(SPATTN_HAVE_AVX2)
  if (has_avx2()) tables[count++] = &avx2::table;
#endif
  tables[count++] = &baseline::table;
  return count;
}

}  // namespace spattn
