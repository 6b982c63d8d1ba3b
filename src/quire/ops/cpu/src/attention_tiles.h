// Attention's products in tile registers (see amx.h), where bf16 numbers meet in pairs and the processor has them.
//
// Packed keys and values already lie as a tile wants them: 16 pairs of 16 keys, or of 16 head dimensions. Two tiles of
// rows at a time meet two of those: four tiles of sums. The sum of each 32 numbers is made apart and then added, so the
// bits are not those of other instruction sets. They are a function of the row alone all the same: 32 keys begin at
// constant positions, and those that a row cannot see add zeros.
#pragma once

#include "amx.h"
#include "attention_numbers.h"

namespace quire {

template <class L>
constexpr bool IN_TILES = TILES && L::NUMBERS == 2;

// Lanes that a product takes at once; what a row has of them is filled up with zeros.
template <class L>
constexpr int64_t DEPTH_STEP = IN_TILES<L> ? TILE_BYTES / 4 : 1;

// Rows of scratch memory for `rows` rows: those that complete the last tile are computed, and looked at by no one. Few
// rows are a tile of their height, since others may lie behind them.
template <class L>
constexpr int64_t rows_in_tiles(int64_t rows) {
    return IN_TILES<L> && rows > TILE_ROWS ? (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : rows;
}

INLINE void configure_attention(int64_t rows) {
    configure_tiles(product_shapes(int(rows < TILE_ROWS ? rows : TILE_ROWS), TILE_BYTES));
}

// Where a product's numbers lie, as in `Operands`; each tile of rows of `a` by itself.
struct TileOperands {
    const uint32_t* a[2];
    int64_t a_stride[2];
    const uint32_t* b;
    int64_t b_stride, depth;
    float* c;
    int64_t c_stride;
};

// c = c + a b (MERGE), or c = a b, for R tiles of rows and V vectors.
template <bool MERGE, int R, int V>
void tile_product(const TileOperands& o) {
    if constexpr (MERGE)
        load_sums<R, V>(o.c, o.c_stride * 4);
    else
        zero_sums<R, V>();
    for (int64_t d = 0; d < o.depth; d += TILE_BYTES / 4) {
        load_tile<half_tile(0)>(o.b + d * LANES, TILE_BYTES);
        if constexpr (V == 2) load_tile<half_tile(1)>(o.b + o.b_stride + d * LANES, TILE_BYTES);
        add_tile<false, 0, V>(o.a[0] + d, o.a_stride[0] * 4);
        if constexpr (R == 2) add_tile<false, 1, V>(o.a[1] + d, o.a_stride[1] * 4);
    }
    store_sums<R, V>(o.c, o.c_stride * 4);
}

// The same for `rows` rows, at most two tiles of them, and any number of vectors.
template <bool MERGE>
void multiply_in_tiles(int64_t rows, int64_t vectors, TileOperands o) {
    const bool two = rows > TILE_ROWS;
    for (; vectors > 1; vectors -= 2, o.b += 2 * o.b_stride, o.c += 2 * LANES)
        two ? tile_product<MERGE, 2, 2>(o) : tile_product<MERGE, 1, 2>(o);
    if (vectors) two ? tile_product<MERGE, 2, 1>(o) : tile_product<MERGE, 1, 1>(o);
}

// Rows of c [rows][16 * vectors], each times its factor, which is 1 wherever a tile brings no higher score.
inline void shrink_rows(float* c, int64_t stride, const float* factor, int64_t rows, int64_t vectors) {
    for (int64_t r = 0; r < rows; r++, c += stride)
        for (int64_t i = 0; factor[r] != 1.0f && i < vectors * LANES; i += LANES)
            store(c + i, load(c + i) * factor[r]);
}

// -- scores of few rows ---------------------------------------------------------------------------------------------
//
// A tile's rows are keys, 16 of them as they lie in the cache, and the rows of queries are its columns: so keys need not be
// packed, which takes longer than all else for a decoded token. A score is the same sum of the same products.

constexpr int transposed_scores(int group) { return sums_tile(1, group); }  // free where there is one tile of rows
constexpr int TRANSPOSED_QUERIES = row_tile(1);

// As `configure_attention`, for fewer rows than a tile has, with registers for their scores.
inline void configure_few(int64_t rows) {
    TileShapes shapes = product_shapes((int)rows, TILE_BYTES);
    for (const int tile : {TRANSPOSED_QUERIES, transposed_scores(0), transposed_scores(1)})
        shapes.set(tile, TILE_ROWS, 4 * (int)rows);
    configure_tiles(shapes);
}

// Scores [G groups][16 keys][16] of `rows` queries. `q`: [depth][rows], `depth` a whole number of tiles. A group is 16 keys,
// `stride` bytes apart; meanwhile `bytes` at its `next` are asked for.
template <int G>
void score_transposed(const char* const* keys, int64_t stride, const char* const* next, int64_t bytes,
                      const uint32_t* q, int64_t depth, int64_t rows, float* scores) {
    zero_tile<transposed_scores(0)>();
    if constexpr (G == 2) zero_tile<transposed_scores(1)>();
    for (int64_t d = 0; d < depth; d += LANES) {
        for (int g = 0; g < G; g++)
            for (int64_t i = bytes * d / depth; i < bytes * (d + LANES) / depth; i += 64) __builtin_prefetch(next[g] + i);
        load_tile<TRANSPOSED_QUERIES>(q + d * rows, rows * 4);
        load_tile<half_tile(0)>(keys[0] + d * 4, stride);
        multiply_pairs<transposed_scores(0), half_tile(0), TRANSPOSED_QUERIES>();
        if constexpr (G == 2) {
            load_tile<half_tile(1)>(keys[1] + d * 4, stride);
            multiply_pairs<transposed_scores(1), half_tile(1), TRANSPOSED_QUERIES>();
        }
    }
    store_tile<transposed_scores(0)>(scores, TILE_BYTES);
    if constexpr (G == 2) store_tile<transposed_scores(1)>(scores + TILE_ROWS * LANES, TILE_BYTES);
}

}  // namespace quire
