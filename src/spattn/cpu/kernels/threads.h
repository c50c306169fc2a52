// Threading for the Cython core: OpenMP queries with serial fallbacks, and the team size limit.
#pragma once
#include <stdint.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace spattn {

#if defined(_OPENMP)
inline bool built_with_openmp() noexcept { return true; }
#else
inline bool built_with_openmp() noexcept { return false; }
inline int omp_in_parallel() noexcept { return 0; }
inline int omp_get_max_threads() noexcept { return 1; }
#endif

inline bool in_parallel_region() noexcept { return omp_in_parallel(); }
inline int max_threads() noexcept { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

inline int64_t clock_ns(clockid_t clock) noexcept {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}
inline int64_t monotonic_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }
inline int64_t thread_cpu_ns() noexcept { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

// Limits the team size while other processes occupy the cores.
//
// A preempted thread delays its whole team: OpenMP joins all threads, and waiting threads spin at first, which delays
// the preempted one further. The limit drops to half the team after a region in which a thread waited for a core at
// least half of the time. It doubles after a hold time, which quadruples each time the limit drops. Long regions are
// exempt: they outlast the scheduler's time slices, so that each thread gets a share of the cores.
class TeamLimit {
 public:
  int of(int threads) noexcept {
    int limit = limit_.load(std::memory_order_relaxed);
    if (limit == kNone) return threads;
    const int64_t now = monotonic_ns();
    if (now >= until_.load(std::memory_order_relaxed)) {
      limit = limit >= threads ? kNone : 2 * limit;
      limit_.store(limit, std::memory_order_relaxed);
      until_.store(now + hold_.load(std::memory_order_relaxed), std::memory_order_relaxed);
      if (limit == kNone) hold_.store(kShortest, std::memory_order_relaxed);
    }
    return std::min(limit, threads);
  }

  // Lowers the limit after a region of `region` ns if it was short and a thread waited too long for a core. The threads
  // ran for `worked` ns in total, and one of them waited `lost` ns.
  void observe(int threads, int64_t region, int64_t worked, int64_t lost) noexcept {
    if (lost < kNoticeable || 2 * lost < region || worked > threads * kLong) return;
    const int64_t hold = std::min(4 * hold_.load(std::memory_order_relaxed), kLongest);
    hold_.store(hold, std::memory_order_relaxed);
    until_.store(monotonic_ns() + hold, std::memory_order_relaxed);
    limit_.store(std::max(threads / 2, 1), std::memory_order_relaxed);
  }

 private:
  static constexpr int kNone = 1 << 30;
  static constexpr int64_t kNoticeable = 200'000;                             // ns; waking an idle core takes less
  static constexpr int64_t kShortest = 10'000'000, kLongest = 2'000'000'000;  // hold times in ns
  static constexpr int64_t kLong = 25'000'000;  // mean ns per thread: more than six Linux time slices

  std::atomic<int> limit_{kNone};
  std::atomic<int64_t> until_{0}, hold_{kShortest};
};

inline TeamLimit& team_limit() noexcept {
  static TeamLimit limit;
  return limit;
}

inline int limited_team(int threads) noexcept { return team_limit().of(threads); }

inline void observe_team(int threads, int64_t region, int64_t worked, int64_t lost) noexcept {
  team_limit().observe(threads, region, worked, lost);
}

}  // namespace spattn
