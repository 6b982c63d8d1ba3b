// What is promised of the team of threads (src/quire/ops/cpu/src/team.h), under random use: tests/test_cpu_team.py
// compiles and runs it, with ThreadSanitizer too. The first argument names a test.
#include "team.h"

#include <sched.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

extern "C" int32_t quire_set_threads(int32_t count);
extern "C" int32_t quire_threads();
extern "C" int32_t quire_give_way(int32_t way);
extern "C" void quire_disorder(uint64_t seed);

namespace {

using quire::parallel;
using quire::Runs;
constexpr int MOST = 8;

// Some time, so that others come.
void compute(std::mt19937& random) {
    const int rounds = random() % 8 ? 0 : random() % 3000;
    for (volatile int i = 0; i < rounds; i = i + 1) {}
}

// A loop of random shape: every item is computed once, within the bounds, and no two threads have one number at a time.
// What items write is read afterwards without atomics: ThreadSanitizer sees whether the loop's end orders it.
void random_loop(std::mt19937& random) {
    const int64_t items = random() % 4 ? random() % 40 : random() % 5000;
    const int threads = quire_threads();
    Runs runs;
    if (random() % 2) runs.least = random() % 100;
    if (random() % 2) runs.most = std::max<int64_t>(runs.least, 1) + random() % 10;
    std::vector<int> times(items, 0);
    std::vector<std::atomic<int>> inside(MOST);
    std::vector<int> of_thread(MOST, 0);  // scratch: a race if two threads have one number
    const unsigned seed = random();
    parallel(items, runs, threads, [&](int64_t first, int64_t last, int thread) {
        CHECK(0 <= thread && thread < threads);
        CHECK(0 <= first && first < last && last <= items && last - first <= runs.most);
        CHECK(inside[thread].fetch_add(1) == 0);
        std::mt19937 own(seed + first);
        compute(own);
        of_thread[thread] += last - first;
        for (int64_t i = first; i < last; i++) times[i]++;
        inside[thread].fetch_sub(1);
    });
    int64_t computed = 0;
    for (int count : of_thread) computed += count;
    CHECK(computed == items);
    for (int count : times) CHECK(count == 1);
}

void some_loops(int count, unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < count; i++) {
        if (random() % 16 == 0) quire_set_threads(1 + random() % MOST);
        if (random() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
        random_loop(random);
    }
}

void loops() { some_loops(500, 1); }

void loops_in_disorder() {
    quire_disorder(12345);
    some_loops(150, 2);
    quire_disorder(987654321);
    some_loops(150, 3);
}

// All of them are served, by the team or by themselves.
void several_callers() {
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < 4; i++) callers.emplace_back([i] { some_loops(200, 10 + i); });
    for (auto& caller : callers) caller.join();
}

void stay_on_one_processor() {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

void one_processor() {
    stay_on_one_processor();
    quire_set_threads(4);
    some_loops(200, 20);
}

void forks() {
    quire_set_threads(4);
    some_loops(200, 30);
    for (int i = 0; i < 8; i++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            some_loops(100, 40 + i);
            std::_Exit(7);
        }
        some_loops(100, 50 + i);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    }
}

// Another thread ends the process while loops run.
void exit_in_the_middle() {
    std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        std::exit(0);
    }).detach();
    quire_set_threads(4);
    for (;;) some_loops(100, 60);
}

std::atomic<int> signals{0};
std::atomic<bool> elsewhere{false};
pthread_t caller;

// Signals interrupt the caller's sleep, and never reach a thread of the team.
void interrupted() {
    caller = pthread_self();
    struct sigaction action = {};
    action.sa_handler = [](int) {
        signals++;
        if (!pthread_equal(pthread_self(), caller)) elsewhere = true;
    };
    CHECK(sigaction(SIGALRM, &action, nullptr) == 0);
    itimerval often = {{0, 500}, {0, 500}};
    CHECK(setitimer(ITIMER_REAL, &often, nullptr) == 0);
    quire_set_threads(4);
    while (signals < 100) some_loops(50, 70);
    CHECK(!elsewhere);
}

// The number is the calling thread's own.
void numbers_of_threads() {
    CHECK(quire_threads() == 1);
    CHECK(quire_set_threads(3) == 1 && quire_threads() == 3);
    std::thread([] {
        CHECK(quire_threads() == 1);
        quire_set_threads(2);
    }).join();
    CHECK(quire_set_threads(0) == 3 && quire_threads() == 1);
    quire_set_threads(1 << 30);
    CHECK(quire_threads() == 1024);
}

// One item takes long, and all others are done meanwhile: nobody has a share of his own.
void nobody_has_a_share() {
    quire_set_threads(2);
    for (int i = 0; i < 20; i++) {
        std::atomic<int> others{0};
        parallel(100, quire::ONE_BY_ONE, 2, [&](int64_t item, int64_t, int) {
            if (item != 0) {
                others++;
                return;
            }
            for (int wait = 0; wait < 20000 && others < 99; wait++)
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            CHECK(others == 99);
        });
    }
}

// Who is held up in what he has taken has the rest of his share taken from him.
void shares_are_taken_over() {
    quire_set_threads(2);
    for (int i = 0; i < 20; i++) {
        std::atomic<int64_t> others{0};
        parallel(100, {}, 2, [&](int64_t first, int64_t last, int) {
            if (first != 0) {
                others += last - first;
                return;
            }
            CHECK(last <= 25);  // half of a share of two
            for (int wait = 0; wait < 20000 && others < 100 - last; wait++)
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            CHECK(others == 100 - last);
        });
    }
}

// Between items of a loop that gives way, another thread has the only processor; and items come one by one.
void gives_way() {
    stay_on_one_processor();
    std::atomic<bool> over{false};
    std::atomic<int64_t> other{0};
    std::thread busy([&] {
        while (!over) other++;
    });
    CHECK(quire_give_way(1) == 0);
    int64_t next = 0, before = -1;
    int turns = 0;
    parallel(60, {}, quire_threads(), [&](int64_t first, int64_t last, int) {
        CHECK(first == next && last == first + 1);
        next = last;
        turns += other != before;
        before = other;
    });
    CHECK(next == 60 && turns >= 10);  // alone it would be done before it is put aside
    CHECK(quire_give_way(0) == 1);
    parallel(60, {}, quire_threads(), [&](int64_t first, int64_t last, int) { CHECK(first == 0 && last == 60); });
    over = true;
    busy.join();
}

}  // namespace

int main(int count, char** arguments) {
    return run_named(count, arguments,
                     {{"loops", loops},
                      {"loops_in_disorder", loops_in_disorder},
                      {"several_callers", several_callers},
                      {"one_processor", one_processor},
                      {"forks", forks},
                      {"exit_in_the_middle", exit_in_the_middle},
                      {"interrupted", interrupted},
                      {"numbers_of_threads", numbers_of_threads},
                      {"nobody_has_a_share", nobody_has_a_share},
                      {"shares_are_taken_over", shares_are_taken_over},
                      {"gives_way", gives_way}});
}
