// Dot products of small numbers: pairs of bf16, and quads of bytes.
#pragma once

#include "simd.h"

namespace quire {

// Whether the machine multiplies pairs of bf16: see `dot2`.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE f32x16::Part dot2(f32x16::Part acc, u32x4 a, u32x4 b) {
    return vbfdotq_f32(acc, bits_of<bfloat16x8_t>(a), bits_of<bfloat16x8_t>(b));
}
#endif

// acc[i] += a[i].lo * b[i].lo + a[i].hi * b[i].hi for pairs of bf16 in 32-bit lanes, summed in fp32.
INLINE f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    for (int i = 0; i < 4; i++) acc.part[i] = dot2(acc.part[i], a.part[i], b.part[i]);
    return acc;
#else
    acc = fma(bits_of<f32x16>(a << 16), bits_of<f32x16>(b << 16), acc);
    return fma(bits_of<f32x16>(a & 0xffff0000u), bits_of<f32x16>(b & 0xffff0000u), acc);
#endif
}

// acc[i] += the dot product of four bytes of a and four signed ones of b, exactly. Those of a are unsigned, or, where
// BYTES_ARE_SIGNED, in two's complement; those of b are above -128.
#if defined(__aarch64__)
constexpr bool BYTES_ARE_SIGNED = true;
#else
constexpr bool BYTES_ARE_SIGNED = false;
#endif
#if defined(QUIRE_EMULATE_VNNI)
INLINE __m256i dot4(__m256i acc, __m256i a, __m256i b) {  // as Intel documents VPDPBUSD, for tests on any machine
    int32_t sums[8];
    uint8_t x[32];
    int8_t y[32];
    std::memcpy(sums, &acc, 32), std::memcpy(x, &a, 32), std::memcpy(y, &b, 32);
    for (int i = 0; i < 32; i++) sums[i / 4] += x[i] * y[i];
    std::memcpy(&acc, sums, 32);
    return acc;
}
#elif defined(__AVXVNNI__)
INLINE __m256i dot4(__m256i acc, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(acc, a, b); }
#elif defined(__AVX2__)
INLINE __m256i dot4(__m256i acc, __m256i a, __m256i b) {  // bytes 0 and 2, then 1 and 3, as below
    const __m256i a0 = _mm256_and_si256(a, _mm256_set1_epi16(0x00ff)), a1 = _mm256_srli_epi16(a, 8);
    const __m256i b0 = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b1 = _mm256_srai_epi16(b, 8);
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(a0, b0), _mm256_madd_epi16(a1, b1)));
}
#endif
INLINE i32x16 dot4(i32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)  // bytes 0 and 2, then 1 and 3, as 16-bit numbers: sums of two fit 32 bits
    const __m512i x = (__m512i)a, y = (__m512i)b, x0 = _mm512_and_si512(x, _mm512_set1_epi16(0x00ff));
    const __m512i y0 = _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8), y1 = _mm512_srai_epi16(y, 8);
    return acc + (i32x16)_mm512_madd_epi16(x0, y0) + (i32x16)_mm512_madd_epi16(_mm512_srli_epi16(x, 8), y1);
#elif defined(__AVX2__)
    struct halves {
        __m256i part[2];
    };
    auto s = bits_of<halves>(acc), x = bits_of<halves>(a), y = bits_of<halves>(b);
    for (int i = 0; i < 2; i++) s.part[i] = dot4(s.part[i], x.part[i], y.part[i]);
    return bits_of<i32x16>(s);
#elif defined(__aarch64__)
    for (int i = 0; i < 4; i++) {
        const auto x = (int8x16_t)a.part[i], y = (int8x16_t)b.part[i];
#if defined(__ARM_FEATURE_DOTPROD)
        acc.part[i] = vdotq_s32(acc.part[i], x, y);
#else  // sums of two products fit 16 bits
        const auto dots = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
        acc.part[i] = vpadalq_s16(acc.part[i], dots);
#endif
    }
    return acc;
#else
    for (int byte = 0; byte < 4; byte++) {
        i32x16 x = bits_of<i32x16>((a >> (8 * byte)) & 0xffu), y = bits_of<i32x16>(b << (24 - 8 * byte)) >> 24;
        acc += x * y;
    }
    return acc;
#endif
}

// The bytes of four vectors of whole numbers that fit one: [four lanes][vector], four bytes each.
INLINE u32x16 quads_of(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
#if defined(__AVX512BW__)
    const __m512i ab = _mm512_packs_epi32((__m512i)a, (__m512i)b), cd = _mm512_packs_epi32((__m512i)c, (__m512i)d);
    return (u32x16)_mm512_packs_epi16(ab, cd);
#elif defined(__x86_64__)
    auto w = bits_of<Parts<int32_t>>(a), x = bits_of<Parts<int32_t>>(b);
    auto y = bits_of<Parts<int32_t>>(c), z = bits_of<Parts<int32_t>>(d);
    for (int i = 0; i < 64 / WIDTH; i++) {
#if defined(__AVX2__)
        const __m256i first = _mm256_packs_epi32((__m256i)w.part[i], (__m256i)x.part[i]);
        const __m256i second = _mm256_packs_epi32((__m256i)y.part[i], (__m256i)z.part[i]);
        w.part[i] = (Parts<int32_t>::Part)_mm256_packs_epi16(first, second);
#else
        const __m128i first = _mm_packs_epi32((__m128i)w.part[i], (__m128i)x.part[i]);
        const __m128i second = _mm_packs_epi32((__m128i)y.part[i], (__m128i)z.part[i]);
        w.part[i] = (Parts<int32_t>::Part)_mm_packs_epi16(first, second);
#endif
    }
    return bits_of<u32x16>(w);
#else
    u32x16 quads;
    for (int i = 0; i < 4; i++) {
        const auto ab = vuzp1q_s16((int16x8_t)a.part[i], (int16x8_t)b.part[i]);
        const auto cd = vuzp1q_s16((int16x8_t)c.part[i], (int16x8_t)d.part[i]);
        quads.part[i] = (u32x4)vuzp1q_s8((int8x16_t)ab, (int8x16_t)cd);
    }
    return quads;
#endif
}

}  // namespace quire
