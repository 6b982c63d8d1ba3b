// Panels of a weight in int8 or int4 times rows, for linear.cpp, and rows of activations as int8 (see ops/quantized.py).
#pragma once

#include <algorithm>
#include <limits>

#include "weight.h"

namespace quire {

constexpr int32_t INT8_OFFSET = BYTES_ARE_SIGNED ? 0 : 128;
constexpr uint32_t SIGNS = INT8_OFFSET * 0x01010101u;
constexpr float TINY = 1e-36f;  // a block whose numbers are all below this counts as zeros

// int8 and int4: codes of the weight are unsigned (128 or 8 added) and those of activations signed, so each sum begins
// with minus 128 or 8 times that of the activations' codes: `starts` [group][row]. Where the machine's bytes are signed,
// nothing is added to those of int8. `scales` [BLOCK of inputs][row] are
// the activations'. Integers of a group (int8: block) are summed exactly, and then added in ascending order.
template <int ROWS>
INLINE void times_int8(const Weight& w, int64_t panel, const char* data, const uint32_t* x, const float* scales,
                       const int32_t* starts, Later later, Sums<ROWS>& sums) {
    const int64_t blocks = blocks_a_row(w);
    for (int64_t b = 0; b < blocks; b++) {
        i32x16 acc[ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = splat(starts[b * ROWS + r]);
        const int64_t end = std::min(w.in, (b + 1) * BLOCK);
        for (int64_t j = b * BLOCK; j < end; j += 4, data += 128, x += ROWS) {
            fetch(data), later.fetch();
            const u32x16 w0 = load_as<u32x16>(data) ^ SIGNS, w1 = load_as<u32x16>(data + 64) ^ SIGNS;
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const u32x16 quad = splat_word(x + r);
                acc[r][0] = dot4(acc[r][0], w0, quad);
                acc[r][1] = dot4(acc[r][1], w1, quad);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const f32x16 scale = splat(scales[b * ROWS + r]);
            sums[r][0] = fma(converted<f32x16>(acc[r][0]), scale, sums[r][0]);
            sums[r][1] = fma(converted<f32x16>(acc[r][1]), scale, sums[r][1]);
        }
    }
    const float* outputs = (const float*)w.scales + panel * PANEL;
    const f32x16 s0 = load(outputs), s1 = load(outputs + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r][0] *= s0, sums[r][1] *= s1;
}

template <int ROWS>
INLINE void times_int4(const Weight& w, int64_t panel, const char* data, const uint32_t* x, const float* scales,
                       const int32_t* starts, Later later, Sums<ROWS>& sums) {
    const int64_t groups = w.in / w.group, groups_a_block = BLOCK / w.group;
    const f16* group_scales = (const f16*)w.scales + panel * groups * PANEL;
    for (int64_t g = 0; g < groups; scales += ROWS) {
        f32x16 block[ROWS][2] = {};
        for (const int64_t end = std::min(groups, g + groups_a_block); g < end; g++, group_scales += PANEL) {
            i32x16 acc[ROWS][2];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = splat(*starts++);
            for (int64_t j = 0; j < w.group; j += 8, data += 128, x += 2 * ROWS) {
                fetch(data), later.fetch();
                const u32x16 b0 = load_as<u32x16>(data), b1 = load_as<u32x16>(data + 64);
                const u32x16 low0 = b0 & 0x0f0f0f0fu, low1 = b1 & 0x0f0f0f0fu;
                const u32x16 high0 = (b0 >> 4) & 0x0f0f0f0fu, high1 = (b1 >> 4) & 0x0f0f0f0fu;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const u32x16 first = splat_word(x + r), second = splat_word(x + ROWS + r);
                    acc[r][0] = dot4(dot4(acc[r][0], low0, first), high0, second);
                    acc[r][1] = dot4(dot4(acc[r][1], low1, first), high1, second);
                }
            }
            const f32x16 s0 = load(group_scales), s1 = load(group_scales + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                block[r][0] = fma(converted<f32x16>(acc[r][0]), s0, block[r][0]);
                block[r][1] = fma(converted<f32x16>(acc[r][1]), s1, block[r][1]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const f32x16 scale = splat(scales[r]);
            sums[r][0] = fma(block[r][0], scale, sums[r][0]);
            sums[r][1] = fma(block[r][1], scale, sums[r][1]);
        }
    }
}

// A BLOCK of a row as int8: number = code * scale. One that is not finite has the scale NaN, and so outputs of NaN.
struct BlockScale {
    float scale, inverse;
};

// The highest of the magnitudes' bits, whose order is that of the magnitudes; what is not finite has the highest.
template <class T>
INLINE int32_t highest_of(const T* x, int64_t count) {
    i32x16 top{};
    for (int64_t j = 0; j < count; j += LANES) top = max(top, bits_of<i32x16>(load_some(x + j, count - j)) & 0x7fffffff);
    return max_of(top);
}

// The same of bf16, 32 numbers at a time.
INLINE int32_t highest_of(const bf16* x, int64_t count) {
    if (count % 32) return highest_of<bf16>(x, count);
    i16x32 top{};
    for (int64_t j = 0; j < count; j += 32) {
        top = by_parts<int16_t, int16_t>(top, load_as<i16x32>(x + j) & 0x7fff, [](auto a, auto b) { return a < b ? b : a; });
    }
    const i32x16 both = bits_of<i32x16>(top);
    return max_of(max(both & (int32_t)0xffff0000, both << 16));
}

template <class T>
INLINE BlockScale scale_of(const T* x, int64_t count) {
    const int32_t highest = highest_of(x, count);
    if (highest >= 0x7f800000) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    const float largest = bits_of<float>(highest);
    return largest < TINY ? BlockScale{0.0f, 0.0f} : BlockScale{largest / 127.0f, 127.0f / largest};
}

// 16 codes, rounded half to even. Those of a block that is not finite are of no account, since its scale is NaN, and
// their sum may overflow.
INLINE i32x16 codes_of(f32x16 v, float inverse) {
    const f32x16 shifted = v * inverse + 12582912.0f;  // 1.5 * 2^23: the low bits hold the rounded integer
    return bits_of<i32x16>(shifted) - 0x4b400000;
}

// What is added to a weight's codes to make them unsigned, and the inputs that are summed apart.
struct Grouping {
    int32_t offset;
    int64_t group;
    explicit Grouping(const Weight& w) : offset(w.format == INT4 ? 8 : INT8_OFFSET), group(w.format == INT4 ? w.group : BLOCK) {}
};

// BLOCK numbers, or fewer, of one row to words of four codes each; their scale, and `starts`, if wanted. Words, and
// starts, lie `stride` apart.
template <class T>
void quantize(const T* x, int64_t count, uint32_t* to, int64_t stride, float* scale, Grouping how, int32_t* starts) {
    const BlockScale block = scale_of(x, count);
    *scale = block.scale;
    for (int64_t j = 0; j < count;) {
        u32x16 total{};
        for (const int64_t end = std::min(count, j + how.group); j < end; j += LANES) {
            const i32x16 codes = codes_of(load_some(x + j, count - j), block.inverse);
            const auto quads = bits_of<u32x4>(converted<i8x16>(codes));
            if (stride == 1 && j + LANES <= count) {
                std::memcpy(to, &quads, sizeof quads), to += 4;
            } else {
                for (int64_t i = 0; i < LANES / 4 && j + 4 * i < count; i++, to += stride) *to = quads[i];
            }
            total += bits_of<u32x16>(codes);
        }
        if (starts) *starts = -how.offset * (uint32_t)sum(bits_of<i32x16>(total)), starts += stride;
    }
}

// As that of four rows, which are `row` numbers apart, and whose words, scales and starts lie side by side.
template <class T>
void quantize_four(const T* x, int64_t row, int64_t count, uint32_t* to, int64_t stride, float* scales, Grouping how,
                   int32_t* starts) {
    float inverse[4];
    for (int r = 0; r < 4; r++) {
        const BlockScale block = scale_of(x + r * row, count);
        scales[r] = block.scale, inverse[r] = block.inverse;
    }
    struct words {
        u32x4 of[4];  // [four inputs][row]
    };
    for (int64_t j = 0; j < count; starts += stride) {
        i32x16 totals{};
        for (const int64_t end = std::min(count, j + how.group); j < end; j += LANES) {
            i32x16 codes[4];
            for (int r = 0; r < 4; r++) codes[r] = codes_of(load_some(x + r * row + j, count - j), inverse[r]);
            const u32x16 quads = quads_of(codes[0], codes[1], codes[2], codes[3]);
            totals = dot4(totals, splat(0x01010101u), quads);
            const auto parts = bits_of<words>(quads);
            const int64_t some = std::min<int64_t>(4, (count - j + 3) / 4);
            if (some == 4) {
                for (int i = 0; i < 4; i++) std::memcpy(to + i * stride, &parts.of[i], 16);
            } else {
                for (int64_t i = 0; i < some; i++) std::memcpy(to + i * stride, &parts.of[i], 16);
            }
            to += some * stride;
        }
        const auto parts = bits_of<words>(totals);
        const u32x4 total = (parts.of[0] + parts.of[1] + parts.of[2] + parts.of[3]) * (uint32_t)-how.offset;
        std::memcpy(starts, &total, sizeof total);
    }
}

// The same of n rows.
template <class T>
void quantize_rows(const T* x, int64_t row, int64_t count, int64_t n, uint32_t* to, float* scales, Grouping how,
                   int32_t* starts) {
    for (int64_t r = 0; r < n && n < 4; r++) quantize(x + r * row, count, to + r, n, scales + r, how, starts + r);
    for (int64_t four = 0; four < n && n >= 4; four += 4) {
        const int64_t r = std::min(four, n - 4);  // the last four share rows with those before
        quantize_four(x + r * row, row, count, to + r, n, scales + r, how, starts + r);
    }
}

}  // namespace quire
