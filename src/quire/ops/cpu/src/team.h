// Threads that share out the items of a loop.
//
// Whoever comes takes some of the items that have not been taken yet, the caller among them, until none is left. So no thread
// waits for a thread that the system has put aside for another process's sake, unless that thread has begun an item.
// An item's result must not depend on who computes it, or when: then no bit depends on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

// How many threads a loop of this thread has, itself included: what `quire_set_threads` was told on it, or 1.
int threads();

// Computes the items first .. last - 1. `thread`: 0 .. threads - 1, and no two of a loop have the same at a time.
using Run = void (*)(const void* body, int64_t first, int64_t last, int thread);

// How many items a thread takes at a time.
struct Runs {
    int64_t least = 1, most = INT32_MAX;
};
constexpr Runs ONE_BY_ONE{1, 1};

// Runs all items; returns when all are done. Loops are not nested, and none throws. While the team computes for another
// caller, the caller computes all items itself.
void share_out(int64_t items, Runs runs, int threads, Run run, const void* body);

// body(first, last, thread) over all of 0 .. items - 1, by at most so many threads.
template <class Body>
void parallel(int64_t items, Runs runs, int threads, const Body& body) {
    const Run run = [](const void* of, int64_t first, int64_t last, int thread) {
        (*(const Body*)of)(first, last, thread);
    };
    share_out(items, runs, threads, run, &body);
}

// body(item) for each of 0 .. items - 1.
template <class Body>
void parallel_each(int64_t items, Runs runs, const Body& body) {
    parallel(items, runs, threads(), [&](int64_t first, int64_t last, int) {
        for (int64_t item = first; item < last; item++) body(item);
    });
}

}  // namespace quire
