// Prints the name of the best instruction set of this machine, for the build option isa=native; no part of the package.
#include "processor.h"

#include <stdio.h>

int main() {
  const char* best = "baseline";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (spattn::has_amx()) {
    best = "amx";
  } else if (spattn::has_avx512bf16() && spattn::fast_dot_products()) {
    best = "avx512bf16";
  } else if (spattn::has_avx512()) {
    best = "avx512";
  } else if (spattn::has_avx2()) {
    best = "avx2";
  }
#endif
  puts(best);
}
