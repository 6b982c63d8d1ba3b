// What is promised of a group of ranks (src/quire/ops/cpu/src/group.h), under random use, with threads for processes:
// tests/test_parallel_group.py compiles and runs it, with ThreadSanitizer too. The first argument names a test.
#include "group.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

using quire::Group;
using quire::Outcome;
using quire::Share;

extern "C" int64_t quire_group_bytes(int64_t matrix);
extern "C" Group* quire_group_join(char* memory, int64_t matrix, int32_t rank, int32_t size, double timeout,
                                   int32_t bell);
extern "C" void quire_group_leave(Group*);
extern "C" int32_t quire_group_check(Group*, uint64_t digest);
extern "C" void quire_group_give_up(Group*, int64_t number);
extern "C" int32_t quire_group_begin_anew(Group*, int64_t number);
extern "C" void quire_group_lose(Group*, int32_t rank);
extern "C" int32_t quire_group_lost(const Group*);

namespace {
struct News;
}
extern "C" int32_t quire_mirror_look(Group*, int32_t first, int32_t end, uint64_t* seen, News*);
extern "C" void quire_mirror_copy(Group*, const News*, char* out);
extern "C" int32_t quire_mirror_bring(Group*, int32_t rank, const char* told, int64_t size);
extern "C" void quire_mirror_ends(Group*, int64_t* ends);

namespace {

constexpr int64_t MATRIX = 1 << 16;

// What a mirror tells: `News` in group.cpp, and its bytes.
struct News {
    uint64_t arrived, word;
    int64_t begin, own, width, rows;
};

// A machine with some of the ranks: its memory, and its mirror.
struct Machine {
    int first, end;
    std::vector<uint64_t> memory;
    char* begin;
    Group* mirror;
    std::vector<uint64_t> seen;
    int64_t ends[2] = {0, 0};

    Machine(int first, int end, int size)
        : first(first), end(end), memory(quire_group_bytes(MATRIX) / 8 + 8192 / 8, 0), seen(size, 0) {
        begin = (char*)(((uintptr_t)memory.data() + 4095) / 4096 * 4096);
        mirror = quire_group_join(begin, MATRIX, 0, size, 0, -1);
    }
    ~Machine() { quire_group_leave(mirror); }

    // What its ranks have brought goes to the other one, and takes its time.
    void tell(Machine& other, std::mt19937& luck) {
        News news;
        const int rank = quire_mirror_look(mirror, first, end, seen.data(), &news);
        std::vector<char> told(sizeof news);
        if (rank >= 0) {
            told.resize(sizeof news + news.rows * news.own);
            std::memcpy(told.data(), &news, sizeof news);
            quire_mirror_copy(mirror, &news, told.data() + sizeof news);
        }
        quire_mirror_ends(mirror, ends);
        if (luck() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(luck() % 100));
        int64_t known[2] = {ends[0], ends[1]};
        quire_mirror_ends(other.mirror, known);
        if (rank >= 0) CHECK(quire_mirror_bring(other.mirror, rank, told.data(), told.size()));
    }
};

// `run(group, rank)` on as many threads as there are ranks: on one machine, then on two.
template <class Run>
void on_all(int size, const Run& run, double timeout = 60) {
    for (const int there : {0, 1, size / 2}) {
        Machine here(0, size - there, size), other(size - there, size, size);
        std::atomic<int> running{size};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < size; rank++)
            threads.emplace_back([&, rank] {
                char* const memory = (rank < here.end ? here : other).begin;
                Group* const group = quire_group_join(memory, MATRIX, rank, size, timeout, there ? 0 : -1);  // no bell rings
                run(group, rank);
                quire_group_leave(group);
                running--;
            });
        for (std::mt19937 luck(size); there && running;) {
            here.tell(other, luck);
            other.tell(here, luck);
            std::this_thread::yield();
        }
        for (auto& thread : threads) thread.join();
    }
}

int number_at(int round, int64_t row, int64_t column) { return round * 7919 + (int)(row * 131 + column); }

// Ranks that come at random times find what all have written, and nothing of the gathers before.
void gathers() {
    for (const int size : {2, 3, 5})
        on_all(size, [&](Group* group, int rank) {
            std::mt19937 shapes(size), own(rank);
            for (int round = 0; round < 500; round++) {
                const int64_t rows = 1 + shapes() % 20, width = size + shapes() % 200;
                const Share share{rank * width / size, (rank + 1) * width / size - rank * width / size, width};
                std::vector<int> part(rows * share.own);
                for (int64_t i = 0; i < (int64_t)part.size(); i++)
                    part[i] = number_at(round, i / share.own, share.begin + i % share.own);
                if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
                const char* all;
                CHECK(quire::gather(*group, part.data(), rows, share, sizeof(int), &all) == quire::DONE);
                for (int64_t i = 0; i < rows * width; i++)
                    CHECK(((const int*)all)[i] == number_at(round, i / width, i % width));
                if (shapes() % 64 == 0) CHECK(quire_group_check(group, round) == quire::DONE);
            }
        });
}

// What ranks bring may be of any size, also none, and lies in several places.
void exchanges() {
    for (const int size : {2, 3, 5})
        on_all(size, [&](Group* group, int rank) {
            std::mt19937 luck(size);
            for (int round = 0; round < 400; round++) {
                std::vector<std::vector<char>> all;
                for (int other = 0; other < size; other++)
                    all.emplace_back(luck() % 3 ? luck() % (MATRIX / size) : 0, (char)(round + other));
                const int64_t cut = all[rank].size() / 3;
                const quire::Bytes own[2] = {{all[rank].data(), cut}, {all[rank].data() + cut, (int64_t)all[rank].size() - cut}};
                std::vector<quire::Bytes> found(size);
                CHECK(quire::exchange(*group, own, 2, round, found.data()) == quire::DONE);
                for (int other = 0; other < size; other++) {
                    CHECK(found[other].size == (int64_t)all[other].size());
                    CHECK(!std::memcmp(found[other].data, all[other].data(), all[other].size()));
                }
            }
        });
}

void differing_words() {
    on_all(2, [](Group* group, int rank) {
        quire::Bytes found[2];
        CHECK(quire::exchange(*group, nullptr, 0, rank, found) == quire::DIFFER);
    });
}

// Whoever gives up, and wherever: all stop, and what is gathered afterwards is right again.
void steps_are_given_up() {
    on_all(3, [](Group* group, int rank) {
        std::mt19937 luck(rank + 1);
        for (int step = 1; step < 400; step++) {
            const int32_t begun = quire_group_begin_anew(group, step * 3);
            CHECK(begun == quire::DONE || begun == quire::GIVEN_UP);
            if (begun == quire::GIVEN_UP) continue;
            for (int round = 0; round < 8; round++) {
                if (luck() % 12 == 0) {
                    quire_group_give_up(group, step * 3);
                    break;
                }
                const int own = step * 100 + round * 10 + rank;
                const char* all;
                const Outcome outcome = quire::gather(*group, &own, 1, Share{rank, 1, 3}, sizeof(int), &all);
                if (outcome == quire::GIVEN_UP) break;
                CHECK(outcome == quire::DONE);
                for (int other = 0; other < 3; other++) CHECK(((const int*)all)[other] == own - rank + other);
            }
        }
    });
}

// A rank that comes to no collective of a step, and begins anew with a later one, leaves no other one waiting.
void steps_that_one_never_begins() {
    on_all(3, [](Group* group, int rank) {
        std::mt19937 luck(rank + 1), turns(7);
        for (int64_t step = 1; step < 400; step++) {
            if ((int)(turns() % 3) == rank) {  // this one has not even heard of it
                if (luck() % 2) quire_group_give_up(group, 2 * step);
            } else {
                CHECK(quire_group_check(group, 2 * step) == quire::GIVEN_UP);
                quire_group_give_up(group, 2 * step);
            }
            CHECK(quire_group_begin_anew(group, 2 * step + 1) == quire::DONE);
            const int32_t outcome = quire_group_check(group, 7);  // who is through may give up the next step already
            CHECK(outcome == quire::DONE || outcome == quire::GIVEN_UP);
        }
    });
}

// An engine that runs for a year has plans with numbers of more than 32 bits, and steps are given up then, too.
void numbers_beyond_32_bits() {
    std::atomic<int> ended{0};  // steps of both ranks
    on_all(2, [&](Group* group, int rank) {
        constexpr int STEPS = 5;
        int all_ended = ended / (2 * STEPS) * 2 * STEPS;
        for (int step = 0; step < STEPS; step++) {
            CHECK(quire_group_begin_anew(group, (1ll << 32) - 2 + step) == quire::DONE);
            for (int round = 0; round < 3; round++) {
                const int own = step * 100 + round * 10 + rank;
                const char* all;
                CHECK(quire::gather(*group, &own, 1, Share{rank, 1, 2}, sizeof(int), &all) == quire::DONE);
                for (int other = 0; other < 2; other++) CHECK(((const int*)all)[other] == own - rank + other);
            }
            ended++;  // whoever begins anew gives up what came before
            for (all_ended += 2; ended < all_ended;) std::this_thread::yield();
        }
    });
}

void a_matrix_that_has_no_room() {
    on_all(2, [](Group* group, int rank) {
        const int own = 0;
        const char* all;
        CHECK(quire::gather(*group, &own, MATRIX, Share{rank, 1, 2}, sizeof(int), &all) == quire::TOO_LARGE);
        const quire::Bytes large{(const char*)&own, MATRIX};
        quire::Bytes found[2];
        CHECK(quire::exchange(*group, &large, 1, 0, found) == quire::TOO_LARGE);
    });
}

void who_is_lost() {
    on_all(
        3,
        [](Group* group, int rank) {
            if (rank == 2) return;  // it never comes
            CHECK(quire_group_check(group, 0) == quire::LOST);
            CHECK(quire_group_lost(group) == 2);
        },
        0.2);
}

void differing_digests() {
    on_all(4, [](Group* group, int rank) {
        CHECK(quire_group_check(group, 5) == quire::DONE);
        CHECK(quire_group_check(group, rank == 3) == quire::DIFFER);
    });
}

void differing_shapes() {
    on_all(2, [](Group* group, int rank) {
        const int own[2] = {0, 0};
        const char* all;
        CHECK(quire::gather(*group, own, 1 + rank, Share{rank, 1, 2}, sizeof(int), &all) == quire::DIFFER);
    });
}

}  // namespace

int main(int count, char** arguments) {
    return run_named(count, arguments,
                     {{"gathers", gathers},
                      {"exchanges", exchanges},
                      {"differing_words", differing_words},
                      {"steps_are_given_up", steps_are_given_up},
                      {"numbers_beyond_32_bits", numbers_beyond_32_bits},
                      {"a_matrix_that_has_no_room", a_matrix_that_has_no_room},
                      {"who_is_lost", who_is_lost},
                      {"differing_digests", differing_digests},
                      {"differing_shapes", differing_shapes},
                      {"steps_that_one_never_begins", steps_that_one_never_begins}});
}
