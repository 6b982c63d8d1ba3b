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

// The registers: of the sums of row tile t and vector v, of a row tile and of a vector.
constexpr int attention_sums(int t, int v) { return 2 * t + v; }
constexpr int attention_rows(int t) { return 4 + t; }
constexpr int attention_vector(int v) { return 6 + v; }

INLINE void configure_attention(int64_t rows) {
    const int height = int(rows < TILE_ROWS ? rows : TILE_ROWS);
    TileShapes shapes;
    for (int t = 0; t < 2; t++) {
        shapes.set(attention_rows(t), height, TILE_BYTES);
        shapes.set(attention_vector(t), TILE_ROWS, TILE_BYTES);
        for (int v = 0; v < 2; v++) shapes.set(attention_sums(t, v), height, TILE_BYTES);
    }
    configure_tiles(shapes);
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

template <bool MERGE, int T, int V>
INLINE void begin_sums(const TileOperands& o) {
    float* c = o.c + T * TILE_ROWS * o.c_stride;
    if constexpr (MERGE) {
        load_tile<attention_sums(T, 0)>(c, o.c_stride * 4);
        if constexpr (V == 2) load_tile<attention_sums(T, 1)>(c + LANES, o.c_stride * 4);
    } else {
        zero_tile<attention_sums(T, 0)>();
        if constexpr (V == 2) zero_tile<attention_sums(T, 1)>();
    }
}

template <int T, int V>
INLINE void add_rows(const TileOperands& o, int64_t d) {
    load_tile<attention_rows(T)>(o.a[T] + d, o.a_stride[T] * 4);
    multiply_pairs<attention_sums(T, 0), attention_rows(T), attention_vector(0)>();
    if constexpr (V == 2) multiply_pairs<attention_sums(T, 1), attention_rows(T), attention_vector(1)>();
}

template <int T, int V>
INLINE void end_sums(const TileOperands& o) {
    float* c = o.c + T * TILE_ROWS * o.c_stride;
    store_tile<attention_sums(T, 0)>(c, o.c_stride * 4);
    if constexpr (V == 2) store_tile<attention_sums(T, 1)>(c + LANES, o.c_stride * 4);
}

// c = c + a b (MERGE), or c = a b, for R tiles of rows and V vectors.
template <bool MERGE, int R, int V>
void tile_product(const TileOperands& o) {
    begin_sums<MERGE, 0, V>(o);
    if constexpr (R == 2) begin_sums<MERGE, 1, V>(o);
    for (int64_t d = 0; d < o.depth; d += TILE_BYTES / 4) {
        load_tile<attention_vector(0)>(o.b + d * LANES, TILE_BYTES);
        if constexpr (V == 2) load_tile<attention_vector(1)>(o.b + o.b_stride + d * LANES, TILE_BYTES);
        add_rows<0, V>(o, d);
        if constexpr (R == 2) add_rows<1, V>(o, d);
    }
    end_sums<0, V>(o);
    if constexpr (R == 2) end_sums<1, V>(o);
}

// The same for `rows` rows, at most two tiles of them, and any number of vectors.
template <bool MERGE>
void multiply_in_tiles(int64_t rows, int64_t vectors, TileOperands o) {
    const bool two = rows > TILE_ROWS;
    for (; vectors > 1; vectors -= 2, o.b += 2 * o.b_stride, o.c += 2 * LANES)
        two ? tile_product<MERGE, 2, 2>(o) : tile_product<MERGE, 1, 2>(o);
    if (vectors) two ? tile_product<MERGE, 2, 1>(o) : tile_product<MERGE, 1, 1>(o);
}

// Rows of c [rows][16 * vectors], each times its factor.
inline void shrink_rows(float* c, int64_t stride, const float* factor, int64_t rows, int64_t vectors) {
    for (int64_t r = 0; r < rows; r++, c += stride)
        for (int64_t i = 0; i < vectors * LANES; i += LANES) store(c + i, load(c + i) * factor[r]);
}

}  // namespace quire
