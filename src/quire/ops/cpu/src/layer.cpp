// A decoder layer in one call: the kernels of the other files one after the other, as `DecoderLayer` in Python calls
// them, and so with the same bits. At one row a call from Python costs about as much as a small kernel itself.
//
// Where ranks share the layer, each has some heads, some of the MLP's inner columns, and some of the hidden ones: what two
// of the products read is gathered before them, and what they yield after them.
#include <algorithm>
#include <cstring>

#include "group.h"
#include "kv_store.h"
#include "simd.h"

namespace quire {

struct Weight;
struct AttentionStep;

// What a layer is made of. Norm weights are in the layer's data type or in fp32. Null may be `head_norm`, `input_norm` in
// a layer that is always first, the norms of what attention and MLP yield (`attended_norm`, `mlp_norm`), and `group` where
// nobody shares it. `heads` are this rank's, and `normed` those of queries, keys and values that `head_norm` is of.
struct Layer {
    int32_t dtype, norm_dtype, activation;
    float eps, head_eps;
    int64_t layer, heads, normed;
    Group* group;
    Share hidden, attended, active;
    const void *input_norm, *head_norm, *attended_norm, *mlp_input_norm, *mlp_norm;
    const Weight *qkv, *output, *gate_up, *down;
};

// What all layers of a step share.
struct LayerStep {
    int64_t tokens, blocks;
    const float *cos, *sin;
    const int64_t* slots;
    const KvCache* kv;
    const AttentionStep* attention;
};

}  // namespace quire

using namespace quire;

QUIRE_API int64_t quire_linear_scratch(const Weight*, int64_t rows);
QUIRE_API void quire_linear(const Weight*, const void* x, int32_t dtype, int64_t rows, void* y, int32_t y_dtype, void*);
QUIRE_API void quire_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, const void* weight, void* out,
                              int64_t rows, int64_t size, float eps);
QUIRE_API void quire_add_rms_norm(int32_t dtype, int32_t weight_dtype, void* x, void* residual, const void* weight,
                                  int64_t rows, int64_t size, float eps);
QUIRE_API int32_t quire_rotate_and_store(int32_t dtype, int32_t weight_dtype, void* qkv, void* queries,
                                         const void* weight, int64_t normed, float eps, const float* cos,
                                         const float* sin, const int64_t* slots, int64_t tokens, int64_t heads,
                                         int64_t layer, int64_t blocks, const KvCache* kv);
QUIRE_API void quire_attend(const AttentionStep*, int64_t layer, const void* q, int64_t q_stride, const float* sinks,
                            void* out);
QUIRE_API void quire_gate(int32_t activation, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size);

namespace {

// Intermediate results, one after the other in a workspace. What is used first is not needed when the MLP begins.
struct Room {
    int64_t query_width, qkv, queries, attended, gate_up, active, part, scratch, bytes;

    Room(const Layer& l, const KvCache& kv, int64_t tokens) {
        const int64_t number = l.dtype == F32 ? 4 : 2, width = l.heads * kv.head_dim;
        auto size = [&](int64_t numbers) { return (tokens * numbers * number + 63) / 64 * 64; };
        query_width = width;
        qkv = 0;
        queries = qkv + size(width + 2 * kv.kv_heads * kv.head_dim);
        attended = queries + size(width);
        gate_up = 0;
        active = gate_up + size(2 * l.active.own);
        part = std::max(attended + size(width), active + size(l.active.own));
        scratch = part + (l.group ? size(l.hidden.own) : 0);
        int64_t most = 0;
        for (const Weight* weight : {l.qkv, l.output, l.gate_up, l.down})
            most = std::max(most, quire_linear_scratch(weight, tokens));
        bytes = scratch + most;
    }
};

}  // namespace

// Bytes of workspace that `tokens` rows need.
QUIRE_API int64_t quire_layer_workspace(const Layer* layer, const KvCache* kv, int64_t tokens) {
    return Room(*layer, *kv, tokens).bytes;
}

constexpr int32_t OUTSIDE = -1;  // a slot lies outside the cache

// x [tokens, hidden] is what the layer before yielded (nothing yet where `first`) and becomes what this one yields;
// `residual`, to which x is still to be added, is brought up to date. Returns an `Outcome`, or OUTSIDE.
QUIRE_API int32_t quire_layer(const Layer* layer, const LayerStep* step, int32_t first, void* x, void* residual,
                              char* workspace) {
    const Layer& l = *layer;
    const LayerStep& s = *step;
    const Room room(l, *s.kv, s.tokens);
    const int64_t number = l.dtype == F32 ? 4 : 2, hidden = l.hidden.width;
    char *qkv = workspace + room.qkv, *queries = workspace + room.queries, *attended = workspace + room.attended;
    char *gate_up = workspace + room.gate_up, *active = workspace + room.active, *scratch = workspace + room.scratch;
    auto linear = [&](const Weight* weight, const void* from, void* to) {
        quire_linear(weight, from, l.dtype, s.tokens, to, l.dtype, scratch);
    };
    auto gathered = [&](const void* own, const Share& share, const char** all) {
        return gather(*l.group, own, s.tokens, share, number, all);
    };
    // A product whose inputs the ranks share, and whose outputs all of them need.
    auto shared_linear = [&](const Weight* weight, const void* from, const Share& inputs, void* to) {
        if (!l.group) {
            linear(weight, from, to);
            return DONE;
        }
        const char* all;
        if (const Outcome outcome = gathered(from, inputs, &all); outcome != DONE) return outcome;
        linear(weight, all, workspace + room.part);
        if (const Outcome outcome = gathered(workspace + room.part, l.hidden, &all); outcome != DONE) return outcome;
        std::memcpy(to, all, s.tokens * hidden * number);
        return DONE;
    };
    auto norm = [&](const void* weight, const void* from) {
        if (weight) quire_rms_norm(l.dtype, l.norm_dtype, from, weight, x, s.tokens, hidden, l.eps);
    };
    auto add_norm = [&](const void* weight) {
        quire_add_rms_norm(l.dtype, l.norm_dtype, x, residual, weight, s.tokens, hidden, l.eps);
    };
    first ? norm(l.input_norm, residual) : add_norm(l.input_norm);
    linear(l.qkv, l.input_norm ? x : residual, qkv);
    if (quire_rotate_and_store(l.dtype, l.norm_dtype, qkv, queries, l.head_norm, l.normed, l.head_eps, s.cos, s.sin,
                               s.slots, s.tokens, l.heads, l.layer, s.blocks, s.kv))
        return OUTSIDE;
    quire_attend(s.attention, l.layer, queries, room.query_width, nullptr, attended);
    if (const Outcome outcome = shared_linear(l.output, attended, l.attended, x); outcome != DONE) return outcome;
    norm(l.attended_norm, x);
    add_norm(l.mlp_input_norm);
    linear(l.gate_up, x, gate_up);
    quire_gate(l.activation, l.dtype, gate_up, active, s.tokens, l.active.own);
    if (const Outcome outcome = shared_linear(l.down, active, l.active, x); outcome != DONE) return outcome;
    norm(l.mlp_norm, x);
    return DONE;
}
