// Lists the kernel tables that this machine supports, and reads exact accumulators. Compiled without instruction-set
// flags.
#include "kernels.h"

#include "processor.h"

#include <math.h>

namespace spattn {
namespace {

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
#if defined(SPATTN_HAVE_BASELINE)
  tables[count++] = &baseline::table;
#endif
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
