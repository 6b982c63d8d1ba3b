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
    DIFFER = 3,    // the ranks have computed different things
    TOO_LARGE = 4, // there is no room for the matrix
};

// Columns of a matrix: this rank's begin `begin` bytes into a row of `width` bytes, and take `bytes` of it.
struct Columns {
    int64_t begin, bytes, width;
};

// Bytes of a matrix that the ranks can gather at a time.
int64_t capacity(const Group&);

// All columns of `rows` rows, of which every rank has its own in `own`. `all`: where they lie until the next but one
// gather.
Outcome gather(Group&, const char* own, int64_t rows, Columns, const char** all);

}  // namespace quire
