// The products of a few rows, straight from the cache: a decoded token meets each key once, so to pack a tile would
// take longer than to multiply it. A number has the same accumulator, in the same order, as with a packed tile.
#pragma once

#include "attention_math.h"

namespace quire {

// Up to so many rows. Does not change bits.
constexpr int64_t FEW_ROWS = 8;

// Where the registers hold a square of 16 x 16 lanes beside some sums; tile registers sum in another order.
template <class L>
constexpr bool FEW_APART = WIDTH == 64 && !IN_TILES<L>;

// Groups of 16 rows of the cache: where each begins, and how far apart its rows are. Meanwhile those at `next`, which are
// needed later, are asked for: see `Ahead`.
struct RowGroups {
    const char* const* at;
    const char* const* next;
    int64_t stride;
};

// Scores of R rows, of which n are there, and G groups of keys: a lane is a key. WHOLE: `size` is so many squares. Rows
// that are not there are the last one again, here and below: their numbers are its own, and are stored over them.
template <class L, class S, int R, int G, bool WHOLE>
NOT_INLINE void score_groups(const RowGroups& keys, int64_t size, const typename L::lane* q, int64_t depth, int64_t n,
                             float* scores) {
    constexpr int SQUARE = L::template SQUARE<S>, EACH = L::template EACH<S>;
    constexpr int LINES = SQUARE * sizeof(S) * LANES / 64;  // of a square: at most one for each of its vectors
    auto there = [n](int64_t r) { return std::min(r, n - 1); };
    const typename L::lane* row[R];
    for (int r = 0; r < R; r++) row[r] = q + there(r) * depth;
    f32x16 sum[G][R] = {};
    for (int64_t i = 0; i < size; i += SQUARE) {
        const int numbers = WHOLE ? SQUARE : int(std::min<int64_t>(size - i, SQUARE));
        const int lanes = (numbers + L::NUMBERS - 1) / L::NUMBERS;
        typename L::vector turned[G][LANES];
#pragma GCC unroll 2
        for (int g = 0; g < G; g++)
            L::template of_square<S>(keys.at[g] + i * sizeof(S), keys.stride, numbers, turned[g]);
        for (int d = 0; d < LANES && (WHOLE || d * EACH < lanes); d++) {
            typename L::vector part[G][EACH];
#pragma GCC unroll 2
            for (int g = 0; g < G; g++) {
                if (d * LINES % LANES == 0)
                    Ahead::ask(keys.next[g] + i * LANES * sizeof(S) + d * LINES / LANES * 64);
                L::template of_stored<S>(turned[g][d], part[g]);
            }
            for (int p = 0; p < EACH && (WHOLE || d * EACH + p < lanes); p++)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const typename L::part of_q = L::spread(row[r] + i / L::NUMBERS + d * EACH + p);
#pragma GCC unroll 2
                    for (int g = 0; g < G; g++)
                        sum[g][r] = L::dot(sum[g][r], of_q, bits_of<typename L::part>(part[g][p]));
                }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) {
            const f32x16 score = sum[g][r];  // by value: of an array that is copied from GCC keeps a second one in memory
            store(scores + there(r) * KEY_TILE + g * LANES, score);
        }
}

// Adds the values of some groups to R rows, of which n are there: to numbers `column` to `column` + 16 * V - 1 of each,
// which it first multiplies by its factor. WHOLE: a row of values has all of these.
template <class L, class S, int R, int V, bool WHOLE>
NOT_INLINE void add_columns(const RowGroups& values, int64_t groups, int64_t column, int64_t size,
                            const typename L::lane* weights, const float* factor, int64_t n, float* out, int64_t dims) {
    constexpr int N = L::NUMBERS;
    static_assert(V % N == 0);
    auto there = [n](int64_t r) { return std::min(r, n - 1); };
    const typename L::lane* weight[R];
    f32x16 sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        weight[r] = weights + there(r) * KEY_TILE / N;
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[r][v] = load(out + there(r) * dims + column + v * LANES) * factor[there(r)];
    }
    const int64_t stride = values.stride;
    for (int64_t g = 0; g < groups; g++) {
        const char *rows = values.at[g] + column * sizeof(S), *next = values.next[g] + N * column * sizeof(S);
        for (int key = 0; key < LANES; key += N, rows += N * stride, next += N * stride) {
#pragma GCC unroll 16
            for (int line = 0; line < int(N * V * LANES * sizeof(S)); line += 64) Ahead::ask(next + line);
            typename L::part by[R];
            for (int r = 0; r < R; r++) by[r] = L::spread(weight[r] + key / N);
#pragma GCC unroll 8
            for (int v = 0; v < V; v += N) {
                typename L::vector columns[N];
                const int64_t at = v * LANES;
                const int seen = WHOLE ? LANES * N : int(std::min<int64_t>(size - column - at, LANES * N));
                L::template of_columns<S>(rows + at * sizeof(S), stride, seen, columns);
#pragma GCC unroll 2
                for (int p = 0; p < N; p++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++)
                        sum[r][v + p] = L::dot(sum[r][v + p], by[r], bits_of<typename L::part>(columns[p]));
            }
        }
        for (int r = 0; r < R; r++) weight[r] += LANES / N;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const f32x16 total = sum[r][v];
            store(out + there(r) * dims + column + v * LANES, total);
        }
}

// Scores of all groups, two at a time where the registers hold their sums: two share what they take of q.
template <class L, class S, int R>
void score_keys(const RowGroups& keys, int64_t groups, int64_t size, const typename L::lane* q, int64_t depth, int64_t n,
                float* scores) {
    constexpr int AT_ONCE = R < 8 ? 2 : 1;
    int64_t g = 0;
    auto from = [&] { return RowGroups{keys.at + g, keys.next + g, keys.stride}; };
    auto all = [&](auto whole) {
        constexpr bool WHOLE = decltype(whole)::value;
        for (; g + AT_ONCE <= groups; g += AT_ONCE)
            score_groups<L, S, R, AT_ONCE, WHOLE>(from(), size, q, depth, n, scores + g * LANES);
        if (g < groups) score_groups<L, S, R, 1, WHOLE>(from(), size, q, depth, n, scores + g * LANES);
    };
    size % L::template SQUARE<S> ? all(std::false_type{}) : all(std::true_type{});
}

// The values of all groups, for all numbers of a row.
template <class L, class S, int R>
void add_values(const RowGroups& values, int64_t groups, int64_t size, const typename L::lane* weights,
                const float* factor, int64_t n, float* out, int64_t dims) {
    constexpr int N = L::NUMBERS, V = R == 8 ? 2 : R == 4 ? 4 : 8;
    int64_t column = 0;
    for (; column + V * LANES <= size; column += V * LANES)
        add_columns<L, S, R, V, true>(values, groups, column, size, weights, factor, n, out, dims);
    for (; column < size; column += N * LANES)
        add_columns<L, S, R, N, false>(values, groups, column, size, weights, factor, n, out, dims);
}

// work(the numbers of the cache, R) for the least R that n rows fit into.
template <class L, class F>
INLINE void with_rows(const KvCache& kv, int64_t n, F work) {
    with_numbers<L>(kv.format, [&](auto number) {
        if (n == 1) return work(number, std::integral_constant<int, 1>{});
        if (n == 2) return work(number, std::integral_constant<int, 2>{});
        return n <= 4 ? work(number, std::integral_constant<int, 4>{}) : work(number, std::integral_constant<int, 8>{});
    });
}

template <class L>
void score_keys(const KvCache& kv, const RowGroups& keys, int64_t groups, const typename L::lane* q, int64_t depth,
                int64_t n, float* scores) {
    with_rows<L>(kv, n, [&](auto number, auto rows) {
        score_keys<L, decltype(number), decltype(rows)::value>(keys, groups, kv.head_dim, q, depth, n, scores);
    });
}

template <class L>
void add_values(const KvCache& kv, const RowGroups& values, int64_t groups, const typename L::lane* weights,
                const float* factor, int64_t n, float* out, int64_t dims) {
    with_rows<L>(kv, n, [&](auto number, auto rows) {
        add_values<L, decltype(number), decltype(rows)::value>(values, groups, kv.head_dim, weights, factor, n, out,
                                                               dims);
    });
}

}  // namespace quire
