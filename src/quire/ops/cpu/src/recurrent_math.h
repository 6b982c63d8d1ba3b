// What the gated delta rule does with the rows of a tile and with a state, for recurrent.cpp: products, and sums of them.
#pragma once

#include <algorithm>
#include <utility>

#include "state_tiles.h"

namespace quire {

namespace {

constexpr int64_t AHEAD = 3072;  // numbers of a state that are asked for ahead

#if defined(__AVX512F__)
constexpr int ALONE = 8, TOGETHER = 4, COLUMNS = 2;  // vectors of a single row; rows at a time, and vectors of theirs
constexpr int FOLDED = 8, BEFORE = 4;  // rows of a state at a time; vectors of what rows before one say
constexpr int PAIRED = 8;  // rows whose keys meet another one at a time
#else
constexpr int ALONE = 2, TOGETHER = 2, COLUMNS = 1, FOLDED = 4, BEFORE = 2, PAIRED = 2;
#endif

// Numbers of a and b: the lower half of each group of 2 * WIDTH (HALF: 0), or the upper one (1).
template <int WIDTH, int HALF, int... I>
INLINE f32x16 halves(f32x16 a, f32x16 b, std::integer_sequence<int, I...>) {
    return shuffle<(I / WIDTH * 2 + HALF) * WIDTH + I % WIDTH...>(a, b);
}

// Pairs of vectors become one, with half as many numbers of each, until there is one vector.
template <int PAIRS>
INLINE void add_up(f32x16* x) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++)
        x[i] = halves<PAIRS, 0>(x[2 * i], x[2 * i + 1], lanes) + halves<PAIRS, 1>(x[2 * i], x[2 * i + 1], lanes);
    if constexpr (PAIRS > 1) add_up<PAIRS / 2>(x);
}

// The sum of each of N vectors, as `sum` has it.
template <int N>
INLINE void sums_of(const f32x16* v, float* out) {
    if constexpr (N == LANES) {
        f32x16 x[N];
        for (int i = 0; i < N; i++) x[i] = v[i];
        add_up<N / 2>(x);
        store(out, x[0]);
    } else {
        for (int i = 0; i < N; i++) out[i] = sum(v[i]);
    }
}

// Stored rows that will be needed after a state: read line by line beside it. (To be asked for all at once, they are too
// many, and too far from each other.)
struct Beside {
    const float* rows[3];
    int64_t lines[3];

    void touch(int64_t line) const {
        for (int i = 0; i < 3; i++)
            if (line < lines[i]) (void)*(const volatile float*)(rows[i] + line * LANES);
    }
};

// The sums over `dim` of rows' keys and queries with `columns` columns: outK[r][c] = sum_a k[r][a] * m[a][c].
template <int R, int V, bool WHOLE>
void products(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q, int64_t columns,
              float* out_k, float* out_q, int64_t out_stride, const Beside& beside) {
    f32x16 of_k[R][V] = {}, of_q[R][V] = {};
    for (int64_t a = 0; a < dim; a++) {
        f32x16 row[V];
        if (R == 1) beside.touch(a);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const float* at = m + a * stride + v * LANES;
            if (R == 1) __builtin_prefetch(at + AHEAD);  // a state is read once, from memory; the next head's follows
            row[v] = some<WHOLE>(at, columns - v * LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const f32x16 ka = splat(k[r][a]), qa = splat(q[r][a]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) of_k[r][v] = fma(ka, row[v], of_k[r][v]), of_q[r][v] = fma(qa, row[v], of_q[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V && v * LANES < columns; v++) {
            store(out_k + r * out_stride + v * LANES, of_k[r][v]);
            store(out_q + r * out_stride + v * LANES, of_q[r][v]);
        }
}

template <int R, int V>
void products_of_rows(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q,
                      int64_t columns, float* out_k, float* out_q, int64_t out_stride, const Beside& beside) {
    for (int64_t c = 0; c < columns; c += V * LANES) {
        const auto part = columns - c >= V * LANES ? products<R, V, true> : products<R, V, false>;
        part(m + c, stride, dim, k, q, columns - c, out_k + c, out_q + c, out_stride, beside);
    }
}

// The same of any number of rows and columns. What is added, and in which order, is the same for each.
void all_products(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q, int64_t rows,
                  int64_t columns, float* out_k, float* out_q, int64_t out_stride, const Beside& beside) {
    const auto some = columns <= LANES ? products_of_rows<TOGETHER, 1> : products_of_rows<TOGETHER, COLUMNS>;
    const auto one = columns <= LANES ? products_of_rows<1, 1> : products_of_rows<1, ALONE>;
    int64_t r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER)
        some(m, stride, dim, k + r, q + r, columns, out_k + r * out_stride, out_q + r * out_stride, out_stride, beside);
    for (; r < rows; r++)
        one(m, stride, dim, k + r, q + r, columns, out_k + r * out_stride, out_q + r * out_stride, out_stride, beside);
}

// R rows of a state, decayed, and what the rows of a tile add: next[a][c] = decay[a] * state[a][c] + sum_j w[j][a] * u[j][c].
template <int R, int V, bool WHOLE>
void fold_part(const float* state, int64_t stride, const float* weights, const float* updates, int64_t updates_stride,
               const float* decay, int64_t dim, int64_t columns, float* next, int64_t next_stride, bool away) {
    f32x16 total[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            total[r][v] = decay[r] * some<WHOLE>(state + r * stride + v * LANES, columns - v * LANES);
    for (int64_t j = 0; j < TILE; j++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const f32x16 u = some<WHOLE>(updates + j * updates_stride + v * LANES, columns - v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) total[r][v] = fma(splat(weights[j * dim + r]), u, total[r][v]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            float* to = next + r * next_stride + v * LANES;
            if (WHOLE)
                away ? store_away(to, total[r][v]) : store(to, total[r][v]);
            else if (columns > v * LANES)
                store_some(to, total[r][v], columns - v * LANES);
        }
}

template <int R, int V>
void fold_rows(const float* state, int64_t stride, const float* weights, const float* updates, int64_t updates_stride,
               const float* decay, int64_t dim, int64_t columns, float* next, int64_t next_stride, bool away) {
    for (int64_t c = 0; c < columns; c += V * LANES) {
        const auto part = columns - c >= V * LANES ? fold_part<R, V, true> : fold_part<R, V, false>;
        part(state + c, stride, weights, updates + c, updates_stride, decay, dim, columns - c, next + c, next_stride, away);
    }
}

// What the rows before one in its tile say to its key (`seen` their weights) and to its query (`read`), for V vectors.
template <int V>
INLINE void before(const float* updates, int64_t stride, int64_t rows, const float* seen, const float* read, f32x16* known,
                   f32x16* result) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) known[v] = result[v] = f32x16{};
    for (int64_t j = 0; j < rows; j++) {
        const f32x16 s = splat(seen[j]), r = splat(read[j]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const f32x16 u = load(updates + j * stride + v * LANES);
            known[v] = fma(s, u, known[v]), result[v] = fma(r, u, result[v]);
        }
    }
}

// What the keys of some rows, whose decays stand at `sums`, are to a key and a query at `to`: products of two keys, or of a
// query and a key. A decay of its own for each number of a key stands in the product, one for all of them before it.
template <bool WHOLE, bool EACH>
INLINE void pairs(const float* const* keys, const float* const* sums, const float* to, const float* k, const float* q,
                  int64_t dim, float* seen, float* read) {
    constexpr int AT_ONCE = EACH ? PAIRED / 2 : PAIRED;  // whose sums and exponentials find room in registers
    f32x16 of_both[2 * PAIRED];
    for (int first = 0; first < PAIRED; first += AT_ONCE) {
        f32x16 of_keys[AT_ONCE] = {}, of_queries[AT_ONCE] = {};
        for (int64_t a = 0; a < dim; a += LANES) {
            const f32x16 own = some<WHOLE>(k + a, dim - a), query = some<WHOLE>(q + a, dim - a);
#pragma GCC unroll 8
            for (int j = 0; j < AT_ONCE; j++) {
                f32x16 key = some<WHOLE>(keys[first + j] + a, dim - a);
                if (EACH) key *= exp(some<WHOLE>(to + a, dim - a) - some<WHOLE>(sums[first + j] + a, dim - a));
                of_keys[j] = fma(own, key, of_keys[j]);
                of_queries[j] = fma(query, key, of_queries[j]);
            }
        }
        for (int j = 0; j < AT_ONCE; j++) of_both[first + j] = of_keys[j], of_both[PAIRED + first + j] = of_queries[j];
    }
    float totals[2 * PAIRED];
    sums_of<2 * PAIRED>(of_both, totals);
    for (int j = 0; j < PAIRED; j++) seen[j] = totals[j], read[j] = totals[PAIRED + j];
}

// The weights of a tile's rows 0 .. i for row i, to its key (`seen`) and to its query (`read`). What comes after them in these
// has no meaning.
template <bool WHOLE, bool EACH>
void weigh(const float* const* keys, const float* sums, int64_t i, const float* q, int64_t dim, float* seen, float* read) {
    const float* there[PAIRED];
    const float* decays[PAIRED] = {};
    for (int64_t j = 0; j <= i; j += PAIRED) {
        for (int64_t row = 0; row < PAIRED; row++) {
            there[row] = keys[std::min(j + row, i)];
            if (EACH) decays[row] = sums + std::min(j + row, i) * dim;
        }
        pairs<WHOLE, EACH>(there, decays, sums + i * dim, keys[i], q, dim, seen + j, read + j);
    }
    if (EACH) return;
    const f32x16 since = exp(splat(sums[i]) - load(sums));
    store(seen, load(seen) * since), store(read, load(read) * since);
}

// e^(to - sums), where a head's sum of decays (one number, or one for each of `dim`) stands at either: of `dim` numbers, to
// `out`. Without `sums`, e^to.
template <bool WHOLE>
INLINE void decays_of(const float* to, const float* sums, int64_t decay_dim, int64_t dim, float* out) {
    if (decay_dim == 1) {
        const f32x16 all = exp(splat(sums ? *to - *sums : *to));
        for (int64_t a = 0; a < padded(dim); a += LANES) store(out + a, all);
        return;
    }
    for (int64_t a = 0; a < dim; a += LANES) {
        const f32x16 end = some<WHOLE>(to + a, dim - a);
        store(out + a, exp(sums ? end - some<WHOLE>(sums + a, dim - a) : end));
    }
}

// out = factors * row, `dim` numbers.
template <bool WHOLE>
INLINE void scale(const float* row, const float* factors, int64_t dim, float* out) {
    for (int64_t a = 0; a < dim; a += LANES) put<WHOLE>(out + a, some<WHOLE>(row + a, dim - a) * load(factors + a), dim - a);
}

}  // namespace
}  // namespace quire
