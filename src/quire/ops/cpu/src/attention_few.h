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

// Scores of R rows, of which n are there, and G groups of 16 keys, whose rows of the cache are given: a lane is a key.
// Meanwhile it asks for as many rows that are needed later: see `Ahead`.
template <class L, class S, int R, int G>
void score_groups(const char* const* keys, int64_t size, const typename L::lane* q, int64_t depth, int64_t n,
                  float* scores, const char* const* next) {
    constexpr int64_t WIDE = LANES * L::NUMBERS;
    const typename L::lane* row[R];
    for (int r = 0; r < R; r++) row[r] = q + std::min<int64_t>(r, n - 1) * depth;
    f32x16 sum[G][R] = {};
    auto chunk = [&](int64_t i, auto numbers) __attribute__((always_inline)) {
        const int lanes = (int(numbers) + L::NUMBERS - 1) / L::NUMBERS;
        for (int g = 0; g < G; g++) {
            for (int64_t line = 0; line < int64_t(LANES * int(numbers) * sizeof(S)); line += 64)
                __builtin_prefetch(next[g] + i * LANES * sizeof(S) + line);
            typename L::vector square[LANES];
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++)
                square[k] = L::of_row((const S*)keys[g * LANES + k] + i, int(numbers));
            transpose(square);
#pragma GCC unroll 16
            for (int d = 0; d < lanes; d++)
                for (int r = 0; r < R; r++)
                    sum[g][r] = L::dot(sum[g][r], typename L::part{} + row[r][i / L::NUMBERS + d],
                                       bits_of<typename L::part>(square[d]));
        }
    };
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) chunk(i, std::integral_constant<int, WIDE>{});
    if (i < size) chunk(i, int(size - i));
    for (int r = 0; r < R; r++)
        if (r < n)
            for (int g = 0; g < G; g++) store(scores + r * KEY_TILE + g * LANES, sum[g][r]);
}

// Adds the values of some keys, a multiple of 16, to R rows, of which n are there: to numbers `column` to `column` +
// 16 * V - 1 of each, which it first multiplies by its factor.
template <class L, class S, int R, int V>
void add_columns(const char* const* values, int64_t keys, int64_t column, int64_t size, const typename L::lane* weights,
                 int64_t weights_stride, const float* factor, int64_t n, float* out, int64_t dims,
                 const char* const* next) {
    constexpr int N = L::NUMBERS;
    static_assert(V % N == 0);
    const typename L::lane* weight[R];
    f32x16 sum[R][V];
    for (int r = 0; r < R; r++) {
        const int64_t of = std::min<int64_t>(r, n - 1);
        weight[r] = weights + of * weights_stride;
        for (int v = 0; v < V; v++) sum[r][v] = load(out + of * dims + column + v * LANES) * factor[of];
    }
    auto add = [&](auto whole) __attribute__((always_inline)) {
        for (int64_t key = 0; key < keys; key += N) {
            const char* at_next = next[key / LANES] + (key % LANES * size + N * column) * sizeof(S);
#pragma GCC unroll 16
            for (int64_t line = 0; line < int64_t(N * V * LANES * sizeof(S)); line += 64)
                __builtin_prefetch(at_next + line);
            for (int v = 0; v < V; v += N) {
                const int64_t at = column + v * LANES;
                typename L::vector columns[N];
                const int there = decltype(whole)::value ? LANES * N : int(std::min<int64_t>(size - at, LANES * N));
                L::template of_columns<S>(values + key, at, there, columns);
                for (int p = 0; p < N; p++)
                    for (int r = 0; r < R; r++)
                        sum[r][v + p] = L::dot(sum[r][v + p], typename L::part{} + weight[r][key / N],
                                               bits_of<typename L::part>(columns[p]));
            }
        }
    };
    column + V * LANES <= size ? add(std::true_type{}) : add(std::false_type{});
    for (int r = 0; r < R; r++)
        if (r < n)
            for (int v = 0; v < V; v++) store(out + r * dims + column + v * LANES, sum[r][v]);
}

// The same for all groups from `first` on, and for all numbers of a row.
template <class L, class S, int R>
void score_keys(const char* const* keys, Groups groups, int64_t size, const typename L::lane* q, int64_t depth,
                int64_t n, float* scores, const char* const* next) {
    constexpr int G = R < 8 ? 2 : 1;
    int64_t g = groups.first;
    for (; g + G <= groups.end; g += G)
        score_groups<L, S, R, G>(keys + g * LANES, size, q, depth, n, scores + g * LANES, next + g);
    for (; G > 1 && g < groups.end; g++)
        score_groups<L, S, R, 1>(keys + g * LANES, size, q, depth, n, scores + g * LANES, next + g);
}

template <class L, class S, int R>
void add_values(const char* const* values, int64_t keys, int64_t size, const typename L::lane* weights,
                int64_t weights_stride, const float* factor, int64_t n, float* out, int64_t dims,
                const char* const* next) {
    constexpr int N = L::NUMBERS, V = R == 8 ? 2 : R == 4 ? 4 : 8;
    int64_t column = 0;
    for (; column + V * LANES <= dims; column += V * LANES)
        add_columns<L, S, R, V>(values, keys, column, size, weights, weights_stride, factor, n, out, dims, next);
    for (; V > N && column < dims; column += N * LANES)
        add_columns<L, S, R, N>(values, keys, column, size, weights, weights_stride, factor, n, out, dims, next);
}

}  // namespace quire
