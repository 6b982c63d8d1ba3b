// Threads that share out the items of a loop.
//
// Whoever comes takes some of the items that have not been taken yet, the caller among them, until none is left: first of
// a share of his own, whose items lie side by side, then of what others have left of theirs. So no thread waits for a thread
// that the system has put aside for another process's sake, unless that thread has begun an item.
// An item's result must not depend on who computes it, or when: then no bit depends on the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "waiting.h"

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

// Work that comes before a loop's items: who takes an item finishes it first, together with the others who did. So no loop
// of its own has to end, and nobody waits for a thread that has not begun a part of it.
class Before {
  public:
    // `at_once`: pieces that a thread takes at a time, at least one.
    Before(int64_t pieces, int64_t at_once)
        : pieces_(pieces), at_once_(std::max<int64_t>(at_once, 1)), undone_(pieces) {}

    bool done() const { return undone_.load(std::memory_order_acquire) == 0; }

    // body(piece) for each of 0 .. pieces - 1; returns when all are done.
    template <class Body>
    void finish(const Body& body) {
        if (done()) return;
        for (int64_t first; (first = taken_.fetch_add(at_once_, std::memory_order_relaxed)) < pieces_;) {
            const int64_t last = std::min(pieces_, first + at_once_);
            for (int64_t piece = first; piece < last; piece++) body(piece);
            undone_.fetch_sub(last - first, std::memory_order_acq_rel);
        }
        wait_until([this] { return done(); });
    }

  private:
    const int64_t pieces_, at_once_;
    std::atomic<int64_t> taken_{0}, undone_;
};

}  // namespace quire
