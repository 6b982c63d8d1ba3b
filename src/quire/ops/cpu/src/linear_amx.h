// Panels of a weight times rows in tile registers (see amx.h): bf16, and the codes of linear_amx_coded.h, for linear.cpp.
//
// Rows of activations are cut into tiles, and lie as tile registers take them: bf16 as they are, quantized ones as signed
// bytes, zeros up to a whole number of 64 bytes. Two tiles of rows at a time meet the two halves of a panel's outputs: four
// tiles of sums. What a row's sum is made of, and in which order, does not depend on the other rows of its tile. In bf16
// the sum of each 32 inputs is made apart and then added, so the bits are not those of other instruction sets; those of
// quantized products are.
//
// Many rows are multiplied in strips whose activations stay in the second-level cache while panels come by, for which codes
// of less than 8 bits are unpacked once. Where rows are long, panels take turns, a part of each; sums wait in memory meanwhile, which does not
// change bits. benchmarks/amx_counts.py counts what comes from which cache.
#pragma once

#include <algorithm>
#include <limits>

#include "amx.h"
#include "weight.h"

namespace quire {

constexpr int64_t STEP = 2 * TILE_ROWS * TILE_BYTES;  // bytes of a panel that 64 bytes of activations meet, unpacked

// Rows cut into tiles of one height, as few as there can be. What the last one has behind the last row is computed, and
// looked at by no one.
struct RowTiles {
    int64_t rows, count, height;
    explicit RowTiles(int64_t rows)
        : rows(rows), count((rows + TILE_ROWS - 1) / TILE_ROWS), height((rows + count - 1) / count) {}
    int64_t begin(int64_t tile) const { return tile * height; }
    int64_t rows_of(int64_t tile) const { return std::min(height, rows - begin(tile)); }
    int64_t places() const { return count * height; }
};

// Bytes of a row's activations.
inline int64_t tiled_row_bytes(const Weight& w) {
    return round_up(w.format == DENSE_BF16 ? 2 * w.in : w.in, TILE_BYTES);
}

// Where byte `at` of a tile's first row lies: 64 bytes of a row are followed by those of the next one.
INLINE int64_t in_tile(int64_t at, int64_t height) { return at / TILE_BYTES * TILE_BYTES * height + at % TILE_BYTES; }

// One or two neighbouring tiles of rows: their activations, and, of quantized ones, what linear.cpp's `Activations` have
// beside these, row by row.
template <int COUNT>
struct TileBlock {
    const char* rows[COUNT];
    const float *scales[COUNT], *totals[COUNT];
    int64_t height;
};

// Their sums [row tile][row][half of the outputs].
template <int COUNT, class V>
using TileSums = V[COUNT][TILE_ROWS][2];

// Blocks of a strip, at most; bytes of activations that it keeps in the second-level cache, a quarter of that, since two
// threads may share it; panels that take turns at a strip that has more, a part of each; and the sums that wait meanwhile,
// of a block and a panel each.
constexpr int64_t STRIP = 8, HELD = 1 << 19, PANELS_AT_ONCE = 8, WAITING = 32;

// Bytes of a row's activations that a part of a panel meets: those of a strip's rows are HELD. Smaller parts would stay in
// the first-level cache, but the sums would come and go for each: by count, that is more. Codes are unpacked in smaller ones;
// where there is but one block, nothing else is there to be used again.
constexpr int64_t PART = HELD / (WAITING / PANELS_AT_ONCE * 2 * TILE_ROWS), UNPACKED = 1024;
inline bool is_packed(const Weight& w) { return w.format == INT4 || w.format == INT6; }
inline int64_t part_bytes(const Weight& w, int64_t blocks) {
    if (is_packed(w)) return blocks > 1 ? UNPACKED : BLOCK;
    return blocks > 1 ? PART : std::numeric_limits<int64_t>::max();
}

inline int64_t block_bytes(const Weight& w) { return 2 * TILE_ROWS * tiled_row_bytes(w); }
inline int64_t strip_blocks(const Weight& w) {
    return std::clamp(HELD / block_bytes(w), WAITING / PANELS_AT_ONCE, STRIP);
}

// Bytes of a panel that 64 bytes of activations meet, as it lies in memory.
inline int64_t stored_step(const Weight& w) {
    return w.format == INT4 ? STEP / 2 : w.format == INT6 ? STEP / 4 * 3 : STEP;
}

// Bytes of activations that are multiplied at a time: a tile's, or those of a segment that is smaller.
inline int64_t depth(const Weight& w) {
    return has_codes(w) ? std::min<int64_t>(w.segment, TILE_BYTES) : TILE_BYTES;
}

inline TileShapes tile_shapes(const Weight& w, int64_t height) { return product_shapes((int)height, (int)depth(w)); }

// What is read soon, and asked for while activations are multiplied: of the `each` bytes for 64 bytes of them, those from
// `first` to `last`, so that a strip's blocks share the rest. Where there is but one block, `at` is of the panel itself,
// which memory sends all the time.
struct Soon {
    const char* at;
    int64_t each, first, last;
    bool once;

    void fetch(int64_t byte) const {
        for (const char *p = at + byte / TILE_BYTES * each + first, *end = p + last - first; p < end; p += TILE_BYTES)
            once ? __builtin_prefetch(p) : __builtin_prefetch(p, 0, 2);
    }
};

// Adds the products of what lies at `panel` with the activations from byte `at` of each row.
template <bool QUADS, int COUNT>
INLINE void add_products(const char* panel, const TileBlock<COUNT>& x, int64_t at) {
    load_tile<half_tile(0)>(panel, 2 * TILE_BYTES);
    load_tile<half_tile(1)>(panel + TILE_BYTES, 2 * TILE_BYTES);
    add_tile<QUADS, 0>(x.rows[0] + in_tile(at, x.height), TILE_BYTES);
    if constexpr (COUNT == 2) add_tile<QUADS, 1>(x.rows[1] + in_tile(at, x.height), TILE_BYTES);
}

// Bytes begin .. end - 1 of bf16 activations, of which the first meet what lies at `part`. Where a panel ends within a
// tile, zeros complete it.
template <int COUNT>
void add_part_bf16(const Weight& w, const char* part, int64_t begin, int64_t end, const TileBlock<COUNT>& x,
                   const Soon& soon, TileSums<COUNT, f32x16>& sums) {
    const int64_t whole = std::min(end, w.in / 32 * TILE_BYTES);
    if (begin)
        load_sums<COUNT>(sums, 2 * TILE_BYTES);
    else
        zero_sums<COUNT>();
    for (int64_t at = begin; at < whole; at += TILE_BYTES) {
        soon.fetch(at);
        add_products<false>(part + (at - begin) * PANEL, x, at);
    }
    if (whole < end) {
        alignas(64) char last[STEP] = {};
        std::memcpy(last, part + (whole - begin) * PANEL, (w.in % 32 + 1) / 2 * 4 * PANEL);
        add_products<false>(last, x, whole);
    }
    store_sums<COUNT>(sums, 2 * TILE_BYTES);
}

}  // namespace quire
