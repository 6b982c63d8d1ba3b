// What those need who wait for another thread, or process, by looking again and again.
#pragma once

#include <sched.h>
#include <time.h>

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
