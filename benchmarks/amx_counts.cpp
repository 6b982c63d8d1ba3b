// Counts the tile instructions of the emulation in amx.h, and where their memory would come from: two caches with lines of
// 64 bytes that forget what was used the longest ago. And, where it is asked to, every instruction beside them, one step of
// the processor at a time. See amx_counts.py.

#include <csignal>
#include <vector>

#include "amx.h"

namespace {

class Cache {
  public:
    Cache(int64_t bytes, int64_t ways) : ways_(ways), sets_(bytes / 64 / ways), lines_(sets_ * ways) {}

    // Whether the line was there; it is afterwards. `dropped`: that one left which was written to.
    bool use(uint64_t line, bool written, bool& dropped) {
        Line* const set = &lines_[int64_t(line % uint64_t(sets_)) * ways_];
        int64_t way = 0;
        while (way < ways_ - 1 && set[way].line != line) way++;
        const bool there = set[way].line == line;
        dropped = !there && set[way].written;
        const Line used{line, written || (there && set[way].written)};
        for (; way > 0; way--) set[way] = set[way - 1];
        set[0] = used;
        return there;
    }

  private:
    struct Line {
        uint64_t line = ~uint64_t{};
        bool written = false;
    };
    int64_t ways_, sets_;
    std::vector<Line> lines_;
};

struct Counts {
    int64_t loads, stores, products, from_second, from_beyond, to_second;  // of the caches: lines
};

Counts counts;
Cache *first = nullptr, *second = nullptr;

void touch(const void* at, int64_t stride, int rows, int bytes, bool written) {
    for (int row = 0; first && row < rows; row++) {
        const uint64_t begin = (uint64_t)at + row * stride;
        for (uint64_t line = begin / 64; line <= (begin + bytes - 1) / 64; line++) {
            bool dropped, unused;
            if (!first->use(line, written, dropped)) {
                counts.from_second++;
                if (!second->use(line, false, unused)) counts.from_beyond++;
            }
            counts.to_second += dropped;
        }
    }
}

// -- steps ----------------------------------------------------------------------------------------------------------

uint64_t *stepped = nullptr, stepped_from, stepped_bytes;  // how often the instruction at each address was executed

#if defined(__x86_64__)
constexpr uint64_t STEPS = 0x100;  // the flag with which a processor stops after each instruction
uint64_t flags() { return __builtin_ia32_readeflags_u64(); }
void set_flags(uint64_t bits) { __builtin_ia32_writeeflags_u64(bits); }

void on_step(int, siginfo_t*, void* context) {
    const uint64_t at = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] - stepped_from;
    if (at < stepped_bytes) stepped[at]++;
}
#endif
thread_local bool paused = false;

}  // namespace

namespace quire {

Watched::Watched(Kind kind, const void* at, int64_t stride, int rows, int bytes) {
#if defined(__x86_64__)
    if (stepped && flags() & STEPS) set_flags(flags() & ~STEPS), paused = true;
#endif
    (kind == LOAD ? counts.loads : kind == STORE ? counts.stores : counts.products)++;
    touch(at, stride, rows, bytes, kind == STORE);
}

Watched::~Watched() {
#if defined(__x86_64__)
    if (paused) paused = false, set_flags(flags() | STEPS);
#endif
}

}  // namespace quire

// Empty caches of these sizes; 0: none.
QUIRE_API void quire_watch(int64_t first_bytes, int64_t second_bytes) {
    delete first, delete second;
    first = first_bytes ? new Cache(first_bytes, 12) : nullptr, second = first_bytes ? new Cache(second_bytes, 16) : nullptr;
    counts = {};
}

// What has happened since then, and is forgotten: `Counts`.
QUIRE_API void quire_watched(Counts* to) { *to = counts, counts = {}; }

#if defined(__x86_64__)
// From now on, each instruction of this thread at from .. from + bytes - 1 is counted, at `to`, until null is given.
QUIRE_API void quire_step(uint64_t from, uint64_t bytes, uint64_t* to) {
    set_flags(flags() & ~STEPS);
    stepped_from = from, stepped_bytes = bytes, stepped = to;
    if (!to) return;
    struct sigaction action = {};
    action.sa_sigaction = on_step, action.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &action, nullptr);
    set_flags(flags() | STEPS);
}
#endif
