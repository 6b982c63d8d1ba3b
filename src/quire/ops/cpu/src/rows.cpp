// What is done row by row: the embedding, norms, the gate, rotation with the store of keys and values.
//
// Each row, or head of a row, is computed by one thread in one order: no bit depends on the other rows or on the
// number of threads. Numbers are rounded to the data type T where the reference (`elementwise.py`) rounds.
#include <algorithm>
#include <type_traits>

#include "gate.h"
#include "kv_store.h"
#include "team.h"

namespace quire {
namespace {

// Numbers that a thread takes at least: waking another takes about as long as working on them.
constexpr int64_t SERIAL = 16384;

// body(0) .. body(items - 1), each of which works on about `numbers` numbers.
template <class Body>
void for_each(int64_t items, int64_t numbers, const Body& body) {
    parallel_each(items, {SERIAL / numbers}, body);
}

// Calls body with a null pointer of the type that `dtype` names.
template <class Body>
void with_type(int32_t dtype, const Body& body) {
    if (dtype == F32) body((float*)nullptr);
    if (dtype == BF16) body((bf16*)nullptr);
    if (dtype == F16) body((f16*)nullptr);
}

// Whether every one of the ids is in 0 .. limit - 1.
bool within(const int64_t* ids, int64_t count, int64_t limit) {
    bool all = true;
    for (int64_t i = 0; i < count; i++) all &= (uint64_t)ids[i] < (uint64_t)limit;
    return all;
}

// Calls body with null pointers of the types of numbers and of a norm's weights: the same, or fp32.
template <class Body>
void with_types(int32_t dtype, int32_t weight_dtype, const Body& body) {
    with_type(dtype, [&](auto* type) { weight_dtype == F32 ? body(type, (float*)nullptr) : body(type, type); });
}

// -- norms --------------------------------------------------------------------------------------------------------

// 1 / rms from the sums of squares in 16 lanes.
INLINE float norm_scale(f32x16 squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum(squares) / (float)size + eps);
}

// x * scale * weight, rounded to the weight's type before that is applied.
template <class W>
INLINE f32x16 normalized(f32x16 x, float scale, const W* weight, int64_t left) {
    return rounded(x * scale, weight) * load_some(weight, left);
}

template <class T>
INLINE f32x16 sum_of_squares(const T* x, int64_t size) {
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 v = load_some(x + i, size - i);
        squares = fma(v, v, squares);
    }
    return squares;
}

template <class T, class W>
INLINE void apply_norm(const T* x, f32x16 squares, const W* weight, T* out, int64_t size, float eps) {
    const float scale = norm_scale(squares, size, eps);
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 v = load_some(x + i, size - i);
        store_some(out + i, normalized(v, scale, weight + i, size - i), size - i);
    }
}

template <class T, class W>
void rms_norm_row(const T* x, const W* weight, T* out, int64_t size, float eps) {
    apply_norm(x, sum_of_squares(x, size), weight, out, size, eps);
}

template <class T, class W>
void add_rms_norm_row(T* x, T* residual, const W* weight, int64_t size, float eps) {
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 v = rounded(load_some(residual + i, size - i) + load_some(x + i, size - i), x);
        store_some(residual + i, v, size - i);
        squares = fma(v, v, squares);
    }
    apply_norm(residual, squares, weight, x, size, eps);
}

// -- gate and embedding -------------------------------------------------------------------------------------------

constexpr int64_t GATE_PART = 2048;  // numbers of a row that are one piece of work

template <class From, class To>
void embed(const int64_t* ids, const From* table, To* out, int64_t tokens, int64_t size) {
    for_each(tokens, size, [=](int64_t row) { convert_row(table + ids[row] * size, size, out + row * size); });
}

// -- queries, keys and values -------------------------------------------------------------------------------------

// Turns dimension i with dimension i + size / 2, after the norm where there is one. `out` may be `x`.
template <class T, class W>
void turn_head(const T* x, const W* weight, float eps, const float* cos, const float* sin, T* out, int64_t size) {
    const int64_t half = size / 2;
    const float scale = weight ? norm_scale(sum_of_squares(x, size), size, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        f32x16 a = load_some(x + i, left), b = load_some(x + half + i, left);
        if (weight) {
            a = rounded(normalized(a, scale, weight + i, left), x);
            b = rounded(normalized(b, scale, weight + half + i, left), x);
        }
        f32x16 c = load_some(cos + i, left), s = load_some(sin + i, left);
        store_some(out + i, a * c - b * s, left);
        store_some(out + half + i, b * c + a * s, left);
    }
}

// All of a step's rows and one layer of the cache.
template <class T, class W>
struct Rotation {
    T *qkv, *queries;          // [tokens, heads + 2 * kv_heads, head_dim], [tokens, heads, head_dim]
    const W* weight;           // of the norm of the first `normed` heads, [normed, head_dim]
    const float *cos, *sin;    // [tokens, head_dim / 2]
    const int64_t* slots;      // [tokens]
    int64_t normed, heads, layer;
    float eps;
    KvCache kv;

    void token(int64_t token) const {
        for (int64_t h = 0; h < kv.kv_heads; h++) fetch_kv_rows(kv, slots[token], layer, h);
        for (int64_t h = 0; h < heads + 2 * kv.kv_heads; h++) head(token, h);
    }

    // One head of one token: a query, or a key or value, which goes into the cache.
    void head(int64_t token, int64_t head) const {
        const int64_t size = kv.head_dim, turned = heads + kv.kv_heads;
        T* row = qkv + (token * (turned + kv.kv_heads) + head) * size;
        const W* norm = head < normed ? weight + head * size : nullptr;
        if (head < turned) {
            T* to = head < heads ? queries + (token * heads + head) * size : row;
            const int64_t at = token * (size / 2);
            turn_head(row, norm, eps, cos + at, sin + at, to, size);
        }
        if (head >= turned) {
            if (norm) rms_norm_row(row, norm, row, size, eps);
            store_kv_row(kv, slots[token], layer, head - turned, VALUES, row);
        } else if (head >= heads) {
            store_kv_row(kv, slots[token], layer, head - heads, KEYS, row);
        }
    }
};

// -- latent attention ---------------------------------------------------------------------------------------------

// Turns dimension 2i with dimension 2i + 1.
template <class T>
void turn_pairs(const T* x, const float* cos, const float* sin, T* out, int64_t size) {
    const i32x16 sign = i32x16{1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0} << 31;
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = std::min<int64_t>(size - i, LANES);
        const f32x16 v = load_some(x + i, left), c = first_twice(load_some(cos + i / 2, left / 2));
        const f32x16 s = first_twice(load_some(sin + i / 2, left / 2));
        const f32x16 turned = pairs_turned(v) * bits_of<f32x16>(bits_of<i32x16>(s) ^ sign);
        store_some(out + i, v * c + turned, left);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

// out[row] = table[ids[row]], converted. Returns 1, and writes nothing, where an id is outside the table.
QUIRE_API int32_t quire_embed(int32_t table_dtype, int32_t dtype, const int64_t* ids, const void* table, void* out,
                              int64_t tokens, int64_t vocabulary, int64_t size) {
    if (!within(ids, tokens, vocabulary)) return 1;
    with_type(table_dtype, [=](auto* from) {
        with_type(dtype, [=](auto* to) { embed(ids, (decltype(from))table, (decltype(to))out, tokens, size); });
    });
    return 0;
}

// x / rms(x) * weight for x [rows, size]; statistics in fp32, the quotient rounded to the weight's type before that is
// applied. `out` may be `x`.
QUIRE_API void quire_rms_norm(int32_t dtype, int32_t weight_dtype, const void* x, const void* weight, void* out,
                              int64_t rows, int64_t size, float eps) {
    with_types(dtype, weight_dtype, [=](auto* type, auto* weight_type) {
        using T = decltype(type);
        for_each(rows, size, [=](int64_t row) {
            rms_norm_row((T)x + row * size, (decltype(weight_type))weight, (T)out + row * size, size, eps);
        });
    });
}

// residual += x, and then its norm takes the place of x; both [rows, size].
QUIRE_API void quire_add_rms_norm(int32_t dtype, int32_t weight_dtype, void* x, void* residual, const void* weight,
                                  int64_t rows, int64_t size, float eps) {
    with_types(dtype, weight_dtype, [=](auto* type, auto* weight_type) {
        using T = decltype(type);
        for_each(rows, size, [=](int64_t row) {
            const int64_t at = row * size;
            add_rms_norm_row((T)x + at, (T)residual + at, (decltype(weight_type))weight, size, eps);
        });
    });
}

// activation(gate) * up for x [rows, 2 * size] = gate | up; the former is rounded to the data type before the product.
// RELU2 for x [rows, size].
QUIRE_API void quire_gate(int32_t activation, int32_t dtype, const void* x, void* out, int64_t rows, int64_t size) {
    const int64_t parts = (size + GATE_PART - 1) / GATE_PART;
    with_type(dtype, [=](auto* type) {
        using T = decltype(type);
        for_each(rows * parts, std::min(size, GATE_PART), [=](int64_t i) {
            const int64_t row = i / parts, first = i % parts * GATE_PART, some = std::min(size - first, GATE_PART);
            const T gate = (T)x + row * inputs_of(activation) * size + first, to = (T)out + row * size + first;
            with_activation(activation, [&](auto which) { gate_part<which>(gate, gate + size, to, some); });
        });
    });
}

// x = cap * tanh(x / cap), for `count` numbers: see `soft_cap` in elementwise.py.
QUIRE_API void quire_soft_cap(float* x, int64_t count, float cap) {
    const int64_t parts = (count + GATE_PART - 1) / GATE_PART;
    for_each(parts, GATE_PART, [=](int64_t part) {
        const int64_t last = std::min(count, (part + 1) * GATE_PART);
        for (int64_t i = part * GATE_PART; i < last; i += LANES) {
            const f32x16 power = exp(load_some(x + i, last - i) * (2.0f / cap));
            store_some(x + i, cap - 2.0f * cap / (power + 1.0f), last - i);
        }
    });
}

// Normalizes the first `normed` heads (queries, keys, values), turns queries and keys, and stores keys and values in
// layer `layer` of the cache. `qkv` is overwritten. Returns 1, and does nothing, where a slot is outside the cache's `blocks`.
QUIRE_API int32_t quire_rotate_and_store(int32_t dtype, int32_t weight_dtype, void* qkv, void* queries,
                                         const void* weight, int64_t normed, float eps, const float* cos,
                                         const float* sin, const int64_t* slots, int64_t tokens, int64_t heads,
                                         int64_t layer, int64_t blocks, const KvCache* kv) {
    if (!within(slots, tokens, blocks * kv->block_size)) return 1;
    with_types(dtype, weight_dtype, [=](auto* type, auto* weight_type) {
        using T = std::remove_pointer_t<decltype(type)>;
        using W = std::remove_pointer_t<decltype(weight_type)>;
        const Rotation<T, W> step{(T*)qkv, (T*)queries, (const W*)weight, cos, sin, slots,
                                  normed,  heads,       layer,            eps, *kv};
        for_each(tokens, (heads + 2 * kv->kv_heads) * kv->head_dim, [=](int64_t token) { step.token(token); });
    });
    return 0;
}

// Normalizes the first `latent` numbers of each row of x (`stride` numbers apart), turns the next `rope`, and stores the
// result, with what lies in `behind` [tokens, kv->head_dim - latent - rope] behind it, in layer `layer` of the cache. It is
// left in `rows` [tokens, kv->head_dim] too. Returns 1, and does nothing, where a slot is outside the cache's `blocks`.
QUIRE_API int32_t quire_store_latent(int32_t dtype, const void* x, int64_t stride, const void* weight, float eps,
                                     const float* cos, const float* sin, const void* behind, void* rows,
                                     const int64_t* slots, int64_t tokens, int64_t latent, int64_t rope, int64_t layer,
                                     int64_t blocks, const KvCache* kv) {
    if (!within(slots, tokens, blocks * kv->block_size)) return 1;
    const int64_t size = kv->head_dim, rest = size - latent - rope;
    with_type(dtype, [=](auto* type) {
        using T = decltype(type);
        for_each(tokens, size, [=](int64_t token) {
            const T from = (T)x + token * stride, row = (T)rows + token * size;
            rms_norm_row(from, (T)weight, row, latent, eps);
            turn_pairs(from + latent, cos + token * (rope / 2), sin + token * (rope / 2), row + latent, rope);
            if (rest) std::memcpy(row + latent + rope, (T)behind + token * rest, rest * sizeof *row);
            store_kv_row(*kv, slots[token], layer, 0, KEYS, row);
        });
    });
    return 0;
}

// x [tokens, heads, rope], whose tokens and heads lie `token_stride` and `head_stride` numbers apart, rotated.
QUIRE_API void quire_rotate_interleaved(int32_t dtype, const void* x, int64_t token_stride, int64_t head_stride,
                                        const float* cos, const float* sin, void* out, int64_t tokens, int64_t heads,
                                        int64_t rope) {
    with_type(dtype, [=](auto* type) {
        using T = decltype(type);
        for_each(tokens * heads, rope, [=](int64_t i) {
            const int64_t token = i / heads, at = token * (rope / 2);
            turn_pairs((T)x + token * token_stride + i % heads * head_stride, cos + at, sin + at, (T)out + i * rope,
                       rope);
        });
    });
}
