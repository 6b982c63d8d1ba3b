// What latent attention does with a key tile: its rows, the products, and the running softmax.
//
// A row of the cache is key and value in one, and all of an item's rows (tokens times heads) look at it. So scores lie
// on their side: a lane is a row of the item, and a key's numbers are read one by one, which they can be where they lie
// in the cache, 16 rows of a block one after the other. Those that lie anywhere are written out first, and so is a
// quantized cache, or one in a narrower type than the machine multiplies.
#pragma once

#include "attention_math.h"

namespace quire {

// Keys times vectors of rows in a product of scores, and rows times the columns of a vector of values in one of values:
// what fits into the registers. Does not change bits.
#if defined(__AVX512F__)
constexpr int SCORES = 16, SCORE_VECTORS = 2, VALUE_ROWS = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int SCORES = 6, SCORE_VECTORS = 1, VALUE_ROWS = 6;
#else
constexpr int SCORES = 3, SCORE_VECTORS = 1, VALUE_ROWS = 3;
#endif

template <class L>
constexpr int64_t KEYS_AT_ONCE = IN_TILES<L> ? 2 * TILE_ROWS : LANES;
template <class L>
constexpr int64_t ROWS_AT_ONCE = IN_TILES<L> ? 2 * TILE_ROWS : VALUE_ROWS;

// Numbers of a vector.
template <class L>
constexpr int64_t WIDE = LANES * L::NUMBERS;

// Whether the products may read the cache's rows in place: they hold lanes, and so do the `key` numbers of a key, and
// `latent` numbers end with a vector that lies within the row.
template <class L>
bool in_place(const KvCache& kv, int64_t key, int64_t latent) {
    return int64_t(sizeof(typename L::lane)) == kv.number_bytes() * L::NUMBERS && kv.head_dim % L::NUMBERS == 0 &&
           key % (L::NUMBERS * DEPTH_STEP<L>) == 0 &&
           (latent + WIDE<L> - 1) / WIDE<L> * WIDE<L> <= kv.head_dim;
}

// -- products -----------------------------------------------------------------------------------------------------

// What is asked for while a product goes on: `step` bytes for each lane of a key. A crowd of requests would hold up the
// product until memory has sent what they are for. Nothing: some memory that is at hand, and no step.
struct Later {
    const char* at;
    int64_t step;
};

// scores[k][row] of 16 keys, `apart` lanes from one to the next, for V vectors of rows, out of queries [V][depth][16].
template <class L>
struct ScoreProduct {
    const typename L::lane* keys;
    int64_t apart;
    const typename L::lane* q;
    int64_t depth;
    float* scores;
    int64_t stride;  // of the scores, from key to key
    Later later;
};

// Of the keys first .. first + K - 1.
template <class L, int K, int V>
void product(const ScoreProduct<L>& p, int64_t first) {
    using part = typename L::part;
    typedef float Sum __attribute__((vector_size(WIDTH)));
    constexpr int PARTS = 64 / WIDTH, SIZE = LANES / PARTS;
    const typename L::lane* fours[(K + 3) / 4];  // so the addresses fit into registers, too
    for (int i = 0; i < (K + 3) / 4; i++) fours[i] = p.keys + (first + 4 * i) * p.apart;
    Sum sum[K][V * PARTS];
#pragma GCC unroll 16
    for (int k = 0; k < K; k++)
UNROLL
        for (int v = 0; v < V * PARTS; v++) sum[k][v] = Sum{};
    const char* later = p.later.at;
    const int64_t step = first ? 0 : p.later.step;
    for (int64_t d = 0; d < p.depth; d++, later += step) {
        __builtin_prefetch(later, 0, 2);
        part q[V * PARTS];
UNROLL
        for (int v = 0; v < V * PARTS; v++)
            std::memcpy(&q[v], p.q + (v / PARTS * p.depth + d) * LANES + v % PARTS * SIZE, sizeof q[v]);
#pragma GCC unroll 16
        for (int k = 0; k < K; k++) {
            const part key = L::spread(fours[k / 4] + k % 4 * p.apart + d);
UNROLL
            for (int v = 0; v < V * PARTS; v++) sum[k][v] = L::dot(sum[k][v], q[v], key);
        }
    }
    float* scores = p.scores + first * p.stride;
UNROLL
    for (int k = 0; k < K; k++)
UNROLL
        for (int v = 0; v < V * PARTS; v++) std::memcpy(scores + k * p.stride + v * SIZE, &sum[k][v], sizeof(Sum));
}

// Of all 16 keys, in blocks of nearly equal size.
template <class L, int V>
void multiply(const ScoreProduct<L>& p) {
    constexpr int BLOCKS = (LANES * V + SCORES - 1) / SCORES, FEW = LANES / BLOCKS, MANY = (LANES + BLOCKS - 1) / BLOCKS;
    for (int64_t block = 0, first = 0; block < BLOCKS; block++) {
        const int64_t end = (block + 1) * LANES / BLOCKS;
        end - first == FEW ? product<L, FEW, V>(p, first) : product<L, MANY, V>(p, first);
        first = end;
    }
}

// out[row] = out[row] * shrink[row] + weights[.][row] times values, for R rows and the columns of a vector of values.
template <class L>
struct ValueProduct {
    const typename L::lane* const* values;  // rows [count * NUMBERS]
    int64_t column;                         // the first one's lane
    const typename L::lane* weights;        // [count][stride]
    int64_t count, stride;
    const float* shrink;
    float* out;
    int64_t out_stride;
};

template <class L, int R>
void product(const ValueProduct<L>& p) {
    using part = typename L::part;
    typedef float Sum __attribute__((vector_size(WIDTH)));
    constexpr int PARTS = 64 / WIDTH * L::NUMBERS, SIZE = WIDTH / sizeof(float);
    Sum sum[R][PARTS];
UNROLL
    for (int r = 0; r < R; r++)
UNROLL
        for (int v = 0; v < PARTS; v++) {
            std::memcpy(&sum[r][v], p.out + r * p.out_stride + v * SIZE, sizeof(Sum));
            sum[r][v] *= p.shrink[r];
        }
    const typename L::lane* weights = p.weights;
    for (int64_t i = 0; i < p.count; i++, weights += p.stride) {
        part columns[PARTS];
        L::side_by_side(p.values + i * L::NUMBERS, p.column, columns);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const auto weight = in_all_lanes<part>(weights[r]);
UNROLL
            for (int v = 0; v < PARTS; v++) sum[r][v] = L::dot(sum[r][v], columns[v], weight);
        }
    }
UNROLL
    for (int r = 0; r < R; r++)
UNROLL
        for (int v = 0; v < PARTS; v++) std::memcpy(p.out + r * p.out_stride + v * SIZE, &sum[r][v], sizeof(Sum));
}

// A product for a number of rows known only now, at most R.
template <class L, int R = VALUE_ROWS>
void multiply(int64_t rows, const ValueProduct<L>& p) {
    if constexpr (R > 1)
        if (rows < R) return multiply<L, R - 1>(rows, p);
    product<L, R>(p);
}

// -- softmax ------------------------------------------------------------------------------------------------------

// Where 16 rows of an item stand: the sum of the weights so far, and the top score.
struct RowTotals {
    f32x16 sum, top;
};

// The rows' scores [keys][stride] become weights 2^(score - top), of `keys` keys, in lanes [keys / NUMBERS][stride]; a
// lane sees as many keys as `seen` says. `scales`: of a quantized cache's keys, which are its values too; or null. Returns how
// much to shrink what the rows have so far.
template <class L, bool WHOLE>
INLINE f32x16 softmax_rows(float* scores, int64_t stride, int64_t keys, float scale, const float* scales, i32x16 seen,
                           typename L::lane* weights, RowTotals& rows) {
    auto shown = [&](int64_t key, f32x16 v, float hidden) {
        return WHOLE ? v : select(less(splat(int32_t(key)), seen), v, splat(hidden));
    };
    f32x16 highest = rows.top;
    for (int64_t k = 0; k < keys; k++) {
        f32x16 score = load(scores + k * stride) * (scale * LOG2_E);
        if (scales) score *= scales[k];
        score = shown(k, score, -std::numeric_limits<float>::infinity());
        store(scores + k * stride, score);
        highest = max(highest, score);
    }
    f32x16 sum = {};
    for (int64_t k = 0; k < keys; k += L::NUMBERS) {
        f32x16 weight[L::NUMBERS] = {};
        for (int64_t i = 0; i < L::NUMBERS && k + i < keys; i++) {
            weight[i] = exp2_of_negative(load(scores + (k + i) * stride) - highest);
            sum += weight[i];
            // What hides a score hides a scale too, which may be NaN where no one has written it.
            if (scales) weight[i] = shown(k + i, weight[i] * scales[k + i], 0.0f);
        }
        L::store_side_by_side(weights + k / L::NUMBERS * stride, weight);
    }
    const f32x16 shrink = exp2_of_negative(rows.top - highest);
    rows = RowTotals{rows.sum * shrink + sum, highest};
    return shrink;
}

}  // namespace quire
