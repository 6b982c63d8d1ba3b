// Panels of a weight in MXFP4 times rows, for linear.cpp: the products, in the same order, of the numbers that the codes
// stand for, so the bits are those of a dense weight of these numbers.
//
// A panel's words hold 8 inputs of an output each, its 32 outputs side by side: the even inputs' codes in the lower half,
// the odd ones' in the upper (see pack.cpp). Shifted right by 4 * s, its halves begin with the inputs 2s and 2s + 1. The
// scales are exponents of 2, [in / 32, 32], biased as fp32's are, and such that numbers are normal ones.
#pragma once

#include "weight.h"

namespace quire {

constexpr int MXFP4_GROUP = 32;  // inputs that share a scale
constexpr uint32_t MXFP4_LARGEST = 252;  // exponent of such a scale; it is at least 2, or all that it scales is 0

// Scales of 16 outputs, in the low bits.
INLINE u32x16 mxfp4_scales(const uint8_t* scales) {
    return widened(load_as<u8x16>(scales));
}

#if defined(__aarch64__)
// The numbers of 8 inputs of 4 outputs in fp32, before they are scaled.
struct Mxfp4Numbers {
    f32x16::Part of[8];

    MEMBER explicit Mxfp4Numbers(uint8x16_t codes) {
        // The upper and the lower bytes of the codes' numbers in bf16.
        const uint8x16_t upper = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                  0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
        const uint8x16_t lower = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
        const uint8x16_t halves[2] = {vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8(codes, 4)};
        for (int half = 0; half < 2; half++) {  // inputs 0, 4, 1 and 5 of each output, then 2, 6, 3 and 7
            const uint8x16_t high = vqtbl1q_u8(upper, halves[half]), low = vqtbl1q_u8(lower, halves[half]);
            const auto a = (uint32x4_t)vzip1q_u8(low, high), b = (uint32x4_t)vzip2q_u8(low, high);
            const u32x4 even = vuzp1q_u32(a, b), odd = vuzp2q_u32(a, b);
            of[2 * half] = (f32x16::Part)(even << 16), of[2 * half + 4] = (f32x16::Part)(even & 0xffff0000u);
            of[2 * half + 1] = (f32x16::Part)(odd << 16), of[2 * half + 5] = (f32x16::Part)(odd & 0xffff0000u);
        }
    }
};
#else
// The numbers of 16 codes in fp32, before they are scaled; bits above the fourth are of other codes.
INLINE f32x16 mxfp4_numbers(u32x16 codes) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6);
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, table);
#elif defined(__AVX2__)
    struct halves {
        __m256i part[2];
    };
    const __m256 table = _mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6);
    auto at = bits_of<halves>(codes);
    for (__m256i& part : at.part) {
        const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(part, _mm256_set1_epi32(8)), 28);
        part = _mm256_or_si256((__m256i)_mm256_permutevar8x32_ps(table, part), sign);
    }
    return bits_of<f32x16>(at);
#elif defined(__clang__)
    constexpr float table[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
    f32x16 numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = table[codes[i] & 15u];
    return numbers;
#else
    const f32x16 table = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
    return __builtin_shuffle(table, bits_of<i32x16>(codes & 15u));
#endif
}
#endif

// Activations in fp32: word `step` of row `r` is x[step * ROWS + r].
template <int ROWS>
INLINE void times_mxfp4(const Weight& w, int64_t panel, const char* data, const uint32_t* x, Later later,
                        Sums<ROWS>& sums) {
    const uint8_t* scales = (const uint8_t*)w.scales.at + panel * (w.in / MXFP4_GROUP) * PANEL;
    for (int64_t group = 0; group < w.in / MXFP4_GROUP; group++, scales += PANEL) {
        const f32x16 s0 = bits_of<f32x16>(mxfp4_scales(scales) << 23);
        const f32x16 s1 = bits_of<f32x16>(mxfp4_scales(scales + LANES) << 23);
        for (int word = 0; word < MXFP4_GROUP / 8; word++, data += 128) {
            fetch(data), later.fetch();
#if defined(__aarch64__)
#pragma GCC unroll 8
            for (int part = 0; part < 8; part++) {
                const Mxfp4Numbers numbers(load_as<uint8x16_t>(data + 16 * part));
                const f32x16::Part scale = (part < 4 ? s0 : s1).part[part % 4];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const f32x16::Part number = numbers.of[i] * scale;
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) {
                        auto& sum = sums[r][part / 4].part[part % 4];
                        sum = vfmaq_f32(sum, number, splat(load_as<float>(x + i * ROWS + r)).part[0]);
                    }
                }
            }
            x += 8 * ROWS;
#else
            const u32x16 c0 = load_as<u32x16>(data), c1 = load_as<u32x16>(data + 64);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++, x += ROWS) {
                const int shift = i % 2 * 16 + i / 2 * 4;
                const f32x16 v0 = mxfp4_numbers(c0 >> shift) * s0, v1 = mxfp4_numbers(c1 >> shift) * s1;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const f32x16 value = bits_of<f32x16>(splat_word(x + r));
                    sums[r][0] = fma(v0, value, sums[r][0]);
                    sums[r][1] = fma(v1, value, sums[r][1]);
                }
            }
#endif
        }
    }
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Pairs of bf16 of 8 inputs of 4 outputs. The tables' numbers are scaled by the largest exponent, as below.
struct Mxfp4Pairs {
    u32x4 of[4];

    MEMBER Mxfp4Pairs(uint8x16_t codes, u32x4 less) {
        const uint8x16_t upper = {0, 0x7d, 0x7e, 0x7e, 0x7e, 0x7e, 0x7f, 0x7f, 0, 0xfd, 0xfe, 0xfe, 0xfe, 0xfe, 0xff, 0xff};
        const uint8x16_t lower = {0, 0x80, 0, 0x40, 0x80, 0xc0, 0, 0x40, 0, 0x80, 0, 0x40, 0x80, 0xc0, 0, 0x40};
        const uint8x16_t halves[2] = {vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8(codes, 4)};
        for (int half = 0; half < 2; half++) {  // as above
            const uint8x16_t high = vqtbl1q_u8(upper, halves[half]), low = vqtbl1q_u8(lower, halves[half]);
            const auto first = (uint16x8_t)vtrn1q_u8(low, high), second = (uint16x8_t)vtrn2q_u8(low, high);
            of[half] = (u32x4)vqsubq_u16(first, (uint16x8_t)less);
            of[half + 2] = (u32x4)vqsubq_u16(second, (uint16x8_t)less);
        }
    }
};
#endif

#if defined(__AVX512BF16__)
// Pairs of bf16 of 16 outputs, whose codes come first in both halves of the words. The table's numbers are scaled by the
// largest exponent, 252; `less` is by how much less the exponents are. 0 stays 0, since the subtraction saturates; its
// sign makes no difference to any sum. There are 32 entries, so a fifth bit does not matter.
INLINE u32x16 mxfp4_pairs(u32x16 codes, int step, u32x16 less) {
    const __m128i positive = _mm_add_epi16(_mm_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0),
                                           _mm_setr_epi16(0, 0x3e80, 0x3e80, 0x3e80, 0x3e80, 0x3e80, 0x3e80, 0x3e80));
    const __m128i sign = _mm_setr_epi16(0, -0x8000, -0x8000, -0x8000, -0x8000, -0x8000, -0x8000, -0x8000);
    const __m256i table = _mm256_set_m128i(_mm_or_si128(positive, sign), positive);
    const __m512i numbers = _mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)codes, 4 * step), _mm512_broadcast_i64x4(table));
    return (u32x16)_mm512_subs_epu16(numbers, (__m512i)less);
}
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// As `times_mxfp4`, for activations in pairs of bf16.
template <int ROWS>
INLINE void times_mxfp4_pairs(const Weight& w, int64_t panel, const char* data, const uint32_t* x, Later later,
                              Sums<ROWS>& sums) {
    const uint8_t* scales = (const uint8_t*)w.scales.at + panel * (w.in / MXFP4_GROUP) * PANEL;
    for (int64_t group = 0; group < w.in / MXFP4_GROUP; group++, scales += PANEL) {
        u32x16 less[2];
        for (int half = 0; half < 2; half++)
            less[half] = ((MXFP4_LARGEST - mxfp4_scales(scales + half * LANES)) << 7) * 0x10001u;
        for (int word = 0; word < MXFP4_GROUP / 8; word++, data += 128) {
            fetch(data), later.fetch();
#if defined(__aarch64__)
#pragma GCC unroll 8
            for (int part = 0; part < 8; part++) {
                const Mxfp4Pairs pairs(load_as<uint8x16_t>(data + 16 * part), less[part / 4].part[part % 4]);
#pragma GCC unroll 4
                for (int step = 0; step < 4; step++)
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) {
                        auto& sum = sums[r][part / 4].part[part % 4];
                        sum = dot2(sum, pairs.of[step], splat_word(x + step * ROWS + r).part[0]);
                    }
            }
            x += 4 * ROWS;
#else
            const u32x16 c0 = load_as<u32x16>(data), c1 = load_as<u32x16>(data + 64);
#pragma GCC unroll 4
            for (int step = 0; step < 4; step++, x += ROWS) {
                const u32x16 w0 = mxfp4_pairs(c0, step, less[0]);
                const u32x16 w1 = mxfp4_pairs(c1, step, less[1]);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const u32x16 pair = splat_word(x + r);
                    sums[r][0] = dot2(sums[r][0], w0, pair);
                    sums[r][1] = dot2(sums[r][1], w1, pair);
                }
            }
#endif
        }
    }
}
#else
template <int ROWS>
INLINE void times_mxfp4_pairs(const Weight&, int64_t, const char*, const uint32_t*, Later, Sums<ROWS>&) {}
#endif

}  // namespace quire
