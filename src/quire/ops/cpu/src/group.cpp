// See group.h.
//
// A collective is one wait: each rank writes what is its own, raises its counter, and waits until all counters are there.
// There are two buffers, which take turns: who writes into one has come past the wait of the other, so all have read it.
// With its part a rank brings a word that must be the same on all: the shape of the matrix, or the digest of a step.
//
// Who waits looks again for a while, then lets others run, then sleeps until the counter that it waits for is raised. It
// stops waiting where a rank gave up the step, or is lost. After a step was given up, the counters differ; so all ranks
// begin anew at the number of a plan, which the upper bits of the counters have from there on: they only ever grow. Whoever
// begins anew gives up what came before, so others do not take its counter for that of an earlier step.
//
// Ranks on several machines have such a memory on each of them, and a mirror on each tells the others what its own ranks
// have written, in the order in which they wrote it: bytes, then the counter; that a step is given up, then the counter
// of who begins anew. So what a rank sees of another machine is what was there a little earlier, and as it may come late
// at any time, nothing above depends on how soon it is seen.
#include "group.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>

#include "simd.h"
#include "team.h"
#include "waiting.h"

namespace quire {
namespace {

constexpr int MOST_RANKS = 256;
constexpr int64_t SPINS_NS = 50'000, YIELDS_NS = 1'000'000, SLEEPS_NS = 100'000'000;
constexpr int64_t PAGE = 4096;
constexpr int64_t HEAD = 64;  // of what a rank brings to an exchange
constexpr int64_t HEADS = 2 * MOST_RANKS * HEAD;  // of all ranks, each of whose parts begins at a multiple

using Counter = std::atomic<uint64_t>;
static_assert(sizeof(Counter) == 8 && Counter::is_always_lock_free, "shared between processes");

// The counter's value when a rank begins anew with the plan of this number; and that number, or of a plan after it. A plan
// has fewer collectives than the lower bits can count, and there are fewer plans than the upper ones can.
constexpr int COUNT_BITS = 24;
constexpr uint64_t first_of(int64_t number) { return (uint64_t)number << COUNT_BITS; }
constexpr int64_t number_of(uint64_t count) { return (int64_t)(count >> COUNT_BITS); }

// A futex is 32 bits: the lower half, which comes first on the machines that there are kernels for. Of two who wait, one
// may clear `awaited` for the other, and who begins anew may change the upper half alone: so nobody sleeps long.
void sleep_while(Counter& counter, uint64_t value) {
    sleep_while(&counter, (uint32_t)value, Among::PROCESSES, SLEEPS_NS);
}

void wake_all(Counter& counter) { wake(&counter, Among::PROCESSES, true); }

// Bytes that a rank has written into a buffer: `own` of each of so many rows of `width`, from `begin` on.
struct Region {
    int64_t begin, own, width, rows;
};
constexpr Region NOTHING{0, 0, 0, 0};

// A region that a mirror may read while the rank begins anew: then it is of no use, as the mirror finds out.
struct SharedRegion {
    std::atomic<int64_t> begin, own, width, rows;

    void store(const Region& region) {
        begin.store(region.begin, std::memory_order_release);
        own.store(region.own, std::memory_order_release);
        width.store(region.width, std::memory_order_release);
        rows.store(region.rows, std::memory_order_release);
    }
    Region load() const { return {begin.load(), own.load(), width.load(), rows.load()}; }
};

// One rank's, written by it alone but for `awaited`; another machine's by the mirror.
struct alignas(64) Place {
    Counter arrived;                // see above; a collective raises it by 1
    std::atomic<uint32_t> awaited;  // somebody sleeps until it arrives
    Counter word[2];                // see above; they take turns as the buffers do
    SharedRegion region[2];         // likewise

    void arrive(uint64_t count) {
        arrived.store(count);
        if (awaited.load() && awaited.exchange(0)) wake_all(arrived);
    }
};

// The beginning of the shared memory; zeros are its first state.
struct Shared {
    std::atomic<int64_t> given_up;  // all plans since those that began anew with a number below this one
    std::atomic<int32_t> lost;      // a rank + 1
    std::atomic<int32_t> dozing;    // the mirror, until somebody rings the bell
    Place places[MOST_RANKS];
};

}  // namespace

struct Group {
    Shared* shared;
    char* buffers[2];
    int64_t bytes;  // of a buffer
    int rank, size;
    int64_t timeout_ns;
    int bell;  // of this machine's mirror; -1: there is none
    int64_t epoch = 0;  // number of the plan with which it began anew
    uint64_t arrived = 0;
    int64_t gathers = 0, received = 0;

    Place& own() { return shared->places[rank]; }
    int turn() const { return arrived & 1; }

    // Why nobody may wait any more, or DONE.
    Outcome ended() const {
        if (shared->lost.load(std::memory_order_relaxed)) return LOST;
        return shared->given_up.load(std::memory_order_relaxed) > epoch ? GIVEN_UP : DONE;
    }

    void lose(int other) {
        int32_t none = 0;
        shared->lost.compare_exchange_strong(none, other + 1);
        wake();
    }

    // The plan of this number, and all before it.
    void give_up(int64_t number) {
        give_up_before(number + 1);
        wake();
    }

    // Until all have given up what came before the plan of this number.
    Outcome begin_anew(int64_t number) {
        give_up_before(number);
        wake();
        epoch = number;
        arrived = first_of(number);
        return meet((uint64_t)number, NOTHING);
    }

    // This rank has written what is its own; returns when all have.
    Outcome meet(uint64_t word, const Region& region) {
        const int slot = turn();
        own().word[slot].store(word);
        if (bell >= 0) own().region[slot].store(region);
        arrived++;
        own().arrive(arrived);
        ring();
        bool same = true;
        for (int other = 0; other < size; other++) {
            Place& place = shared->places[other];
            auto is_there = [&] { return place.arrived.load(std::memory_order_acquire) >= arrived; };
            const Outcome outcome = is_there() ? DONE : wait(other, place, is_there);
            if (outcome != DONE) return outcome;
            same &= place.word[slot].load() == word;
        }
        // Who has begun anew has arrived, too, and may have brought the next word; but gave up this step before.
        if (const Outcome outcome = ended(); outcome != DONE) return outcome;
        return same ? DONE : DIFFER;
    }

  private:
    void give_up_before(int64_t number) {
        int64_t before = shared->given_up.load();
        while (before < number && !shared->given_up.compare_exchange_weak(before, number)) {}
    }

    void ring() {
        const uint64_t one = 1;
        if (bell >= 0 && shared->dozing.load() && shared->dozing.exchange(0)) (void)!write(bell, &one, sizeof one);
    }

    void wake() {
        for (int other = 0; other < size; other++) wake_all(shared->places[other].arrived);
        ring();
    }

    // Until the other one is there.
    template <class Done>
    Outcome wait(int other, Place& place, const Done& is_there) {
        const int64_t begin = now();
        for (;;) {
            for (int look = 0; look < LOOKS; look++) {
                if (is_there()) return DONE;
                pause();
            }
            if (const Outcome outcome = ended(); outcome != DONE) return outcome;
            const int64_t waited = now() - begin;
            if (waited < SPINS_NS) continue;
            if (waited > timeout_ns) {
                lose(other);
                return LOST;
            }
            if (waited < YIELDS_NS && bell < 0) {  // what comes from elsewhere takes longer, and needs a processor
                sched_yield();
                continue;
            }
            const uint64_t seen = place.arrived.load();
            place.awaited.store(1);
            if (!is_there() && ended() == DONE) sleep_while(place.arrived, seen);
        }
    }
};

Outcome gather(Group& group, const void* own, int64_t rows, Share share, int64_t item, const char** all) {
    const int64_t begin = share.begin * item, bytes = share.own * item, width = share.width * item;
    if (rows * width > group.bytes) return TOO_LARGE;
    if (const Outcome outcome = group.ended(); outcome != DONE) return outcome;
    char* const buffer = group.buffers[group.turn()];
    parallel_each(rows, Runs{1 + (1 << 18) / (bytes + 1), INT32_MAX}, [&](int64_t row) {
        std::memcpy(buffer + row * width + begin, (const char*)own + row * bytes, bytes);
    });
    group.gathers++;
    group.received += rows * (width - bytes);
    *all = buffer;
    return group.meet((uint64_t)rows << 32 | (uint64_t)width, {begin, bytes, width, rows});
}

int64_t room_of(const Group& group) { return group.bytes; }

Outcome begin_parts(Group& group, int64_t bytes, char** parts) {
    *parts = group.buffers[group.turn()];
    return bytes > group.bytes ? TOO_LARGE : group.ended();
}

Outcome end_parts(Group& group, uint64_t shape, int64_t begin, int64_t own, int64_t bytes) {
    group.gathers++;
    group.received += bytes - own;
    return group.meet(shape, {begin, own, own, 1});
}

// Each rank has an equal part of the buffer, which begins with the number of its bytes.
Outcome exchange(Group& group, const Bytes* own, int64_t count, uint64_t word, Bytes* parts) {
    const int64_t room = (group.bytes + HEADS) / group.size / HEAD * HEAD;
    int64_t size = 0;
    for (int64_t i = 0; i < count; i++) size += own[i].size;
    if (HEAD + size > room) return TOO_LARGE;
    if (const Outcome outcome = group.ended(); outcome != DONE) return outcome;
    char* const buffer = group.buffers[group.turn()];
    char* place = buffer + group.rank * room;
    std::memcpy(place, &size, sizeof size);
    place += HEAD;
    for (int64_t i = 0; i < count; place += own[i++].size) std::memcpy(place, own[i].data, own[i].size);
    const Outcome outcome = group.meet(~word, {group.rank * room, HEAD + size, HEAD + size, 1});
    if (outcome != DONE) return outcome;
    group.gathers++;
    for (int rank = 0; rank < group.size; rank++) {
        const char* const begin = buffer + rank * room;
        std::memcpy(&size, begin, sizeof size);
        parts[rank] = {begin + HEAD, size};
        group.received += rank == group.rank ? 0 : size;
    }
    return DONE;
}

}  // namespace quire

using namespace quire;

// Bytes of shared memory for matrices of so many bytes.
QUIRE_API int64_t quire_group_bytes(int64_t matrix) {
    return (sizeof(Shared) + PAGE - 1) / PAGE * PAGE + 2 * ((matrix + PAGE - 1) / PAGE * PAGE + HEADS);
}

// A member of the group that meets in `memory`, which is zeros at first; null where there is no memory for it. `bell`: an
// event descriptor that wakes this machine's mirror; -1: all ranks are on this machine.
QUIRE_API Group* quire_group_join(char* memory, int64_t matrix, int32_t rank, int32_t size, double timeout,
                                  int32_t bell) {
    if (size > MOST_RANKS) return nullptr;
    Group* const group = new (std::nothrow) Group;
    if (!group) return nullptr;
    group->shared = (Shared*)memory;
    group->bytes = (matrix + PAGE - 1) / PAGE * PAGE;
    group->buffers[0] = memory + (sizeof(Shared) + PAGE - 1) / PAGE * PAGE;
    group->buffers[1] = group->buffers[0] + group->bytes + HEADS;
    group->rank = rank;
    group->size = size;
    group->timeout_ns = (int64_t)(timeout * 1e9);
    group->bell = bell;
    return group;
}
QUIRE_API void quire_group_leave(Group* group) { delete group; }

// `all` [rows, width] from every rank's `own` [rows, own], of numbers of `item` bytes. As many rows at a time as find room.
QUIRE_API int32_t quire_group_gather(Group* group, const char* own, int64_t rows, const Share* share, int64_t item,
                                     char* all) {
    const int64_t width = share->width * item, most = std::max<int64_t>(1, group->bytes / width);
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t count = std::min(most, rows - first);
        const char* gathered;
        const Outcome outcome = gather(*group, own + first * share->own * item, count, *share, item, &gathered);
        if (outcome != DONE) return outcome;
        std::memcpy(all + first * width, gathered, count * width);
    }
    return DONE;
}

// See `exchange`; `parts` has room for one of each rank.
QUIRE_API int32_t quire_group_exchange(Group* group, const Bytes* own, int64_t count, uint64_t word, Bytes* parts) {
    return exchange(*group, own, count, word, parts);
}

// Whether all ranks have the same digest of what they have computed.
QUIRE_API int32_t quire_group_check(Group* group, uint64_t digest) {
    const Outcome outcome = group->ended();
    return outcome == DONE ? group->meet(digest, NOTHING) : outcome;
}

// This rank does not compute the plan of this number, so no other can; nor those before it that have not ended.
QUIRE_API void quire_group_give_up(Group* group, int64_t number) { group->give_up(number); }

// Steps that were given up lie before the plan of this number: all ranks go on from there.
QUIRE_API int32_t quire_group_begin_anew(Group* group, int64_t number) { return group->begin_anew(number); }

// A rank is gone: nobody waits for it, now or later.
QUIRE_API void quire_group_lose(Group* group, int32_t rank) { group->lose(rank); }

// The rank that was lost, or -1.
QUIRE_API int32_t quire_group_lost(const Group* group) { return group->shared->lost.load() - 1; }

// Gathers so far, and the bytes that this rank received in them.
QUIRE_API void quire_group_counts(const Group* group, int64_t* counts) {
    counts[0] = group->gathers;
    counts[1] = group->received;
}

// -- a mirror: see the head of this file. It is no member; `group` is only its way to the memory.

// What a rank has brought to a collective, as other machines are told; its bytes follow.
struct News {
    uint64_t arrived, word;
    Region region;
};

// Whether all of a region lies in a buffer of so many bytes.
static bool fits(const Region& region, int64_t bytes) {
    const auto [begin, own, width, rows] = region;
    const bool each = begin >= 0 && own >= 0 && width >= 0 && rows >= 0 && begin <= bytes && own <= bytes;
    return each && begin + own <= bytes && (!rows || !own || (width >= own && rows - 1 <= (bytes - begin - own) / width));
}

template <class Copy>
static void each_row(Group* group, const News& news, const Copy& copy) {
    char* const first = group->buffers[(news.arrived - 1) & 1] + news.region.begin;
    for (int64_t row = 0; row < news.region.rows; row++)
        copy(first + row * news.region.width, row * news.region.own, news.region.own);
}

// The first of the ranks from `first` to `end` that has arrived somewhere after `seen`, which is [ranks of the group], and
// what it has brought there; -1: none. A rank may be one collective further, if all others are at this one: what it has
// brought to both is there then. Steps that were given up are left out.
QUIRE_API int32_t quire_mirror_look(Group* group, int32_t first, int32_t end, uint64_t* seen, News* news) {
    for (int32_t rank = first; rank < end; rank++) {
        const Place& place = group->shared->places[rank];
        const uint64_t newest = place.arrived.load();
        if (newest == seen[rank]) continue;
        const bool anew = newest - seen[rank] > 2;  // not by the number, into which a long epoch's counter grows
        const uint64_t next = (anew ? first_of(number_of(newest)) : seen[rank]) + 1;
        const int slot = (next - 1) & 1;
        *news = {next, place.word[slot].load(), place.region[slot].load()};
        // Who begins anew writes over the word and the region, but has given up this step before.
        const bool given_up = group->shared->given_up.load() > number_of(next);
        seen[rank] = given_up ? newest : next;
        if (!given_up && fits(news->region, group->bytes + HEADS)) return rank;
    }
    return -1;
}

// The bytes of it, rows * own.
QUIRE_API void quire_mirror_copy(Group* group, const News* news, char* out) {
    each_row(group, *news, [&](const char* row, int64_t at, int64_t bytes) { std::memcpy(out + at, row, bytes); });
}

// What a rank of another machine has brought: News and its bytes, `size` in all. 0: that cannot be.
QUIRE_API int32_t quire_mirror_bring(Group* group, int32_t rank, const char* told, int64_t size) {
    News news;
    if (rank < 0 || rank >= group->size || size < (int64_t)sizeof news) return 0;
    std::memcpy(&news, told, sizeof news);
    const char* const data = told + sizeof news;
    if (!fits(news.region, group->bytes + HEADS) || size - (int64_t)sizeof news != news.region.rows * news.region.own) return 0;
    Place& place = group->shared->places[rank];
    if (news.arrived <= place.arrived.load()) return 0;
    each_row(group, news, [&](char* row, int64_t at, int64_t bytes) { std::memcpy(row, data + at, bytes); });
    place.word[(news.arrived - 1) & 1].store(news.word);
    place.arrive(news.arrived);
    return 1;
}

// Why nobody may wait any more: see `Shared`. In `ends`: what is known elsewhere; then what is known here, too.
QUIRE_API void quire_mirror_ends(Group* group, int64_t* ends) {
    if (ends[0] > group->shared->given_up.load()) group->give_up(ends[0] - 1);
    if (ends[1] && !group->shared->lost.load()) group->lose((int)ends[1] - 1);
    ends[0] = group->shared->given_up.load();
    ends[1] = group->shared->lost.load();
}

// The mirror sleeps, unless it finds something after this; the bell wakes it.
QUIRE_API void quire_mirror_doze(Group* group) { group->shared->dozing.store(1); }
