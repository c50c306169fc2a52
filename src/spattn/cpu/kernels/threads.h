// What the Cython core asks of the threading runtime; every answer has a serial version for builds without OpenMP.
#pragma once
#include <stdint.h>
#include <time.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace spattn {

inline int max_threads() noexcept {
#if defined(_OPENMP)
  return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
  return 1;
#endif
}

inline bool built_with_openmp() noexcept {
#if defined(_OPENMP)
  return true;
#else
  return false;
#endif
}

inline int64_t monotonic_ns() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

}  // namespace spattn
