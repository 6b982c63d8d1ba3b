// What those need who wait for another thread, or process, by looking again and again.
#pragma once

#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>
#include <cstdint>

namespace quire {

constexpr int LOOKS = 32;  // between two looks at the clock

// Nanoseconds of a clock that is never set.
inline int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Between two looks.
inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // about as long as x86's pause; yield takes no time at all
#endif
}

// Who shares the word that is waited for: the threads of a process, or several processes.
enum class Among { THREADS, PROCESSES };

#if defined(__APPLE__)
// What the C++ library of macOS waits with (see libcxx/src/atomic.cpp in LLVM). They are in libSystem, and in no header.
extern "C" int __ulock_wait(uint32_t operation, void* address, uint64_t value, uint32_t microseconds);
extern "C" int __ulock_wake(uint32_t operation, void* address, uint64_t value);
constexpr uint32_t ulock(Among among) { return among == Among::THREADS ? 1 : 3; }  // UL_COMPARE_AND_WAIT, .._SHARED
constexpr uint32_t WAKE_ALL = 0x100;                                             // ULF_WAKE_ALL
#endif

// Sleeps while the word at `address` is `value`, at most so long (0: for ever); may return early.
inline void sleep_while(void* address, uint32_t value, Among among, int64_t ns = 0) {
#if defined(__APPLE__)
    __ulock_wait(ulock(among), address, value, uint32_t(ns / 1000));
#else
    const timespec most{ns / 1'000'000'000, ns % 1'000'000'000};
    const int operation = among == Among::THREADS ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
    syscall(SYS_futex, address, operation, value, ns ? &most : nullptr);
#endif
}

inline void wake(void* address, Among among, bool all) {
#if defined(__APPLE__)
    __ulock_wake(ulock(among) | (all ? WAKE_ALL : 0), address, 0);
#else
    syscall(SYS_futex, address, among == Among::THREADS ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, all ? INT_MAX : 1);
#endif
}

// Looks until `done()`; from the second round on, another thread may run between two of them.
template <class Done>
void wait_until(const Done& done) {
    for (int64_t looks = 1; !done(); looks++)
        if (looks % LOOKS)
            pause();
        else
            sched_yield();
}

}  // namespace quire
