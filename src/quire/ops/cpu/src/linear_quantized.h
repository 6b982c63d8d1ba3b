// Rows of activations as int8 (see ops/activations.py), for linear.cpp.
#pragma once

#include <algorithm>
#include <limits>

#include "weight.h"

namespace quire {

constexpr int32_t INT8_OFFSET = BYTES_ARE_SIGNED ? 0 : 128;
constexpr uint32_t SIGNS = INT8_OFFSET * 0x01010101u;
constexpr float TINY = 1e-36f;  // a block whose numbers are all below this counts as zeros

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

// Where a row's quantized numbers go: words of four codes each, scales, and for each `segment` what sums of products begin
// with where the weight's numbers are `raised` by so much (see linear_coded.h); null: not wanted. `totals`: minus the sums of
// the segments' codes; null: not wanted. Each of them lies `stride` after the one before.
struct Codes {
    int64_t segment, stride;
    int32_t raised;
    uint32_t* words;
    int32_t* starts;
    float* totals;
};

// BLOCK numbers, or fewer, of one row.
template <class T>
void quantize(const T* x, int64_t count, BlockScale scale, Codes to) {
    for (int64_t j = 0; j < count;) {
        u32x16 total{};
        for (const int64_t end = std::min(count, j + to.segment); j < end; j += LANES) {
            const i32x16 codes = codes_of(load_some(x + j, count - j), scale.inverse);
            const auto quads = bits_of<u32x4>(converted<i8x16>(codes));
            if (to.stride == 1 && j + LANES <= count) {
                std::memcpy(to.words, &quads, sizeof quads), to.words += 4;
            } else {
                for (int64_t i = 0; i < LANES / 4 && j + 4 * i < count; i++, to.words += to.stride) *to.words = quads[i];
            }
            total += bits_of<u32x16>(codes);
        }
        if (!to.starts && !to.totals) continue;
        const int32_t all = sum(bits_of<i32x16>(total));
        if (to.starts) *to.starts = (int32_t)(-(uint32_t)to.raised * (uint32_t)all), to.starts += to.stride;
        if (to.totals) *to.totals = -(float)all, to.totals += to.stride;
    }
}

// As that of four rows, which are `row` numbers apart, and whose words, starts and totals lie side by side.
template <class T>
void quantize_four(const T* x, int64_t row, int64_t count, const BlockScale* scales, Codes to) {
    struct words {
        u32x4 of[4];  // [four inputs][row]
    };
    for (int64_t j = 0; j < count; to.starts += to.stride) {
        i32x16 totals{};
        for (const int64_t end = std::min(count, j + to.segment); j < end; j += LANES) {
            i32x16 codes[4];
            for (int r = 0; r < 4; r++) codes[r] = codes_of(load_some(x + r * row + j, count - j), scales[r].inverse);
            const u32x16 quads = quads_of(codes[0], codes[1], codes[2], codes[3]);
            totals = dot4(totals, splat(0x01010101u), quads);
            const auto parts = bits_of<words>(quads);
            const int64_t some = std::min<int64_t>(4, (count - j + 3) / 4);
            if (some == 4) {
                for (int i = 0; i < 4; i++) std::memcpy(to.words + i * to.stride, &parts.of[i], 16);
            } else {
                for (int64_t i = 0; i < some; i++) std::memcpy(to.words + i * to.stride, &parts.of[i], 16);
            }
            to.words += some * to.stride;
        }
        const auto parts = bits_of<words>(totals);
        const u32x4 all = parts.of[0] + parts.of[1] + parts.of[2] + parts.of[3], starts = all * (uint32_t)-to.raised;
        std::memcpy(to.starts, &starts, sizeof starts);
        for (int r = 0; to.totals && r < 4; r++) to.totals[r] = -(float)(int32_t)all[r];
        if (to.totals) to.totals += to.stride;
    }
}

// The same of n rows.
template <class T>
void quantize_rows(const T* x, int64_t row, int64_t count, int64_t n, const BlockScale* scales, Codes to) {
    auto from = [&](int64_t r) {
        return Codes{to.segment, to.stride, to.raised, to.words + r, to.starts + r, to.totals ? to.totals + r : nullptr};
    };
    for (int64_t r = 0; r < n && n < 4; r++) quantize(x + r * row, count, scales[r], from(r));
    for (int64_t four = 0; four < n && n >= 4; four += 4) {
        const int64_t r = std::min(four, n - 4);  // the last four share rows with those before
        quantize_four(x + r * row, row, count, scales + r, from(r));
    }
}

}  // namespace quire
