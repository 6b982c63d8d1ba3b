// Panels of a weight in codes of 8, 6 or 4 bits times rows of activations in int8, for linear.cpp. What the codes stand for,
// and what they are scaled with, is in ops/coded.py.
//
// Both factors of a dot product are bytes. What a code stands for is made unsigned (INT8_OFFSET added) where the machine
// wants that, so each sum begins with minus so many times that of the activations' codes: `starts`. Numbers that fit 6 bits
// lie in so many. Whole numbers of a segment are summed exactly; what follows has one order on every machine.
#pragma once

#include "linear_quantized.h"

namespace quire {

constexpr int SEGMENTS = BLOCK / 16;  // of a BLOCK, at most

// What the segments of a BLOCK of inputs of a panel are scaled with, each half of the outputs by itself.
struct BlockNumbers {
    f32x16 scales[SEGMENTS][2], offsets[SEGMENTS][2];
};

// What numbers are multiplied by: `step` halves further for each segment (0: all by the same). Null: by nothing.
struct Units {
    const f32x16* at;
    int step;
};

template <class T>
INLINE f32x16 load_number(const T* p) {
    if constexpr (sizeof(T) > 1)
        return load(p);
    else {
        const auto number = bits_of<i32x16>(widened(load_as<u8x16>(p)));
        return converted<f32x16>(std::is_signed_v<T> ? (number << 24) >> 24 : number);
    }
}

// The numbers of a panel's segments first .. first + count - 1.
template <class T>
void numbers_as(const Weight& w, const Numbers& from, int64_t panel, int32_t first, int32_t count, Units units,
                f32x16 (*to)[2]) {
    const int32_t input = first * w.segment, group = input / from.each;
    const T* at = (const T*)from.at + (panel * from.count + group) * PANEL;
    auto load_all = [&](auto product) __attribute__((always_inline)) {
        int32_t left = from.each - (input - group * from.each);
        for (int32_t s = 0; s < count; s++, units.at += units.step) {
            to[s][0] = product(load_number(at), 0), to[s][1] = product(load_number(at + LANES), 1);
            if ((left -= w.segment) == 0) at += PANEL, left = from.each;
        }
    };
    if (units.at)
        load_all([&](f32x16 number, int half) __attribute__((always_inline)) { return number * units.at[half]; });
    else
        load_all([](f32x16 number, int) __attribute__((always_inline)) { return number; });
}

__attribute__((noinline)) inline void numbers_of(const Weight& w, const Numbers& from, int64_t panel, int32_t first,
                                                 int32_t count, Units units, f32x16 (*to)[2]) {
    switch (from.type) {
        case F32: return numbers_as<float>(w, from, panel, first, count, units, to);
        case BF16: return numbers_as<bf16>(w, from, panel, first, count, units, to);
        case F16: return numbers_as<f16>(w, from, panel, first, count, units, to);
        case U8: return numbers_as<uint8_t>(w, from, panel, first, count, units, to);
        case I8: return numbers_as<int8_t>(w, from, panel, first, count, units, to);
    }
}

// Those of a BLOCK. They are made for all of its segments at once, in memory, for all rows: so nothing of a scheme is in
// the loops over these but a load.
__attribute__((noinline)) inline void block_numbers(const Weight& w, int64_t panel, int64_t block, BlockNumbers& to) {
    const int32_t segments = (int32_t)BLOCK / w.segment, first = (int32_t)block * segments;
    const int32_t count = std::min(segments, (int32_t)(w.in - block * BLOCK) / w.segment);
    f32x16 units[SEGMENTS][2];
    auto of_blocks = [&](const Numbers& from) {
        if (!from.at) return Units{nullptr, 0};
        const bool one = from.each % BLOCK == 0;
        numbers_of(w, from, panel, first, one ? 1 : count, {nullptr, 0}, units);
        return Units{units[0], one ? 0 : 2};
    };
    numbers_of(w, w.scales, panel, first, count, of_blocks(w.block_scales), to.scales);
    if (!w.offsets.at) return;
    const bool steps = !w.block_offsets.at && (w.offsets.type == U8 || w.offsets.type == I8);  // of scales
    numbers_of(w, w.offsets, panel, first, count, steps ? Units{to.scales[0], 2} : of_blocks(w.block_offsets), to.offsets);
}

#define QUIRE_ALWAYS inline __attribute__((always_inline))

// What a segment is scaled with, each half of the outputs by itself.
struct SegmentNumbers {
    f32x16 scales[2], offsets[2];
};

// Of a weight whose groups are segments, with units that are the same in a BLOCK: a segment's are made when they are wanted,
// which takes less time than to make all in memory.
struct TwoLevels {
    const uint8_t *scales, *offsets;
    bool is_signed;
    f32x16 units[2], offset_units[2];

    static bool fit(const Weight& w) {
        return w.block_scales.at && w.block_scales.each % BLOCK == 0 && w.scales.each == w.segment &&
               (!w.offsets.at || w.offsets.type == w.scales.type);
    }

    QUIRE_ALWAYS void begin(const Weight& w, int64_t panel, int64_t block) {
        const int32_t first = (int32_t)(block * BLOCK / w.segment);
        const int64_t at = (panel * w.scales.count + first) * PANEL;
        is_signed = w.scales.type == I8;
        scales = (const uint8_t*)w.scales.at + at, offsets = (const uint8_t*)w.offsets.at + at;
        numbers_of(w, w.block_scales, panel, first, 1, {nullptr, 0}, &units);
        if (w.offsets.at) numbers_of(w, w.block_offsets, panel, first, 1, {nullptr, 0}, &offset_units);
    }

    QUIRE_ALWAYS f32x16 number(const uint8_t* at) const {
        return is_signed ? load_number((const int8_t*)at) : load_number(at);
    }

    QUIRE_ALWAYS void next(bool with_offsets, SegmentNumbers& to) {
        for (int h = 0; h < 2; h++) to.scales[h] = number(scales + h * LANES) * units[h];
        scales += PANEL;
        if (!with_offsets) return;
        for (int h = 0; h < 2; h++) to.offsets[h] = number(offsets + h * LANES) * offset_units[h];
        offsets += PANEL;
    }
};

// What codes of 4 bits stand for, `raised` added, by the lower and by the upper halves of bytes.
struct Table {
#if defined(__AVX512BW__)
    __m512i of;
    explicit Table(const int8_t* numbers, int32_t raised = INT8_OFFSET) {
        of = _mm512_maskz_broadcast_i32x4(ALL, _mm_add_epi8(load_as<__m128i>(numbers), _mm_set1_epi8((char)raised)));
    }
#if defined(__AVX512VBMI__)
    // It stands there four times: so an index's bits above the fourth may be anything.
    QUIRE_ALWAYS u32x16 low(u32x16 codes) const { return (u32x16)_mm512_maskz_permutexvar_epi8(~0ull, (__m512i)codes, of); }
    QUIRE_ALWAYS u32x16 high(u32x16 codes) const { return low(codes >> 4); }
#else
    QUIRE_ALWAYS u32x16 low(u32x16 codes) const { return (u32x16)_mm512_shuffle_epi8(of, (__m512i)(codes & 0x0f0f0f0fu)); }
    QUIRE_ALWAYS u32x16 high(u32x16 codes) const { return low(codes >> 4); }
#endif
#elif defined(__AVX2__)
    __m256i of;
    explicit Table(const int8_t* numbers, int32_t raised = INT8_OFFSET) {
        of = _mm256_broadcastsi128_si256(_mm_add_epi8(load_as<__m128i>(numbers), _mm_set1_epi8((char)raised)));
    }
    QUIRE_ALWAYS u32x16 low(u32x16 codes) const {
        auto parts = bits_of<Parts<uint32_t>>(codes & 0x0f0f0f0fu);
        for (auto& part : parts.part) part = (Parts<uint32_t>::Part)_mm256_shuffle_epi8(of, (__m256i)part);
        return bits_of<u32x16>(parts);
    }
    QUIRE_ALWAYS u32x16 high(u32x16 codes) const { return low(codes >> 4); }
#elif defined(__aarch64__)
    uint8x16_t of;
    explicit Table(const int8_t* numbers, int32_t = INT8_OFFSET) : of(load_as<uint8x16_t>(numbers)) {}
    QUIRE_ALWAYS u32x16 low(u32x16 codes) const {
        for (auto& part : codes.part) part = (u32x4)vqtbl1q_u8(of, vandq_u8((uint8x16_t)part, vdupq_n_u8(15)));
        return codes;
    }
    QUIRE_ALWAYS u32x16 high(u32x16 codes) const {
        for (auto& part : codes.part) part = (u32x4)vqtbl1q_u8(of, vshrq_n_u8((uint8x16_t)part, 4));
        return codes;
    }
#else
    uint8_t of[16];
    bool line = true;  // each is one more than that before
    explicit Table(const int8_t* numbers, int32_t raised = INT8_OFFSET) {
        for (int i = 0; i < 16; i++) of[i] = (uint8_t)(numbers[i] + raised), line = line && of[i] == of[0] + i;
    }
    QUIRE_ALWAYS u32x16 low(u32x16 codes) const {
        codes = codes & 0x0f0f0f0fu;
        if (line) return codes + of[0] * 0x01010101u;
        auto bytes = bits_of<u8x64>(codes);
        for (int i = 0; i < 64; i++) bytes[i] = of[bytes[i]];
        return bits_of<u32x16>(bytes);
    }
    QUIRE_ALWAYS u32x16 high(u32x16 codes) const { return low(codes >> 4); }
#endif
};

// The numbers of rows for which there are groups: the sums of a segment, and of a block of them, are kept apart.
#if defined(__AVX512F__)
constexpr int MAX_ROWS_IN_GROUPS = 8;
#else
constexpr int MAX_ROWS_IN_GROUPS = 4;
#endif

template <int ROWS>
using WholeSums = i32x16[ROWS][2];

// Four inputs' numbers of 16 outputs each, as bytes: those of 8 bits as they lie, those of 4 bits as they are looked up.
// Those of 6 bits come in 16 inputs at a time: the lower four bits of two times eight, as those of 4 bits lie, and the upper
// two of all, four inputs' in each byte.
template <Format FORMAT>
struct Quads {
    static constexpr int COUNT = FORMAT == INT8 ? 1 : FORMAT == INT4 ? 2 : 4, LINES = FORMAT == INT6 ? 3 : 1;
    u32x16 of[COUNT];

    QUIRE_ALWAYS Quads(const Table& table, const char* data) {
        const auto codes = load_as<u32x16>(data);
        if constexpr (FORMAT == INT8) of[0] = codes ^ SIGNS;
        if constexpr (FORMAT == INT4) of[0] = table.low(codes), of[1] = table.high(codes);
        if constexpr (FORMAT == INT6) {
            const auto more = load_as<u32x16>(data + 128), upper = load_as<u32x16>(data + 256);
            constexpr uint32_t LOWER = 0x0f0f0f0fu, UPPER = 0x30303030u;
            of[0] = (codes & LOWER) | ((upper << 4) & UPPER);
            of[1] = ((codes >> 4) & LOWER) | ((upper << 2) & UPPER);
            of[2] = (more & LOWER) | (upper & UPPER);
            of[3] = ((more >> 4) & LOWER) | ((upper >> 2) & UPPER);
        }
    }
};

// sums += the products of `inputs` inputs.
template <Format FORMAT, int ROWS>
INLINE void add_dots(const Table& table, const char*& data, const uint32_t*& x, int64_t inputs, Later& later,
                     WholeSums<ROWS>& sums) {
    using Each = Quads<FORMAT>;
    for (int64_t j = 0; j < inputs; j += 4 * Each::COUNT, data += 128 * Each::LINES, x += Each::COUNT * ROWS) {
        for (int line = 0; line < Each::LINES; line++) fetch(data + 128 * line), later.fetch();
        const Each first(table, data), second(table, data + 64);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
            for (int q = 0; q < Each::COUNT; q++) {
                const u32x16 quad = splat_word(x + q * ROWS + r);
                sums[r][0] = dot4(sums[r][0], first.of[q], quad);
                sums[r][1] = dot4(sums[r][1], second.of[q], quad);
            }
        }
    }
}

// sums += the offsets of a segment times its totals, a row each.
template <int ROWS>
INLINE void add_offsets(const f32x16 (&offsets)[2], const float*& totals, Sums<ROWS>& sums) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const f32x16 total = bits_of<f32x16>(splat_word(totals++));
        sums[r][0] = fma(total, offsets[0], sums[r][0]);
        sums[r][1] = fma(total, offsets[1], sums[r][1]);
    }
}

// `starts` and `totals` (minus the sums of the activations' codes, where there are offsets) [segment][row], `scales`
// [BLOCK][row] are the activations'. Where a segment has a scale of its own, `totals` are times that, and there is no sum
// of a BLOCK.
template <Format FORMAT, int ROWS>
INLINE void times_codes(const Weight& w, int64_t panel, const char* data, const uint32_t* x, const float* scales,
                        const int32_t* starts, const float* totals, Later later, Sums<ROWS>& sums) {
    constexpr bool IN_GROUPS = ROWS <= MAX_ROWS_IN_GROUPS;
    const Table table(w.table);
    BlockNumbers numbers;
    TwoLevels levels;
    const bool two_levels = IN_GROUPS && TwoLevels::fit(w);
    auto of_segment = [&](int64_t s, SegmentNumbers& to) __attribute__((always_inline)) {
        if (two_levels) return levels.next(w.offsets.at, to);
        for (int h = 0; h < 2; h++) to.scales[h] = numbers.scales[s][h], to.offsets[h] = numbers.offsets[s][h];
    };
    if constexpr (IN_GROUPS && FORMAT != INT8)
        for (auto& half : numbers.scales[0]) half = splat(1.0f);  // where there are no groups
    for (int64_t first = 0; first < w.in; first += BLOCK) {
        const int64_t inputs = std::min(BLOCK, w.in - first);
        WholeSums<ROWS> whole;
        auto add_segment = [&](int64_t count) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) whole[r][0] = whole[r][1] = splat(*starts++);
            add_dots<FORMAT, ROWS>(table, data, x, count, later, whole);
        };
        if (FORMAT == INT8 && (!IN_GROUPS || !w.scales.at)) {
            add_segment(inputs);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const f32x16 scale = splat(*scales++);
                sums[r][0] = fma(converted<f32x16>(whole[r][0]), scale, sums[r][0]);
                sums[r][1] = fma(converted<f32x16>(whole[r][1]), scale, sums[r][1]);
            }
        } else if constexpr (IN_GROUPS) {
            if (two_levels)
                levels.begin(w, panel, first / BLOCK);
            else if (w.scales.at)
                block_numbers(w, panel, first / BLOCK, numbers);
            SegmentNumbers own;
            if (w.shared < BLOCK) {
                for (int64_t begin = 0, s = 0; begin < inputs; begin += w.segment, s++) {
                    add_segment(std::min<int64_t>(w.segment, inputs - begin));
                    of_segment(s, own);
                const f32x16 s0 = own.scales[0], s1 = own.scales[1];
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) {
                        const f32x16 scale = splat(*scales++);
                        sums[r][0] = fma(converted<f32x16>(whole[r][0]) * scale, s0, sums[r][0]);
                        sums[r][1] = fma(converted<f32x16>(whole[r][1]) * scale, s1, sums[r][1]);
                    }
                    if (w.offsets.at) add_offsets<ROWS>(own.offsets, totals, sums);
                }
                continue;
            }
            f32x16 block[ROWS][2] = {};
            for (int64_t begin = 0, s = 0; begin < inputs; begin += w.segment, s++) {
                add_segment(std::min<int64_t>(w.segment, inputs - begin));
                of_segment(s, own);
                const f32x16 s0 = own.scales[0], s1 = own.scales[1];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    block[r][0] = fma(converted<f32x16>(whole[r][0]), s0, block[r][0]);
                    block[r][1] = fma(converted<f32x16>(whole[r][1]), s1, block[r][1]);
                }
                if (w.offsets.at) add_offsets<ROWS>(own.offsets, totals, block);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const f32x16 scale = splat(*scales++);
                sums[r][0] = fma(block[r][0], scale, sums[r][0]);
                sums[r][1] = fma(block[r][1], scale, sums[r][1]);
            }
        }
    }
    if (!w.factors) return;
    const f32x16 f0 = load(w.factors + panel * PANEL), f1 = load(w.factors + panel * PANEL + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sums[r][0] *= f0, sums[r][1] *= f1;
}

#undef QUIRE_ALWAYS

}  // namespace quire
