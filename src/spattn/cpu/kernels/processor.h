// What this processor and operating system support. Compiled without instruction-set flags.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace spattn {
#if defined(__x86_64__)
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // zero if the processor lacks the leaf

  explicit Leaf(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

[[maybe_unused]] inline bool has_avx2() noexcept {  // clang 14: __builtin_cpu_supports lacks f16c
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (Leaf(1).ecx & bit_F16C);
}

[[maybe_unused]] inline bool has_avx512() noexcept {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] inline bool has_avx512bf16() noexcept {  // __builtin_cpu_supports has the name from clang 19 on
  return has_avx512() && (Leaf(7, 1).eax & bit_AVX512BF16);
}

// True if `vdpbf16ps` is faster than the multiply-adds that it replaces. It is on AMD Zen 5 (417 vs. 251 GF/s a core),
// but not on an Intel core with AMX (84 vs. 194): docs/cpu-roofline.md, Ceilings. We assume the same for other models
// of either vendor. A benchmark at run time could change the last bits of results between processes.
[[maybe_unused]] inline bool fast_dot_products() noexcept { return __builtin_cpu_is("amd"); }

// True if the processor has AMX for bfloat16 and Linux grants this process the tile registers, which it must request.
[[maybe_unused]] inline bool has_amx() noexcept {
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

}  // namespace spattn
