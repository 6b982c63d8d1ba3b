// Panels of a weight times rows in tile registers (see amx.h): bf16, int8 and int4, for linear.cpp.
//
// Rows of activations lie one after the other: bf16 as they are, quantized ones as signed bytes, zeros up to a whole
// number of tiles of 64 bytes. Two tiles of rows at a time meet the two halves of a panel's outputs: four tiles of
// sums. What a row's sum is made of, and in which order, does not depend on the other rows of its tile. In bf16 the
// sum of each 32 inputs is made apart and then added, so the bits are not those of other instruction sets; those of
// quantized products are.
//
// Many rows are multiplied in strips, a part of the panel at a time: it stays in the first-level cache while the strip's
// rows come by, and int4 is unpacked once for all of them. Sums wait in memory meanwhile, which does not change bits.
#pragma once

#include <algorithm>
#include <limits>

#include "amx.h"
#include "weight.h"

namespace quire {

constexpr int64_t STEP = 2 * TILE_ROWS * TILE_BYTES;  // bytes of a panel that 64 bytes of activations meet

// Rows cut into tiles of one height, as few as there can be. The last one begins early enough to be whole; the rows
// that it shares with the one before it are the latter's.
struct RowTiles {
    int64_t rows, count, height;
    explicit RowTiles(int64_t rows)
        : rows(rows), count((rows + TILE_ROWS - 1) / TILE_ROWS), height((rows + count - 1) / count) {}
    int64_t begin(int64_t tile) const { return std::min(tile * height, rows - height); }
    int64_t shared(int64_t tile) const { return tile * height - begin(tile); }
};

// One or two neighbouring tiles of rows: their activations, `stride` bytes a row, and their scales [row][BLOCK].
template <int COUNT>
struct TileBlock {
    const char* rows[COUNT];
    const float* scales[COUNT];
    int64_t stride;
    int height;
};

// Their sums [row tile][row][half of the outputs].
template <int COUNT, class V>
using TileSums = V[COUNT][TILE_ROWS][2];

// Words from one row to the next. It is an odd number of lines, so that a tile's rows share no set of the cache.
inline int64_t tiled_row_words(const Weight& w) {
    const int64_t bytes = round_up(w.format == DENSE_BF16 ? 2 * w.in : w.in, TILE_BYTES);
    return (bytes / TILE_BYTES % 2 ? bytes : bytes + TILE_BYTES) / 4;
}

// Blocks of rows in a strip: their sums, 4 KB each, stay in the second-level cache.
constexpr int64_t STRIP = 8;

// Bytes of activations that a part of a panel meets: 32 KB of the panel.
constexpr int64_t PART = 1024;

// Of a panel that meets one block, the part that it is read in: nothing is there to be used again.
inline int64_t part_bytes(const Weight& w, int64_t blocks) {
    if (blocks > 1) return PART;
    return w.format == INT4 ? BLOCK : std::numeric_limits<int64_t>::max();
}

// Bytes of activations that are multiplied at a time: a tile's, or those of a group that is smaller.
inline int64_t depth(const Weight& w) {
    return w.format == INT4 ? std::min<int64_t>(w.group, TILE_BYTES) : TILE_BYTES;
}

inline TileShapes tile_shapes(const Weight& w, int64_t height) { return product_shapes((int)height, (int)depth(w)); }

// Adds the products of what lies at `panel` with the activations from byte `at` of each row.
template <bool QUADS, int COUNT>
INLINE void add_products(const char* panel, const TileBlock<COUNT>& x, int64_t at) {
    load_tile<half_tile(0)>(panel, 2 * TILE_BYTES);
    load_tile<half_tile(1)>(panel + TILE_BYTES, 2 * TILE_BYTES);
    add_tile<QUADS, 0>(x.rows[0] + at, x.stride);
    if constexpr (COUNT == 2) add_tile<QUADS, 1>(x.rows[1] + at, x.stride);
}

INLINE void fetch_step(const char* panel) {
    for (int64_t line = 0; line < STEP; line += 2 * TILE_BYTES) fetch(panel + line);
}

// Bytes begin .. end - 1 of bf16 activations. Where a panel ends within a tile, zeros complete it.
template <int COUNT>
void add_part_bf16(const Weight& w, const char* panel, int64_t begin, int64_t end, const TileBlock<COUNT>& x,
                   TileSums<COUNT, f32x16>& sums) {
    const int64_t whole = std::min(end, w.in / 32 * TILE_BYTES);
    load_sums<COUNT>(sums, 2 * TILE_BYTES);
    for (int64_t at = begin; at < whole; at += TILE_BYTES) {
        fetch_step(panel + at * PANEL);
        add_products<false>(panel + at * PANEL, x, at);
    }
    if (whole < end) {
        alignas(64) char last[STEP] = {};
        std::memcpy(last, panel + whole * PANEL, (w.in % 32 + 1) / 2 * 4 * PANEL);
        add_products<false>(last, x, whole);
    }
    store_sums<COUNT>(sums, 2 * TILE_BYTES);
}

// sums += dots times the scales of their rows in a BLOCK.
template <int COUNT, class V>
INLINE void add_scaled(const TileSums<COUNT, V>& dots, const TileBlock<COUNT>& x, int64_t blocks, int64_t block,
                       TileSums<COUNT, f32x16>& sums) {
    for (int t = 0; t < COUNT; t++)
        for (int r = 0; r < x.height; r++)
            for (int h = 0; h < 2; h++)
                sums[t][r][h] = fma(converted<f32x16>(dots[t][r][h]),
                                    splat(x.scales[t][r * blocks + block]), sums[t][r][h]);
}

// Inputs begin .. end - 1, which begin with a BLOCK.
template <int COUNT>
void add_part_int8(const char* panel, int64_t begin, int64_t end, const TileBlock<COUNT>& x, int64_t blocks,
                   TileSums<COUNT, f32x16>& sums) {
    alignas(64) TileSums<COUNT, i32x16> dots;
    for (int64_t first = begin; first < end; first += BLOCK) {
        zero_sums<COUNT>();
        for (int64_t at = first; at < std::min(end, first + BLOCK); at += TILE_BYTES) {
            fetch_step(panel + at * PANEL);
            add_products<true>(panel + at * PANEL, x, at);
        }
        store_sums<COUNT>(dots, 2 * TILE_BYTES);
        add_scaled(dots, x, blocks, first / BLOCK, sums);
    }
}

template <int COUNT>
void scale_outputs(const Weight& w, int64_t index, int height, TileSums<COUNT, f32x16>& sums) {
    const float* scales = (const float*)w.scales + index * PANEL;
    for (int t = 0; t < COUNT; t++)
        for (int r = 0; r < height; r++)
            for (int h = 0; h < 2; h++) sums[t][r][h] *= load(scales + h * LANES);
}

// Codes of `inputs` inputs, two a byte, as int8 lies: a byte [j, o, i] holds the quads 2j and 2j + 1 of the output o.
INLINE void unpack_int4(const char* packed, int64_t inputs, char* to) {
    for (int64_t j = 0; j < inputs / 8; j++) {
        fetch(packed + j * 128);
        for (int h = 0; h < 2; h++) {
            const auto both = load_as<u8x64>(packed + j * 128 + h * TILE_BYTES);
            const u8x64 low = (both & 15) - 8, high = (both >> 4) - 8;
            std::memcpy(to + j * 256 + h * TILE_BYTES, &low, sizeof low);
            std::memcpy(to + j * 256 + 128 + h * TILE_BYTES, &high, sizeof high);
        }
    }
}

// Inputs begin .. end - 1, which begin with a BLOCK, and whose codes are unpacked: each group's dot products are taken out
// and scaled, and then those of each BLOCK together.
template <int COUNT>
void add_part_int4(const Weight& w, int64_t index, const char* codes, int64_t begin, int64_t end,
                   const TileBlock<COUNT>& x, TileSums<COUNT, f32x16>& sums) {
    alignas(64) TileSums<COUNT, i32x16> dots;
    const int64_t groups = w.in / w.group, step = depth(w), blocks = blocks_a_row(w);
    for (int64_t start = begin; start < end; start += BLOCK) {
        TileSums<COUNT, f32x16> block = {};
        for (int64_t first = start; first < std::min(end, start + BLOCK); first += w.group) {
            zero_sums<COUNT>();
            for (int64_t at = first; at < first + w.group; at += step)
                add_products<true>(codes + (at - begin) * PANEL, x, at);
            store_sums<COUNT>(dots, 2 * TILE_BYTES);
            const f16* scales = (const f16*)w.scales + (index * groups + first / w.group) * PANEL;
            const f32x16 outputs[] = {load(scales), load(scales + LANES)};
            for (int t = 0; t < COUNT; t++)
                for (int r = 0; r < x.height; r++)
                    for (int h = 0; h < 2; h++)
                        block[t][r][h] =
                            fma(converted<f32x16>(dots[t][r][h]), outputs[h], block[t][r][h]);
        }
        add_scaled(block, x, blocks, start / BLOCK, sums);
    }
}

}  // namespace quire
