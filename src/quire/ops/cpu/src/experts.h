// What the kernels of experts.cpp are given, as quire.ops.cpu.experts describes it.
#pragma once

#include "group.h"
#include "weight.h"

namespace quire {

// The experts of a layer, each with a product of either kind; all have one shape. Where ranks share them, each has some
// of the inner columns, which are gathered between the products, and some of the result's.
struct Experts {
    int32_t dtype;  // of x and of the result
    int64_t count, hidden, out;
    Group* group;  // or null
    Share inner;
    const Weight *const *gate_up, *const *down;  // [2 * inner.own, hidden], [out, inner.width]
};

struct ExpertsStep {
    int64_t tokens, top_k;
    const void* x;         // [tokens, hidden]
    const int64_t* ids;    // [tokens, top_k], ascending
    const float* weights;  // [tokens, top_k]
    void* out;             // [tokens, out]
};

// x [tokens, count, in], with strides in numbers; y [tokens, count, out]. All products have one shape.
struct Heads {
    int32_t dtype;  // of x and y
    int64_t count, tokens, token_stride, head_stride;
    const Weight* const* products;
    const void* x;
    void* y;
};

}  // namespace quire
