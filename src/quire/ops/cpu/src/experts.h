// What the kernels of experts.cpp are given, as quire.ops.cpu.experts describes it.
#pragma once

#include "group.h"
#include "weight.h"

namespace quire {

// Places for experts, which the ranks share out (`ExpertSlots` in ops/experts.py): an expert may have several, whose tokens
// are dealt out among them.
struct Slots {
    int64_t count, begin, own;  // of all ranks; this rank's
    const int64_t* first;       // [experts + 1]: where an expert's slots begin in
    const int64_t* of_experts;  // [count]
    uint64_t digest;            // of which expert is where
};

// The experts of a layer, each with a product of either kind; all have one shape. Ranks share either each expert (a rank
// has some of the inner columns, which are gathered between the products, and some of the result's), or the slots.
struct Experts {
    int32_t dtype;  // of x and of the result
    int32_t activation;
    int64_t count, hidden, out;
    Group* group;  // or null
    Share inner;
    const Slots* slots;                          // or null: an expert's slot is its number
    const Weight *const *gate_up, *const *down;  // by this rank's slots: [2 * inner.own (without a gate, once), hidden], [out, inner.width]
};

// How tokens choose among experts: `Routing` in ops/experts.py. Not null is `bias` [experts] where there is one.
struct Routing {
    int32_t sigmoid, two_best, normalize;  // two_best: a group's score is the sum of two
    float scale;
    int64_t experts, top_k, groups, top_groups;
    const float* bias;
};

struct ExpertsStep {
    int64_t tokens, top_k;
    const void* x;         // [tokens, hidden]
    const int64_t* ids;    // [tokens, top_k], ascending
    const float* weights;  // [tokens, top_k]
    void* out;             // [tokens, out]; may be x
};

// x [tokens, count, in] and y [tokens, count, out], with strides in numbers (y's tokens lie side by side). All products
// have one shape.
struct Heads {
    int32_t dtype;  // of x and y
    int64_t count, tokens, token_stride, head_stride, y_head_stride;
    const Weight* const* products;
    const void* x;
    void* y;
};

}  // namespace quire
