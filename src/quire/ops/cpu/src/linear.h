// A product in pieces, for kernels that share out the products of several weights among threads. Its bits are those of
// quire_linear.
#pragma once

#include "weight.h"

namespace quire {

// y [rows, out] = x [rows, in] W^T + b.
struct Task {
    const Weight* weight;
    const void* x;
    void* y;
    int64_t rows, stride;    // rows: at least one; stride: numbers from one row of y to the next
    int32_t dtype, y_dtype;  // y_dtype: x's, or F32
    void* scratch;           // quire_linear_scratch bytes, aligned to a cache line
};

// Brings x into the layout in which it is multiplied; to be done before any `multiply`, by one thread.
void prepare(const Task&);

// The outputs of the panels first .. last - 1. `next`: the panel that this thread reads after them.
void multiply(const Task&, int64_t first, int64_t last, const char* next);

}  // namespace quire
