// See team.h.
//
// A loop's items are cut into as many shares as it has threads. Each takes from its own share, and then from what others
// have left of theirs (affinity scheduling, Markatos and LeBlanc 1992): so it reads one stretch of a weight from begin to
// end, whose next lines the processor and the products ask for ahead. A share's atomic number, the ticket, says which loop
// it is and how many items have not been taken. Items are taken by making that number smaller, which succeeds only while
// it is what was read: so one who was put aside in between takes nothing from a later loop. Half of what is left is taken
// at a time (guided self-scheduling, Polychronopoulos and Kuck 1987), so that all end at about the same time. Where a loop
// limits how many are taken at a time, they go in their order: they lie in one share.
//
// Who finds nothing to do looks again for a while, since the next loop mostly follows at once, and then sleeps: a
// processor that is idle gets the thread that waits for another one, and a neighbour gets his share.
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

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

void sleep_while(Word& word, uint32_t value) { sleep_while(&word, value, Among::THREADS); }
void wake_one(Word& word) { wake(&word, Among::THREADS, false); }

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

// A loop's number above, the items of a share that have not been taken below.
struct Ticket {
    static constexpr int ITEM_BITS = 32;
    uint64_t bits;

    uint64_t loop() const { return bits >> ITEM_BITS; }
    int64_t left() const { return bits & ((uint64_t(1) << ITEM_BITS) - 1); }
    static Ticket of(uint32_t loop, int64_t items) { return {(uint64_t)loop << ITEM_BITS | (uint64_t)items}; }
};

// A loop of so many items as its shares see it.
struct Shares {
    int64_t items, count;
    int64_t begin(int64_t share) const { return (items * share + count - 1) / count; }
    int64_t size(int64_t share) const { return begin(share + 1) - begin(share); }
};

class Team {
  public:
    // Not 0: items are computed one by one in a random order, for tests.
    std::atomic<uint64_t> disorder{0};

    bool begin() { return !busy_.exchange(true, std::memory_order_acquire); }
    void end() { busy_.store(false, std::memory_order_release); }

    // Between begin() and end() alone.
    void share_out(int64_t items, Runs runs, int threads, Run run, const void* body) {
        const int64_t least = std::max<int64_t>(runs.least, 1);
        const int members = start((int)std::min<int64_t>(threads, (items + least - 1) / least));
        const Shares shares{items, runs.most < Runs().most ? 1 : members};
        run_.store(run, std::memory_order_relaxed);
        body_.store(body, std::memory_order_relaxed);
        items_.store(items, std::memory_order_relaxed);
        shares_.store(shares.count, std::memory_order_relaxed);
        least_.store(least, std::memory_order_relaxed);
        most_.store(runs.most, std::memory_order_relaxed);
        members_.store(members, std::memory_order_relaxed);
        undone_.store((uint32_t)items, std::memory_order_relaxed);
        loop_++;
        for (int i = 0; i < members; i++) {
            const int64_t size = i < shares.count ? shares.size(i) : 0;
            member_[i].ticket.store(Ticket::of(loop_, size).bits, std::memory_order_release);
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);  // who falls asleep sees his ticket, or is seen asleep
        for (int i = 1; i < members; i++) {
            Word& asleep = member_[i].asleep;
            if (asleep.load(std::memory_order_relaxed) && asleep.exchange(0)) wake_one(asleep);
        }
        while (take_some(0)) {}
        wait_for_others();
    }

  private:
    struct alignas(64) Member {
        std::atomic<uint64_t> ticket{0};  // of its share; where it has none, only to tell it that there is a loop
        Word asleep{0};
    };

    // The loop. Written while no item is left to be taken, so that who takes one has read what belongs to it.
    alignas(64) std::atomic<Run> run_{nullptr};
    std::atomic<const void*> body_{nullptr};
    std::atomic<int64_t> items_{0}, shares_{1}, least_{1}, most_{1};
    std::atomic<int> members_{1};
    alignas(64) Word undone_{0};
    std::atomic<bool> caller_sleeps_{false};
    alignas(64) std::atomic<bool> busy_{false};
    uint32_t loop_ = 0;
    int started_ = 1;  // the caller is one
    Member member_[MOST_THREADS];

    // Takes some items and computes them; false where there is nothing to take for this member.
    bool take_some(int thread) {
        const int64_t shares = shares_.load(std::memory_order_relaxed);
        for (int64_t i = 0; i < shares; i++)
            if (take_some_of((thread + i) % shares, thread)) return true;
        return false;
    }

    bool take_some_of(int64_t share, int thread) {
        std::atomic<uint64_t>& from = member_[share].ticket;
        Ticket ticket{from.load(std::memory_order_acquire)};
        for (;;) {
            const int64_t left = ticket.left(), members = members_.load(std::memory_order_relaxed);
            if (!left || thread >= members) return false;
            const Shares shares{items_.load(std::memory_order_relaxed), shares_.load(std::memory_order_relaxed)};
            const int64_t least = least_.load(std::memory_order_relaxed), most = most_.load(std::memory_order_relaxed);
            const int64_t takers = std::max<int64_t>(1, 2 * members / shares.count);
            const int64_t count = std::min({left, most, std::max(least, left / takers)});
            const Run run = run_.load(std::memory_order_relaxed);
            const void* const body = body_.load(std::memory_order_relaxed);
            if (!from.compare_exchange_weak(ticket.bits, ticket.bits - count, std::memory_order_acq_rel)) continue;
            const int64_t first = shares.begin(share + 1) - left;
            if (const uint64_t seed = disorder.load(std::memory_order_relaxed))
                compute_in_disorder(seed, shares.items, first, first + count, run, body, thread);
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
            Member& own = member_[thread];
            const uint64_t seen = Ticket{own.ticket.load(std::memory_order_acquire)}.loop();
            while (take_some(thread)) {}
            auto is_next = [&] { return Ticket{own.ticket.load()}.loop() != seen; };
            if (spin(WORKER_SPINS_NS, is_next)) continue;
            Word& asleep = own.asleep;
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
