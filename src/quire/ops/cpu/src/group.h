// Ranks that compute one model: processes of this machine, which gather the columns of matrices through memory that
// they share.
#pragma once

#include <cstdint>

namespace quire {

struct Group;

// How a collective ended.
enum Outcome : int32_t {
    DONE = 0,
    GIVEN_UP = 1,  // a rank gave up the step: all do
    LOST = 2,      // a rank died, or did not answer
    DIFFER = 3,    // the ranks have brought different things
    TOO_LARGE = 4, // there is no room for the matrix
};

// This rank's columns of a matrix: the first one, how many there are, and how many of all ranks.
struct Share {
    int64_t begin, own, width;
};

// All columns of `rows` rows of numbers of `item` bytes, of which every rank has its own in `own`. `all`: where they lie
// until the next but one gather.
Outcome gather(Group&, const void* own, int64_t rows, Share, int64_t item, const char** all);

// A matrix whose rows the ranks write where it lies, each its own. It is whole after `end_parts`, until the next but one
// collective. `shape`: the same on all ranks; `begin`, `own`: of its `bytes`, those that this rank has written.
Outcome begin_parts(Group&, int64_t bytes, char** parts);
Outcome end_parts(Group&, uint64_t shape, int64_t begin, int64_t own, int64_t bytes);
int64_t room_of(const Group&);  // bytes of the largest matrix

// What every rank brings, of any size; `own`: this one's, side by side. `parts`: where each rank's lie until the next but
// one collective. `word`: the same on all ranks.
struct Bytes {
    const char* data;
    int64_t size;
};
Outcome exchange(Group&, const Bytes* own, int64_t count, uint64_t word, Bytes* parts);

}  // namespace quire
