// A decoder layer in one call: the kernels of the other files one after the other, as `DecoderLayer` in Python calls
// them, and so with the same bits. At one row a call from Python costs about as much as a small kernel itself, and while
// Python is between two kernels the other threads go to sleep.
//
// A layer has two halves, attention and MLP, each of one of two kinds. Where ranks share the layer, each has some heads,
// some of the MLP's inner columns, and some of the hidden ones: what two of the products read is gathered before them, and
// what they yield after them.
#include <algorithm>
#include <cstring>

#include "experts.h"
#include "kv_store.h"
#include "team.h"

namespace quire {

struct AttentionStep;
struct LatentStep;

// Attention with keys and values of its own. `normed`: the heads of queries, keys and values that `norm` is of, or null.
struct PlainAttention {
    int64_t heads, normed;  // this rank's
    float eps;
    const void* norm;
    const Weight* qkv;
};

// Latent attention, absorbed. A head's query has a part that does not turn and one that does.
struct LatentAttention {
    int64_t heads, still, turned, latent;  // heads: this rank's; latent: numbers of a compressed vector
    float eps;                             // of the norms below
    const void *query_norm, *norm;
    const Weight* compressed_queries;  // null where queries are not compressed
    const Weight *queries, *compressed;
    const Weight *const *into_latent, *const *out_of_latent;  // a product a head
};

struct Mlp {
    int32_t activation;
    Share active;  // this rank's inner columns
    const Weight *gate_up, *down;
};

// Experts in place of an MLP, and perhaps one that every token goes through beside them.
struct SparseMlp {
    const Weight* router;
    Routing routing;
    Experts experts;
    const Mlp* shared;  // or null
    int64_t* load;      // [experts], tokens that each has got
};

// What a layer is made of. Norm weights are in the layer's data type or in fp32. Null may be `input_norm` in a layer that is
// always first, the norms of what attention and MLP yield (`attended_norm`, `mlp_norm`), and `group` where nobody shares
// it. Of the two kinds of attention and of MLP one each is not null.
struct Layer {
    int32_t dtype, norm_dtype;
    float eps;
    int64_t layer;
    Group* group;
    Share hidden, attended;
    const void *input_norm, *attended_norm, *mlp_input_norm, *mlp_norm;
    const PlainAttention* plain;
    const LatentAttention* latent;
    const Weight* output;
    const Mlp* mlp;
    const SparseMlp* sparse;
};

// What all layers of a step share that have the same kind of attention.
struct LayerStep {
    int64_t tokens, blocks;
    const float *cos, *sin;
    const int64_t* slots;
    const KvCache* kv;
    const AttentionStep* plain;
    const LatentStep* latent;
};

}  // namespace quire

using namespace quire;

QUIRE_API int64_t quire_linear_workspace(const Weight*, int64_t rows);
QUIRE_API void quire_linear(const Weight*, const void* x, int32_t dtype, int64_t rows, void* y, int32_t y_dtype, char*);
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
QUIRE_API int32_t quire_store_latent(int32_t dtype, const void* x, int64_t stride, const void* weight, float eps,
                                     const float* cos, const float* sin, const void* behind, void* rows,
                                     const int64_t* slots, int64_t tokens, int64_t latent, int64_t rope, int64_t layer,
                                     int64_t blocks, const KvCache* kv);
QUIRE_API void quire_rotate_interleaved(int32_t dtype, const void* x, int64_t token_stride, int64_t head_stride,
                                        const float* cos, const float* sin, void* out, int64_t tokens, int64_t heads,
                                        int64_t rope);
QUIRE_API void quire_attend_latent(const LatentStep*, int64_t layer, const void* q, int64_t q_stride, void* out);
QUIRE_API int64_t quire_heads_workspace(const Heads*);
QUIRE_API void quire_heads(const Heads*, char* workspace);
QUIRE_API void quire_gate(int32_t activation, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size);
QUIRE_API void quire_route(const Routing*, const float* logits, int64_t tokens, int64_t* ids, float* weights);
QUIRE_API int64_t quire_experts_workspace(const Experts*, int64_t tokens, int64_t top_k);
QUIRE_API int32_t quire_experts(const Experts*, const ExpertsStep*, char* workspace);

namespace {

constexpr int32_t OUTSIDE = -1;    // a slot lies outside the cache
constexpr int64_t SERIAL = 16384;  // numbers that a thread adds up at least

int64_t bytes_of(int32_t dtype) { return dtype == F32 ? 4 : 2; }

// -- the workspace --------------------------------------------------------------------------------------------------

// What a half makes on its way, in bytes from the workspace's begin; what its products need lies behind. The halves follow
// one another: they use the same memory. `own`: this rank's part of the hidden columns, before they are gathered.
struct Room {
    int64_t rows, number, bytes = 0, own;

    Room(const Layer& l, int64_t tokens)
        : rows(tokens), number(bytes_of(l.dtype)), own(take(l.group ? l.hidden.own : 0)) {}
    int64_t take(int64_t numbers, int64_t item) {
        const int64_t at = bytes;
        bytes = round_up(at + rows * numbers * item, 64);
        return at;
    }
    int64_t take(int64_t numbers) { return take(numbers, number); }
};

struct PlainRoom : Room {
    int64_t qkv, queries, attended;
    PlainRoom(const Layer& l, int64_t tokens) : Room(l, tokens) {
        qkv = take(l.plain->qkv->width);
        queries = take(l.attended.own);
        attended = take(l.attended.own);
    }
};

struct LatentRoom : Room {
    int64_t compressed_queries = 0, queries, compressed, stored, turned, latent_queries, latent, attended;
    LatentRoom(const Layer& l, int64_t tokens) : Room(l, tokens) {
        const LatentAttention& a = *l.latent;
        if (a.compressed_queries) compressed_queries = take(a.compressed_queries->width);
        queries = take(a.queries->width);
        compressed = take(a.compressed->width);
        stored = take(a.compressed->width);
        turned = take(a.heads * a.turned);
        latent_queries = take(a.heads * (a.latent + a.turned));
        latent = take(a.heads * a.latent);
        attended = take(l.attended.own);
    }
};

struct MlpRoom : Room {
    int64_t gate_up, active;
    MlpRoom(const Layer& l, const Mlp& mlp, int64_t tokens) : Room(l, tokens) { add(mlp); }
    void add(const Mlp& mlp) { gate_up = take(mlp.gate_up->width), active = take(mlp.active.own); }

  protected:
    MlpRoom(const Layer& l, int64_t tokens) : Room(l, tokens) {}
};

struct SparseRoom : MlpRoom {
    int64_t logits, ids, weights, part = 0;  // part: what the experts yield, where there is something beside them
    SparseRoom(const Layer& l, int64_t tokens) : MlpRoom(l, tokens) {
        const SparseMlp& m = *l.sparse;
        logits = take(m.routing.experts, sizeof(float));
        ids = take(m.routing.top_k, sizeof(int64_t));
        weights = take(m.routing.top_k, sizeof(float));
        if (!m.shared) return;
        part = take(l.hidden.width);
        add(*m.shared);
    }
};

// The two products that each head of latent attention has.
Heads into_latent(const Layer& l, int64_t tokens, const void* queries, void* latent_queries) {
    const LatentAttention& a = *l.latent;
    const int64_t whole = a.still + a.turned;
    return {l.dtype, a.heads, tokens, a.heads * whole, whole, a.latent + a.turned, a.into_latent, queries, latent_queries};
}
Heads out_of_latent(const Layer& l, int64_t tokens, const void* latent, void* attended) {
    const LatentAttention& a = *l.latent;
    const int64_t value = a.out_of_latent[0]->width;
    return {l.dtype, a.heads, tokens, a.heads * a.latent, a.latent, value, a.out_of_latent, latent, attended};
}

// What the products need beside a half's room.
int64_t scratch_bytes(const Layer& l, int64_t tokens) {
    int64_t most = 0;
    auto need = [&](int64_t bytes) { most = std::max(most, bytes); };
    auto product = [&](const Weight* w) { need(w ? quire_linear_workspace(w, tokens) : 0); };
    auto heads = [&](const Heads& h) { need(quire_heads_workspace(&h)); };
    auto mlp = [&](const Mlp* m) {
        if (m) product(m->gate_up), product(m->down);
    };
    product(l.output);
    if (l.plain) product(l.plain->qkv);
    if (l.latent) {
        product(l.latent->compressed_queries), product(l.latent->queries), product(l.latent->compressed);
        heads(into_latent(l, tokens, nullptr, nullptr)), heads(out_of_latent(l, tokens, nullptr, nullptr));
    }
    mlp(l.mlp);
    if (l.sparse) {
        product(l.sparse->router), mlp(l.sparse->shared);
        need(quire_experts_workspace(&l.sparse->experts, tokens, l.sparse->routing.top_k));
    }
    return most;
}

// -- a step -----------------------------------------------------------------------------------------------------------

template <class T>
void add(T* x, const T* part, int64_t rows, int64_t size) {
    parallel_each(rows, {SERIAL / size}, [=](int64_t row) {
        for (int64_t i = row * size, end = i + size; i < end; i += LANES)
            store_some(x + i, load_some(part + i, end - i) + load_some(x + i, end - i), end - i);
    });
}

struct Pass {
    const Layer& l;
    const LayerStep& s;
    void *x, *residual;
    char *workspace, *own = nullptr, *scratch = nullptr;
    int64_t number = bytes_of(l.dtype);

    // From now on, of the half that has this room.
    void use(const Room& room) { own = workspace + room.own, scratch = workspace + room.bytes; }

    void linear(const Weight* weight, const void* from, void* to, int32_t to_dtype) const {
        quire_linear(weight, from, l.dtype, s.tokens, to, to_dtype, scratch);
    }
    void linear(const Weight* weight, const void* from, void* to) const { linear(weight, from, to, l.dtype); }
    void norm(const void* weight, const void* from) const {
        if (weight) quire_rms_norm(l.dtype, l.norm_dtype, from, weight, x, s.tokens, l.hidden.width, l.eps);
    }
    void add_norm(const void* weight) const {
        quire_add_rms_norm(l.dtype, l.norm_dtype, x, residual, weight, s.tokens, l.hidden.width, l.eps);
    }

    // All hidden columns, of which this rank's are in `own`.
    Outcome gather_hidden(void* to) const {
        const char* all;
        const Outcome outcome = gather(*l.group, own, s.tokens, l.hidden, number, &all);
        if (outcome == DONE) std::memcpy(to, all, s.tokens * l.hidden.width * number);
        return outcome;
    }

    // A product whose inputs the ranks share, and whose outputs all of them need.
    Outcome shared_linear(const Weight* weight, const void* from, const Share& inputs, void* to) const {
        if (!l.group) {
            linear(weight, from, to);
            return DONE;
        }
        const char* all;
        if (const Outcome outcome = gather(*l.group, from, s.tokens, inputs, number, &all); outcome != DONE)
            return outcome;
        linear(weight, all, own);
        return gather_hidden(to);
    }

    // Each half takes its input from `in` and leaves its result in x, which may be the same. Those of attention return what
    // their product reads; null where a slot is outside the cache.
    const void* attend(const PlainAttention& a, const PlainRoom& room, const void* in) {
        char *qkv = workspace + room.qkv, *queries = workspace + room.queries, *attended = workspace + room.attended;
        linear(a.qkv, in, qkv);
        if (quire_rotate_and_store(l.dtype, l.norm_dtype, qkv, queries, a.norm, a.normed, a.eps, s.cos, s.sin, s.slots,
                                   s.tokens, a.heads, l.layer, s.blocks, s.kv))
            return nullptr;
        quire_attend(s.plain, l.layer, queries, l.attended.own, nullptr, attended);
        return attended;
    }

    const void* attend(const LatentAttention& a, const LatentRoom& room, const void* in) {
        const int64_t whole = a.still + a.turned, key = a.latent + a.turned;
        char *compressed = workspace + room.compressed, *queries = workspace + room.queries;
        char *turned = workspace + room.turned, *latent_queries = workspace + room.latent_queries;
        char *latent = workspace + room.latent, *attended = workspace + room.attended;
        const void* from = in;
        if (a.compressed_queries) {
            char* to = workspace + room.compressed_queries;
            linear(a.compressed_queries, in, to);
            quire_rms_norm(l.dtype, l.norm_dtype, to, a.query_norm, to, s.tokens, a.compressed_queries->width, a.eps);
            from = to;
        }
        linear(a.queries, from, queries);
        linear(a.compressed, in, compressed);
        if (quire_store_latent(l.dtype, compressed, key, a.norm, a.eps, s.cos, s.sin, nullptr, workspace + room.stored,
                               s.slots, s.tokens, a.latent, a.turned, l.layer, s.blocks, s.kv))
            return nullptr;
        const Heads into = into_latent(l, s.tokens, queries, latent_queries);
        quire_heads(&into, scratch);
        quire_rotate_interleaved(l.dtype, queries + a.still * number, a.heads * whole, whole, s.cos, s.sin, turned,
                                 s.tokens, a.heads, a.turned);
        for (int64_t i = 0; i < s.tokens * a.heads; i++)
            std::memcpy(latent_queries + (i * key + a.latent) * number, turned + i * a.turned * number, a.turned * number);
        quire_attend_latent(s.latent, l.layer, latent_queries, a.heads * key, latent);
        const Heads out_of = out_of_latent(l, s.tokens, latent, attended);
        quire_heads(&out_of, scratch);
        return attended;
    }

    Outcome mlp(const Mlp& m, const MlpRoom& room, const void* in, void* to) const {
        char *gate_up = workspace + room.gate_up, *active = workspace + room.active;
        linear(m.gate_up, in, gate_up);
        quire_gate(m.activation, l.dtype, gate_up, active, s.tokens, m.active.own);
        return shared_linear(m.down, active, m.active, to);
    }

    // Of x, in its place.
    Outcome experts(const SparseMlp& m, const SparseRoom& room) const {
        float *logits = (float*)(workspace + room.logits), *weights = (float*)(workspace + room.weights);
        int64_t* ids = (int64_t*)(workspace + room.ids);
        char* part = workspace + room.part;
        linear(m.router, x, logits, F32);
        quire_route(&m.routing, logits, s.tokens, ids, weights);
        for (int64_t i = 0; i < s.tokens * m.routing.top_k; i++) m.load[ids[i]]++;
        void* const to = m.shared ? part : x;
        const ExpertsStep step{s.tokens, m.routing.top_k, x, ids, weights, l.group ? own : to};
        Outcome outcome = (Outcome)quire_experts(&m.experts, &step, scratch);
        if (outcome == DONE && l.group) outcome = gather_hidden(to);
        if (outcome == DONE && m.shared) outcome = mlp(*m.shared, room, x, x);
        if (outcome != DONE || !m.shared) return outcome;
        const int64_t size = l.hidden.width;
        if (l.dtype == F32) add((float*)x, (const float*)part, s.tokens, size);
        if (l.dtype == BF16) add((bf16*)x, (const bf16*)part, s.tokens, size);
        if (l.dtype == F16) add((f16*)x, (const f16*)part, s.tokens, size);
        return DONE;
    }

    int32_t all(bool first) {
        first ? norm(l.input_norm, residual) : add_norm(l.input_norm);
        const void *in = l.input_norm ? x : residual, *attended;
        if (l.plain) {
            const PlainRoom room(l, s.tokens);
            use(room);
            attended = attend(*l.plain, room, in);
        } else {
            const LatentRoom room(l, s.tokens);
            use(room);
            attended = attend(*l.latent, room, in);
        }
        if (!attended) return OUTSIDE;
        if (const Outcome outcome = shared_linear(l.output, attended, l.attended, x); outcome != DONE) return outcome;
        norm(l.attended_norm, x);
        add_norm(l.mlp_input_norm);
        Outcome outcome;
        if (l.mlp) {
            const MlpRoom room(l, *l.mlp, s.tokens);
            use(room);
            outcome = mlp(*l.mlp, room, x, x);
        } else {
            const SparseRoom room(l, s.tokens);
            use(room);
            outcome = experts(*l.sparse, room);
        }
        if (outcome == DONE) norm(l.mlp_norm, x);
        return outcome;
    }
};

}  // namespace

// Bytes of workspace that `tokens` rows need, computed by as many threads as this one's loops have now.
QUIRE_API int64_t quire_layer_workspace(const Layer* layer, int64_t tokens) {
    const Layer& l = *layer;
    const int64_t attention = l.plain ? PlainRoom(l, tokens).bytes : LatentRoom(l, tokens).bytes;
    const int64_t mlp = l.mlp ? MlpRoom(l, *l.mlp, tokens).bytes : SparseRoom(l, tokens).bytes;
    return std::max(attention, mlp) + scratch_bytes(l, tokens);
}

// x [tokens, hidden] is what the layer before yielded (nothing yet where `first`) and becomes what this one yields;
// `residual`, to which x is still to be added, is brought up to date. Returns an `Outcome`, or OUTSIDE.
QUIRE_API int32_t quire_layer(const Layer* layer, const LayerStep* step, int32_t first, void* x, void* residual,
                              char* workspace) {
    return Pass{*layer, *step, x, residual, workspace}.all(first);
}
