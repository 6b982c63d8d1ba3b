// See team.h.
//
// One atomic number, the ticket, says which loop it is and how many of its items have not been taken. Items are taken by
// making that number smaller, which succeeds only while it is what was read: so one who was put aside in between takes
// nothing from a later loop. The last ones to come take fewer and fewer (guided self-scheduling, Polychronopoulos and
// Kuck 1987), so that all end at about the same time, and each reads whole stretches of a weight.
//
// Who finds nothing to do looks again for a while, since the next loop mostly follows at once, and then sleeps: a
// processor that is idle gets the thread that waits for another one, and a neighbour gets his share.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <utility>

#include "simd.h"
#include "waiting.h"

namespace quire {
namespace {

constexpr int MOST_THREADS = 1024;
constexpr int64_t WORKER_SPINS_NS = 30'000;  // for the next loop
constexpr int64_t CALLER_SPINS_NS = 20'000;  // for those who have begun

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is a word");

// Sleeps while `word` is `value`; may return early.
void sleep_while(Word& word, uint32_t value) { syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr); }
void wake_one(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1); }

// Whether `done()` became true within so long.
template <class Done>
bool spin(int64_t ns, const Done& done) {
    for (const int64_t end = now() + ns;;) {
        for (int look = 0; look < LOOKS; look++) {
            if (done()) return true;
            pause();
        }
        if (now() > end) return false;
    }
}

// A loop's number above, the items that have not been taken below.
struct Ticket {
    static constexpr int ITEM_BITS = 32;
    uint64_t bits;

    uint64_t loop() const { return bits >> ITEM_BITS; }
    int64_t left() const { return bits & ((uint64_t(1) << ITEM_BITS) - 1); }
    Ticket next(int64_t items) const { return {(loop() + 1) << ITEM_BITS | (uint64_t)items}; }
};

class Team {
  public:
    // Not 0: items are computed one by one in a random order, for tests.
    std::atomic<uint64_t> disorder{0};

    bool begin() { return !busy_.exchange(true, std::memory_order_acquire); }
    void end() { busy_.store(false, std::memory_order_release); }

    // Between begin() and end() alone.
    void share_out(int64_t items, Runs runs, int threads, Run run, const void* body) {
        const int members = start(threads);
        run_.store(run, std::memory_order_relaxed);
        body_.store(body, std::memory_order_relaxed);
        items_.store(items, std::memory_order_relaxed);
        least_.store(std::max<int64_t>(runs.least, 1), std::memory_order_relaxed);
        most_.store(runs.most, std::memory_order_relaxed);
        members_.store(members, std::memory_order_relaxed);
        undone_.store((uint32_t)items, std::memory_order_relaxed);
        ticket_.store(Ticket{ticket_.load(std::memory_order_relaxed)}.next(items).bits);
        for (int i = 1; i < members; i++)
            if (asleep_[i].word.load() && asleep_[i].word.exchange(0)) wake_one(asleep_[i].word);
        while (take_some(0)) {}
        wait_for_others();
    }

  private:
    struct alignas(64) Sleep {
        Word word{0};
    };

    alignas(64) std::atomic<uint64_t> ticket_{0};
    // The loop. Written while no item is left to be taken, so that who takes one has read what belongs to it.
    std::atomic<Run> run_{nullptr};
    std::atomic<const void*> body_{nullptr};
    std::atomic<int64_t> items_{0}, least_{1}, most_{1};
    std::atomic<int> members_{1};
    alignas(64) Word undone_{0};
    std::atomic<bool> caller_sleeps_{false};
    alignas(64) std::atomic<bool> busy_{false};
    int started_ = 1;  // the caller is one
    Sleep asleep_[MOST_THREADS];

    // Takes some items and computes them; false where there is nothing to take for this member.
    bool take_some(int thread) {
        Ticket ticket{ticket_.load(std::memory_order_acquire)};
        for (;;) {
            const int64_t left = ticket.left(), members = members_.load(std::memory_order_relaxed);
            if (!left || thread >= members) return false;
            const int64_t items = items_.load(std::memory_order_relaxed);
            const int64_t least = least_.load(std::memory_order_relaxed), most = most_.load(std::memory_order_relaxed);
            const int64_t count = std::min({left, most, std::max(least, left / (2 * members))});
            const Run run = run_.load(std::memory_order_relaxed);
            const void* const body = body_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket.bits, ticket.bits - count, std::memory_order_acq_rel)) continue;
            const int64_t first = items - left;
            if (const uint64_t seed = disorder.load(std::memory_order_relaxed))
                compute_in_disorder(seed, items, first, first + count, run, body, thread);
            else
                run(body, first, first + count, thread);
            if (undone_.fetch_sub((uint32_t)count) == count && caller_sleeps_.load()) wake_one(undone_);
            return true;
        }
    }

    static void compute_in_disorder(uint64_t seed, int64_t items, int64_t first, int64_t last, Run run,
                                    const void* body, int thread) {
        const uint64_t some = seed % items + 1, step = std::gcd(some, (uint64_t)items) == 1 ? some : 1;
        for (int64_t i = first; i < last; i++) {
            const int64_t item = (int64_t)((seed + i * step) % items);
            run(body, item, item + 1, thread);
        }
    }

    void wait_for_others() {
        if (spin(CALLER_SPINS_NS, [&] { return !undone_.load(std::memory_order_acquire); })) return;
        caller_sleeps_.store(true);
        while (const uint32_t undone = undone_.load()) sleep_while(undone_, undone);
        caller_sleeps_.store(false, std::memory_order_relaxed);
    }

    [[noreturn]] void work(int thread) {
        for (;;) {
            const uint64_t seen = Ticket{ticket_.load(std::memory_order_acquire)}.loop();
            while (take_some(thread)) {}
            auto is_next = [&] { return Ticket{ticket_.load()}.loop() != seen; };
            if (spin(WORKER_SPINS_NS, is_next)) continue;
            Word& asleep = asleep_[thread].word;
            asleep.store(1);
            if (is_next()) asleep.store(0);
            while (asleep.load(std::memory_order_relaxed)) sleep_while(asleep, 1);
        }
    }

    // Starts those that lack; returns how many there are, of those wanted.
    int start(int wanted) {
        while (started_ < wanted && start_one(started_)) started_++;
        return std::min(started_, wanted);
    }

    struct Place {
        Team* team;
        int thread;
    };

    bool start_one(int thread) {
        auto enter = [](void* of) -> void* {
            const Place place = *(Place*)of;
            delete (Place*)of;
            place.team->work(place.thread);
        };
        sigset_t all, before;  // signals are for the threads of the program
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        Place* const place = new Place{this, thread};
        pthread_t made;
        const bool started = pthread_create(&made, nullptr, enter, place) == 0;
        if (started)
            pthread_detach(made);
        else
            delete place;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }
};

// It is never destroyed, since its threads may be at work when the process ends; and a fork, which has none of them,
// gets a new one.
Team* the_team() {
    static std::atomic<Team*> team{nullptr};
    static const int unused = [] {
        team = new Team;
        return pthread_atfork(nullptr, nullptr, [] {
            Team* fresh = new Team;
            fresh->disorder = team.load()->disorder.load();
            team = fresh;
        });
    }();
    (void)unused;
    return team.load(std::memory_order_relaxed);
}

}  // namespace

thread_local int threads_of_loops = 1;
thread_local bool gives_way = false;

int threads() { return threads_of_loops; }

void share_out(int64_t items, Runs runs, int threads, Run run, const void* body) {
    if (items <= 0) return;
    Team* const team = threads > 1 && items > runs.least ? the_team() : nullptr;
    if (!team || !team->begin()) {
        const int64_t most = gives_way ? 1 : runs.most;
        for (int64_t first = 0; first < items; first += most) {
            run(body, first, std::min(items, first + most), 0);
            if (gives_way) sched_yield();
        }
        return;
    }
    team->share_out(items, runs, threads, run, body);
    team->end();
}

}  // namespace quire

using namespace quire;

// How many threads the loops of the calling thread have from now on, itself included; returns how many they had.
QUIRE_API int32_t quire_set_threads(int32_t count) {
    return std::exchange(threads_of_loops, std::clamp<int32_t>(count, 1, MOST_THREADS));
}
QUIRE_API int32_t quire_threads() { return threads(); }

// Whether loops that the calling thread computes alone let other threads run after each item from now on; returns whether
// they did.
QUIRE_API int32_t quire_give_way(int32_t way) { return std::exchange(gives_way, way != 0); }

// For tests: where `seed` is not 0, items are computed one by one in an order that depends on it.
QUIRE_API void quire_disorder(uint64_t seed) { the_team()->disorder = seed; }
