// What attention does with a packed key tile: the products, and the running softmax of a row.
#pragma once

#include "attention_pack.h"
#include "attention_tiles.h"

namespace quire {

// Rows and vectors of accumulators of the products: what fits into the registers. Does not change bits.
#if defined(__AVX512F__)
constexpr int ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 1;
#else
constexpr int ROWS = 3, VECTORS = 1;
#endif
template <class L>
constexpr int64_t BLOCK_ROWS = IN_TILES<L> ? 2 * TILE_ROWS : ROWS;

// Stands for "nothing seen yet" in a running maximum: finite, so that differences are never NaN.
constexpr float LOWEST = std::numeric_limits<float>::lowest();

constexpr float LOG2_E = 1.44269504f;

// -- products ---------------------------------------------------------------------------------------------------

// Where a product's numbers lie; `a` and `b` in lanes, b in panels of [depth, 16].
template <class Lane>
struct Operands {
    const Lane* a;
    int64_t a_stride;
    const Lane* b;
    int64_t b_stride;  // of a panel
    int64_t depth;
    float* c;
    int64_t c_stride;
    const float* factor;  // of each row of c; null: c is overwritten
};

// c = c * factor + a b, for a [R, depth] and V panels of b.
template <class L, int R, int V>
void product(const Operands<typename L::lane>& o) {
    typedef float Sum __attribute__((vector_size(WIDTH)));
    constexpr int PARTS = 64 / WIDTH, SIZE = LANES / PARTS;
    Sum sum[R][V * PARTS];
UNROLL
    for (int r = 0; r < R; r++)
UNROLL
        for (int v = 0; v < V * PARTS; v++) {
            Sum so_far = {};  // by value: of an array that is copied to GCC keeps a second one in memory
            if (o.factor) std::memcpy(&so_far, o.c + r * o.c_stride + v * SIZE, sizeof so_far), so_far *= o.factor[r];
            sum[r][v] = so_far;
        }
    for (int64_t d = 0; d < o.depth; d++) {
        typename L::part b[V * PARTS];
UNROLL
        for (int v = 0; v < V * PARTS; v++)
            std::memcpy(&b[v], o.b + v / PARTS * o.b_stride + d * LANES + v % PARTS * SIZE, sizeof b[v]);
UNROLL
        for (int r = 0; r < R; r++) {
            const auto a = in_all_lanes<typename L::part>(o.a[r * o.a_stride + d]);
UNROLL
            for (int v = 0; v < V * PARTS; v++) sum[r][v] = L::dot(sum[r][v], a, b[v]);
        }
    }
UNROLL
    for (int r = 0; r < R; r++)
UNROLL
        for (int v = 0; v < V * PARTS; v++) {
            const Sum total = sum[r][v];
            std::memcpy(o.c + r * o.c_stride + v * SIZE, &total, sizeof total);
        }
}

// The product for a number of rows and vectors known only now, at most R (in tiles: two of them) and V.
template <class L, int R = ROWS, int V = VECTORS>
void multiply(int64_t rows, int64_t vectors, const Operands<typename L::lane>& o) {
    if constexpr (IN_TILES<L>) {
        const TileOperands of{{o.a, o.a + TILE_ROWS * o.a_stride}, {o.a_stride, o.a_stride},
                              o.b, o.b_stride, o.depth, o.c, o.c_stride};
        if (!o.factor) return multiply_in_tiles<false>(rows, vectors, of);
        shrink_rows(o.c, o.c_stride, o.factor, rows, vectors);
        multiply_in_tiles<true>(rows, vectors, of);
    } else {
        if constexpr (R > 1)
            if (rows < R) return multiply<L, R - 1, V>(rows, vectors, o);
        if constexpr (V > 1)
            if (vectors < V) return multiply<L, R, V - 1>(rows, vectors, o);
        product<L, R, V>(o);
    }
}

// A row's scores [KEY_TILE] become weights 2^(score - top), for the groups g, where it sees the keys from .. end - 1;
// WHOLE: all of them, a number known here; CODES: keys and values have scales. Also its running top and total; returns how
// much to shrink what it has so far.
template <class L, bool CODES, bool WHOLE>
INLINE float softmax_row(const float* scores, float scale, const Packed<L>& tile, Groups g, int32_t from, int32_t end,
                         typename L::lane* weights, float& top, f32x16& total) {
    const int64_t first = WHOLE ? 0 : g.first, stop = WHOLE ? GROUPS : g.end;
    auto seen = [&](int64_t group, f32x16 v, float hidden) {
        if (WHOLE) return v;
        constexpr i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const i32x16 key = lanes + int32_t(group * LANES);
        return select(less(key, splat(end)) & ~less(key, splat(from)), v, splat(hidden));
    };
    f32x16 highest = splat(top), score[GROUPS];
    for (int64_t i = first; i < stop; i++) {
        f32x16 s = load(scores + i * LANES) * (scale * LOG2_E);
        if constexpr (CODES) s *= load(tile.key_scales + i * LANES);
        score[i] = seen(i, s, -std::numeric_limits<float>::infinity());
        highest = max(highest, score[i]);
    }
    const float new_top = largest_of(highest), shrink = exp2_of_negative(splat(top - new_top))[0];
    f32x16 sum = {};
    for (int64_t i = first; i < stop; i++) {
        f32x16 weight = exp2_of_negative(score[i] - new_top);
        sum += weight;
        // What hides a score hides a scale too, which may be NaN where no one has written it.
        if constexpr (CODES) weight = seen(i, weight * load(tile.value_scales + i * LANES), 0.0f);
        L::store_weights(weights + i * LANES / L::NUMBERS, weight);
    }
    total = total * shrink + sum;
    top = new_top;
    return shrink;
}

}  // namespace quire
