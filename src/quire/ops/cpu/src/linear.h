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

// Panels of a product, those of its parts one after another.
inline int64_t all_panels(const Weight& w) { return panels(w) + (w.next ? all_panels(*w.next) : 0); }

inline const char* any_panel(const Weight& w, int64_t panel) {
    return panel < panels(w) || !w.next ? panel_data(w, panel) : any_panel(*w.next, panel - panels(w));
}

// The outputs of the panels first .. last - 1, of all. `next`: the panel that this thread reads after them.
void multiply(const Task&, int64_t first, int64_t last, const char* next);

}  // namespace quire
