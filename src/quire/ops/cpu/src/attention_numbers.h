// Numbers of the cache in the form in which attention multiplies them: 32-bit lanes.
//
// `FloatLanes`: a lane is one number in fp32. `PairLanes`: a lane is two bf16 numbers, for instruction sets that
// multiply such pairs, in vectors or in tiles. Which one it is follows from the data type and the instruction set alone.
#pragma once

#include <type_traits>

#include "dots.h"
#include "kv_store.h"

namespace quire {

// Codes of the quantized cache (see kv_store.h).
struct int8 {
    int8_t code;
};
struct fp8 {
    uint8_t code;
};

// 16 bytes as 32-bit numbers, without and with sign.
INLINE u32x16 widen(u8x16 v) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(__AVX2__)
    struct {
        __m256i part[2];
    } halves = {{_mm256_cvtepu8_epi32((__m128i)v), _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)v, 8))}};
    return bits_of<u32x16>(halves);
#else
    return converted<u32x16>(v);
#endif
}
INLINE i32x16 widen(i8x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepi8_epi32((__m128i)v);
#elif defined(__aarch64__)
    return converted<i32x16>(v);
#else
    return (i32x16)(widen((u8x16)v) << 24) >> 24;
#endif
}

INLINE f32x16 to_float(i32x16 v) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps((__m512i)v);
#else
    return converted<f32x16>(v);
#endif
}

INLINE f32x16 from_int8(u8x16 v) { return to_float(widen((i8x16)v)); }
INLINE f32x16 from_fp8(u8x16 v) {  // exact: exponent and mantissa in place, then the bias multiplied away
    u32x16 w = widen(v);
    f32x16 magnitude = bits_of<f32x16>((w & 0x7fu) << 20) * 0x1p120f;
    return bits_of<f32x16>(bits_of<u32x16>(magnitude) | ((w & 0x80u) << 24));
}
INLINE f32x16 load(const int8* p) { return from_int8(load_as<u8x16>(p)); }
INLINE f32x16 load(const fp8* p) { return from_fp8(load_as<u8x16>(p)); }

// As `load_some`, for fewer than 16: rare, and so compiled once for each type and not wherever numbers are loaded.
template <class S>
NOT_INLINE f32x16 load_few(const S* p, int64_t n) {
    return load_some(p, n);
}

// -- transposing ------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Rows become columns, for 16 rows of 16 lanes.
INLINE void transpose(__m512i (&r)[LANES]) {
    __m512i t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int half = 0; half < LANES; half += 8)
        for (int i = half; i < half + 4; i++) {
            t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
template <class V>
INLINE void transpose(V (&rows)[LANES]) {
    static_assert(sizeof(V) == sizeof(__m512i));
    __m512i r[LANES];
    for (int i = 0; i < LANES; i++) r[i] = (__m512i)rows[i];
    transpose(r);
    for (int i = 0; i < LANES; i++) rows[i] = (V)r[i];
}
#else
// The same in squares of 4 x 4, which every instruction set can do.
template <class V>
INLINE void transpose(V (&rows)[LANES]) {
    auto low = [](u32x4 a, u32x4 b) { return shuffle<0, 4, 1, 5>(a, b); };
    auto high = [](u32x4 a, u32x4 b) { return shuffle<2, 6, 3, 7>(a, b); };
#if defined(__aarch64__)
    auto turn = [&](u32x4 (&x)[4]) __attribute__((always_inline)) {
        const u32x4 ac0 = low(x[0], x[2]), ac1 = high(x[0], x[2]), bd0 = low(x[1], x[3]), bd1 = high(x[1], x[3]);
        x[0] = low(ac0, bd0), x[1] = high(ac0, bd0), x[2] = low(ac1, bd1), x[3] = high(ac1, bd1);
    };
    for (int i = 0; i < 4; i++)
        for (int j = 0; j <= i; j++) {
            u32x4 below[4], above[4];
            for (int k = 0; k < 4; k++) {
                below[k] = (u32x4)rows[4 * i + k].part[j];
                above[k] = (u32x4)rows[4 * j + k].part[i];
            }
            turn(below), turn(above);
            for (int k = 0; k < 4; k++) {
                rows[4 * i + k].part[j] = (typename V::Part)above[k];
                rows[4 * j + k].part[i] = (typename V::Part)below[k];
            }
        }
#else
    u32x4 in[LANES][4], out[LANES][4];
    std::memcpy(in, rows, sizeof in);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const u32x4 a = in[4 * i][j], b = in[4 * i + 1][j], c = in[4 * i + 2][j], d = in[4 * i + 3][j];
            const u32x4 ac0 = low(a, c), ac1 = high(a, c), bd0 = low(b, d), bd1 = high(b, d);
            out[4 * j][i] = low(ac0, bd0);
            out[4 * j + 1][i] = high(ac0, bd0);
            out[4 * j + 2][i] = low(ac1, bd1);
            out[4 * j + 3][i] = high(ac1, bd1);
        }
    std::memcpy(rows, out, sizeof out);
#endif
}
#endif

// -- lanes ------------------------------------------------------------------------------------------------------

struct FloatLanes {
    using lane = float;
    using vector = f32x16;
    static constexpr int NUMBERS = 1;  // a lane

    // The products work on vectors of the machine's width: GCC would keep wider ones in memory.
    typedef float part __attribute__((vector_size(WIDTH)));
    INLINE part dot(part sum, part a, part b) {
#if defined(__AVX512F__)
        return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
        return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
        return (part)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
        return a * b + sum;
#endif
    }

    INLINE part spread(const lane* p) { return in_all_lanes<part>(*p); }

    // 16 lanes of a row, of which n numbers are there; the rest is 0.
    template <class S>
    INLINE vector of_row(const S* row, int n) {
        return n >= LANES ? load(row) : load_few(row, n);
    }
    // Of 16 rows, `stride` bytes apart, SQUARE numbers each, of which n are there: a lane is a row. A vector of what is
    // stored becomes EACH vectors of lanes.
    template <class S>
    static constexpr int SQUARE = LANES;
    template <class S>
    static constexpr int EACH = 1;
    template <class S>
    INLINE void of_square(const char* rows, int64_t stride, int n, vector (&to)[LANES]) {
        for (int i = 0; i < LANES; i++) to[i] = of_row((const S*)(rows + i * stride), n);
        transpose(to);
    }
    template <class S>
    INLINE void of_stored(vector stored, vector (&to)[1]) { to[0] = stored; }
    // 16 * NUMBERS columns, of which n are there, of NUMBERS rows: NUMBERS vectors in which a lane is a column.
    template <class S>
    INLINE void of_columns(const char* rows, int64_t, int n, vector* to) {
        to[0] = of_row((const S*)rows, n);
    }
    INLINE void store_weights(lane* to, f32x16 weights) { store(to, weights); }
    // The same columns of NUMBERS rows that hold lanes, from lane `at` on.
    INLINE void side_by_side(const lane* const* rows, int64_t at, part* to) {
UNROLL
        for (int i = 0; i < 64 / WIDTH; i++) std::memcpy(&to[i], rows[0] + at + i * (WIDTH / 4), WIDTH);
    }
    // 16 lanes, each of a number out of every vector.
    INLINE void store_side_by_side(lane* to, const f32x16* numbers) { store(to, numbers[0]); }
};

#if defined(__AVX512BF16__)
// Numbers in bf16 of the codes 0 .. 127, which are all magnitudes.
struct NumbersOfCodes {
    alignas(64) uint8_t lower[128], upper[128];
};
constexpr NumbersOfCodes numbers_of_codes(bool fp8) {
    // A number is `mantissa` units; fp8 has subnormal ones of 2^-9, and from 8 on units that double with the exponent.
    NumbersOfCodes to = {};
    for (int code = 1; code < 128; code++) {
        int mantissa = !fp8 || code < 8 ? code : 8 + code % 8, exponent = !fp8 ? 0 : code < 8 ? -9 : code / 8 - 10;
        for (; mantissa < 128; mantissa *= 2) exponent--;
        const int number = (exponent + 7 + 127) * 128 + mantissa % 128;
        to.lower[code] = number % 256, to.upper[code] = number / 256;
    }
    return to;
}
template <class S>
constexpr NumbersOfCodes NUMBERS_OF = numbers_of_codes(std::is_same<S, fp8>::value);

struct ByteOrder {
    alignas(64) uint8_t at[64];
};
constexpr ByteOrder columns_of_two_rows() {
    ByteOrder order = {};
    for (int i = 0; i < 64; i++) order.at[i] = i % 2 * 64 + i % 16 / 8 * 16 + i / 16 * 4 + i % 8 / 2;
    return order;
}
constexpr ByteOrder COLUMNS_OF_TWO_ROWS = columns_of_two_rows();
#endif

#if defined(__AVX512BF16__) || defined(QUIRE_EMULATE_AMX)
#define QUIRE_PAIR_LANES
struct PairLanes {
    using lane = uint32_t;
    using vector = u32x16;
    using u16x32 = uint16_t __attribute__((vector_size(64)));
    static constexpr int NUMBERS = 2;

    using part = vector;
    INLINE f32x16 dot(f32x16 sum, part a, part b) { return dot2(sum, a, b); }
    INLINE part spread(const lane* p) {
#if defined(__AVX512F__)
        return (part)_mm512_broadcastd_epi32(_mm_loadu_si32(p));  // of the other form GCC makes a load and a move
#else
        return part{} + *p;
#endif
    }

    // 32 numbers in bf16: codes are exact in it.
    INLINE vector wide(const bf16* row) {
        vector v;
        std::memcpy(&v, row, sizeof v);
        return v;
    }
    INLINE vector wide(const int8* row) { return join(load(row), load(row + LANES)); }
    INLINE vector wide(const fp8* row) {
#if defined(__AVX512BF16__)
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)row));
        const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        // Exponent and mantissa in place, with bf16's bias; multiples of 2^-9, which have no exponent, from a table.
        constexpr u16x32 small = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
        const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
        const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
        const __m512i number = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, (__m512i)small);
        const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), code), 8);
        return (vector)_mm512_or_si512(number, sign);
#else
        return join(load(row), load(row + LANES));
#endif
    }
    INLINE vector join(f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
        return (vector)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
        const struct {
            u16x16 low, high;
        } halves = {to_bf16(low), to_bf16(high)};
        return bits_of<vector>(halves);
#endif
    }
    template <class S>
    INLINE vector of_row(const S* row, int n) {
#if defined(__AVX512BF16__)
        if (std::is_same<S, bf16>::value) return (vector)_mm512_maskz_loadu_epi16(first_of(n), row);
#endif
        if (n >= 2 * LANES) return wide(row);
        S part[2 * LANES] = {};
        std::memcpy(part, row, n * sizeof(S));
        return wide(part);
    }
#if defined(__AVX512BF16__)
    // Codes are turned, or put side by side, before they become numbers of twice the size.
    template <class S>
    static constexpr int EACH = sizeof(S) == 1 ? 2 : 1;
    template <class S>
    static constexpr int SQUARE = EACH<S> * LANES * NUMBERS;
    template <class S>
    INLINE void of_square(const char* rows, int64_t stride, int n, vector (&to)[LANES]) {
        for (int i = 0; i < LANES; i++) {
            const char* row = rows + i * stride;
            to[i] = (vector)(sizeof(S) == 1 ? _mm512_maskz_loadu_epi8(~__mmask64{} >> (64 - n), row)
                                            : _mm512_maskz_loadu_epi16(first_of(n), row));
        }
        transpose(to);
    }
    template <class S>
    INLINE void of_stored(vector stored, vector (&to)[EACH<S>]) {
        if constexpr (sizeof(S) == 1) {
            // In 128 bits first the first two codes of four lanes, then their last two.
            const __m128i halves = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            expand<S>(_mm512_shuffle_epi8((__m512i)stored, _mm512_broadcast_i32x4(halves)), to);
        } else {
            to[0] = stored;
        }
    }
    template <class S>
    INLINE void of_columns(const char* rows, int64_t stride, int n, vector* to) {
        if constexpr (sizeof(S) == 1) {
            const __mmask32 there = first_of(n);
            const __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(there, rows));
            const __m512i second = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(there, rows + stride));
            // In 128 bits four columns of the first half, then four of the second half, of both rows.
            expand<S>(_mm512_permutex2var_epi8(first, _mm512_load_si512(&COLUMNS_OF_TWO_ROWS), second), to);
        } else {
            interleave(of_row((const S*)rows, n), of_row((const S*)(rows + stride), n), to);
        }
    }
    INLINE __mmask32 first_of(int n) { return n >= 2 * LANES ? ~__mmask32{} : (__mmask32{1} << n) - 1; }

    // 64 codes as numbers: of each 128 bits the first eight in to[0], the others in to[1]. A code's magnitude has a number,
    // whose upper and lower byte are looked up; its sign is the number's. (No code is -128.)
    template <class S>
    INLINE void expand(__m512i codes, vector* to) {
        const __m512i magnitude = std::is_same<S, int8>::value ? _mm512_abs_epi8(codes) : codes;
        auto found = [&](const uint8_t (&table)[128]) __attribute__((always_inline)) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), magnitude, _mm512_load_si512(table + 64));
        };
        constexpr int A_OR_B_AND_C = 0xf8;
        const __m512i lower = found(NUMBERS_OF<S>.lower);
        const __m512i upper = _mm512_ternarylogic_epi32(found(NUMBERS_OF<S>.upper), codes, _mm512_set1_epi8(-128), A_OR_B_AND_C);
        to[0] = (vector)_mm512_unpacklo_epi8(lower, upper);
        to[1] = (vector)_mm512_unpackhi_epi8(lower, upper);
    }
#else
    template <class S>
    static constexpr int SQUARE = 2 * LANES;
    template <class S>
    static constexpr int EACH = 1;
    template <class S>
    INLINE void of_stored(vector stored, vector (&to)[1]) { to[0] = stored; }
    template <class S>
    INLINE void of_square(const char* rows, int64_t stride, int n, vector (&to)[LANES]) {
        for (int i = 0; i < LANES; i++) to[i] = of_row((const S*)(rows + i * stride), n);
        transpose(to);
    }
    template <class S>
    INLINE void of_columns(const char* rows, int64_t stride, int n, vector* to) {
        interleave(of_row((const S*)rows, n), of_row((const S*)(rows + stride), n), to);
    }
#endif
    INLINE void interleave(vector first, vector second, vector* to) {
        const u16x32 even = (u16x32)first, odd = (u16x32)second;
        to[0] = (vector)shuffle<0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,  //
                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47>(even, odd);
        to[1] = (vector)shuffle<16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,  //
                                24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63>(even, odd);
    }
    INLINE void store_weights(lane* to, f32x16 weights) {
        const u16x16 narrow = to_bf16(weights);
        std::memcpy(to, &narrow, sizeof narrow);
    }
    INLINE void side_by_side(const lane* const* rows, int64_t at, vector* to) {
        interleave(wide((const bf16*)(rows[0] + at)), wide((const bf16*)(rows[1] + at)), to);
    }
    INLINE void store_side_by_side(lane* to, const f32x16* numbers) {
        const u16x32 both = (u16x32)join(numbers[0], numbers[1]);
        const u16x32 pairs = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,  //
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(both, both);
        std::memcpy(to, &pairs, sizeof pairs);
    }
};
#endif

// -- which of them ------------------------------------------------------------------------------------------------

template <class T>
struct LanesOf {
    using type = FloatLanes;
};
#if defined(QUIRE_PAIR_LANES)
template <>
struct LanesOf<bf16> {
    using type = PairLanes;
};
#endif

template <class S>
constexpr bool is_code = std::is_same_v<S, int8> || std::is_same_v<S, fp8>;

// work(L{}) for the lanes in which numbers of a `DType` are multiplied.
template <class F>
auto with_lanes(int64_t dtype, F work) {
    return dtype == BF16 ? work(LanesOf<bf16>::type{}) : work(FloatLanes{});
}

// work(T{}) for the type of numbers that a `DType` names: of those that become lanes of `L`.
template <class L, class F>
INLINE auto with_floats(int64_t dtype, F work) {
    if constexpr (std::is_same_v<L, LanesOf<bf16>::type>)
        if (L::NUMBERS == 2 || dtype == BF16) return work(bf16{});
    if constexpr (L::NUMBERS == 1) return dtype == F16 ? work(f16{}) : work(float{});
}

// work(S{}) for the type of numbers that a `KvFormat` names, likewise.
template <class L, class F>
INLINE auto with_numbers(int64_t format, F work) {
    if (format == KV_INT8) return work(int8{});
    return format == KV_FP8 ? work(fp8{}) : with_floats<L>(format, work);
}

// -- 2^x --------------------------------------------------------------------------------------------------------

// The largest of all numbers, none of which is NaN.
INLINE float largest_of(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return max_of(v);
#endif
}

// 2^x for x <= 0, to about 2 ulp: x = n + f, and a polynomial in f (fitted for the least relative error, 1 at 0).
// 0 below -125; a NaN stays.
INLINE f32x16 exp2_of_negative(f32x16 x) {
#if defined(__AVX512F__)
    f32x16 bounded = x;  // what is below is masked out
#else
    f32x16 bounded = max(x, splat(-126.0f));
#endif
    f32x16 n = bounded + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    f32x16 f = bounded - n, p = splat(0x1.5bba0ep-10f);
    p = fma(p, f, splat(0x1.3cea88p-7f));
    p = fma(p, f, splat(0x1.c6b752p-5f));
    p = fma(p, f, splat(0x1.ebf9bcp-3f));
    p = fma(p, f, splat(0x1.62e42ap-1f));
    p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)n);
#else
    i32x16 shift = bits_of<i32x16>(n + 12582912.0f) << 23;  // what stands above the integer is shifted out
    f32x16 y = bits_of<f32x16>(bits_of<i32x16>(p) + shift);
    return select(less(x, splat(-125.0f)), splat(0.0f), select(equal(x, x), y, x));
#endif
}

}  // namespace quire
