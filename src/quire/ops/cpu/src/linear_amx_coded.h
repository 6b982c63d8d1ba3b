// Panels of a weight in codes times rows in tile registers, for linear.cpp: the bits are those of linear_coded.h.
//
// Tile registers multiply signed bytes, so codes are unpacked to what they stand for, and sums begin with zeros. Those of a
// segment are whole numbers; they are taken out, and scaled in vectors. A segment of less than 64 inputs fills a part of a
// tile: such a product takes as long as that of a whole tile, but even with 16 inputs it does twice as much in a cycle as two
// products of vectors.
#pragma once

#include "linear_amx.h"
#include "linear_coded.h"

namespace quire {

// A row of activations to `at`, its place in a tile of so many rows; its scales, and `totals` (see `Activations`) where there
// are offsets.
template <class T>
void quantize_tiled(const Weight& w, const T* x, int64_t height, char* at, float* scales, float* totals) {
    const BlockScale of_row = w.whole_rows ? scale_of(x, w.in) : BlockScale{};
    for (int64_t first = 0; first < w.in; first += w.shared) {
        const int64_t count = std::min<int64_t>(w.shared, w.in - first), whole = round_up(count, depth(w));
        const BlockScale scale = w.whole_rows ? of_row : scale_of(x + first, count);
        alignas(64) char codes[BLOCK];
        if (count < whole) std::memset(codes, 0, sizeof codes);
        quantize(x + first, count, scale, Codes{w.segment, 1, 0, (uint32_t*)codes, nullptr, totals});
        for (int64_t i = 0; i < whole; i += 16) std::memcpy(at + in_tile(first + i, height), codes + i, 16);
        *scales++ = scale.scale;
        for (int64_t i = 0; totals && i < count; i += w.segment, totals++)
            if (w.shared < BLOCK) *totals *= scale.scale;
    }
}

// Codes of `inputs` inputs to the numbers that they stand for, as those of 8 bits lie.
template <Format FORMAT>
void unpack_as(const Weight& w, const char* packed, int64_t inputs, char* to) {
    using Each = Quads<FORMAT>;
    const Table table(w.table, 0);
    const auto raised = bits_of<u8x64>(splat(FORMAT == INT6 ? (uint32_t)w.raised * 0x01010101u : 0u));
    for (int64_t j = 0; j < inputs; j += 4 * Each::COUNT, packed += 128 * Each::LINES) {
        for (int line = 0; line < Each::LINES; line++) fetch(packed + 128 * line);
        for (int half = 0; half < 2; half++) {
            const Each quads(table, packed + half * TILE_BYTES);
#pragma GCC unroll 4
            for (int q = 0; q < Each::COUNT; q++) {
                const u8x64 numbers = bits_of<u8x64>(quads.of[q]) - raised;
                std::memcpy(to + (j / 4 + q) * 128 + half * TILE_BYTES, &numbers, sizeof numbers);
            }
        }
    }
}

inline void unpack(const Weight& w, const char* packed, int64_t inputs, char* to) {
    w.format == INT4 ? unpack_as<INT4>(w, packed, inputs, to) : unpack_as<INT6>(w, packed, inputs, to);
}

// How a product's sums of segments are scaled: by the row's scale alone, which is all that there is; by the group's, and
// those of a BLOCK by the row's; or by both, since each segment has a scale of the row's.
enum Scaling { BY_ROWS, BY_BLOCKS, BY_SEGMENTS };

// Segments whose sums are taken out before they are scaled. All of a BLOCK's would not stay in the first-level cache.
constexpr int64_t TAKEN = 4;

// What is done with some segments' sums, `dots` [segment]: the first of them is `index` in the row, `within` in its BLOCK, and
// `last` are the BLOCK's last.
template <int COUNT>
struct Taken {
    const TileSums<COUNT, i32x16>* dots;
    int64_t count, index, within;
    bool last;
};

// Adds them to `sums`, or, until a BLOCK is complete, to `blocks`.
template <Scaling HOW, bool OFFSETS, int64_t SOME, int COUNT>
void add_scaled(const Weight& w, const Taken<COUNT>& taken, const BlockNumbers& numbers, const TileBlock<COUNT>& x,
                TileSums<COUNT, f32x16>& blocks, TileSums<COUNT, f32x16>& sums) {
    const int64_t count = SOME ? SOME : taken.count, of_row = scales_a_row(w), all = segments_a_row(w);
    const int64_t first = taken.index * w.segment / w.shared;
    auto& to = HOW == BY_SEGMENTS ? sums : blocks;
    for (int t = 0; t < COUNT; t++)
        for (int64_t r = 0; r < x.height; r++) {
            const float* const scales = x.scales[t] + r * of_row + first;
            const float* const totals = OFFSETS ? x.totals[t] + r * all + taken.index : nullptr;
            for (int h = 0; h < 2; h++) {
                f32x16 value = HOW != BY_SEGMENTS && !taken.within ? f32x16{} : to[t][r][h];
                for (int64_t s = 0; s < count; s++) {
                    f32x16 dot = converted<f32x16>(taken.dots[s][t][r][h]);
                    if (HOW == BY_SEGMENTS) dot *= splat(scales[s]);
                    value = HOW == BY_ROWS ? dot : fma(dot, numbers.scales[taken.within + s][h], value);
                    if (OFFSETS) value = fma(splat(totals[s]), numbers.offsets[taken.within + s][h], value);
                }
                if (HOW == BY_SEGMENTS || !taken.last)
                    to[t][r][h] = value;
                else
                    sums[t][r][h] = fma(value, splat(*scales), sums[t][r][h]);
            }
        }
}

template <int COUNT>
using AddScaled = void (*)(const Weight&, const Taken<COUNT>&, const BlockNumbers&, const TileBlock<COUNT>&,
                           TileSums<COUNT, f32x16>&, TileSums<COUNT, f32x16>&);

// For `SOME` segments at a time; 0: any number of them.
template <int64_t SOME, int COUNT>
AddScaled<COUNT> scaling_of(const Weight& w) {
    if (!w.scales.at) return add_scaled<BY_ROWS, false, SOME, COUNT>;
    if (w.shared < BLOCK)
        return w.offsets.at ? add_scaled<BY_SEGMENTS, true, SOME, COUNT> : add_scaled<BY_SEGMENTS, false, SOME, COUNT>;
    return w.offsets.at ? add_scaled<BY_BLOCKS, true, SOME, COUNT> : add_scaled<BY_BLOCKS, false, SOME, COUNT>;
}

// Inputs begin .. end - 1 of quantized activations, which begin with a BLOCK, and of which the first meet the numbers at
// `part`.
template <int COUNT>
void add_part_coded(const Weight& w, int64_t panel, const char* part, int64_t begin, int64_t end,
                    const TileBlock<COUNT>& x, const Soon& soon, TileSums<COUNT, f32x16>& sums) {
    alignas(64) TileSums<COUNT, i32x16> dots[TAKEN];
    alignas(64) TileSums<COUNT, f32x16> blocks;
    BlockNumbers numbers;
    const int64_t segment = w.segment, step = depth(w), all = segments_a_row(w), of_block = BLOCK / segment;
    const AddScaled<COUNT> add_all = scaling_of<TAKEN, COUNT>(w), add_some = scaling_of<0, COUNT>(w);
    if (!begin) std::memset(sums, 0, sizeof sums);
    int64_t at = begin;
    for (int64_t index = begin / segment, some; at < end; index += some) {
        const int64_t within = index % of_block, left = std::min(of_block - within, all - index);
        some = std::min(TAKEN, left);
        if (!within && w.scales.at) block_numbers(w, panel, index / of_block, numbers);
        for (int64_t s = 0; s < some; s++) {
            zero_sums<COUNT>();
            for (const int64_t behind = std::min(end, at + segment); at < behind; at += step) {
                if (at % TILE_BYTES == 0) soon.fetch(at);
                add_products<true>(part + (at - begin) * PANEL, x, at);
            }
            store_sums<COUNT>(dots[s], 2 * TILE_BYTES);
        }
        const Taken<COUNT> taken{dots, some, index, within, some == left};
        (some == TAKEN ? add_all : add_some)(w, taken, numbers, x, blocks, sums);
    }
}

template <int COUNT>
void scale_outputs(const Weight& w, int64_t panel, int64_t height, TileSums<COUNT, f32x16>& sums) {
    const float* factors = w.factors + panel * PANEL;
    for (int t = 0; t < COUNT; t++)
        for (int64_t r = 0; r < height; r++)
            for (int h = 0; h < 2; h++) sums[t][r][h] *= load(factors + h * LANES);
}

}  // namespace quire
