// Vectors of 16 numbers, on every instruction set: the one place where instruction sets differ.
//
// GCC's vector extensions give the arithmetic (+ - * / and comparisons work on the types below, and become one,
// two or four instructions each); this file adds what they lack. Every file is compiled once for each instruction
// set, into a library of its own, so nothing here is decided at run time.
//
// Bits: a function gives the same bits wherever a number lies in a vector, on one instruction set. Nothing is
// contracted by the compiler (-ffp-contract=off); where a fused multiply-add is meant, `fma` says so.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define QUIRE_API extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

namespace quire {

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using u8x64 = uint8_t __attribute__((vector_size(64)));
using u32x4 = uint32_t __attribute__((vector_size(16)));
using i8x64 = int8_t __attribute__((vector_size(64)));
constexpr int LANES = 16;

// Numbers in memory. `DType` is how Python names them.
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

// -- bits and arithmetic --------------------------------------------------------------------------------------

template <class To, class From>
INLINE To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// GCC takes a vector that is wider than the machine's apart: for arithmetic into two or four, but for comparisons and
// choices number by number. So these are done on vectors of the machine's width.
#if defined(__AVX512F__)
constexpr int WIDTH = 64;
constexpr __mmask16 ALL = 0xffff;  // lanes; of intrinsics without a mask GCC 12 warns that something is not initialized
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
template <class T>
struct Parts {
    typedef T Part __attribute__((vector_size(WIDTH)));
    Part part[64 / WIDTH];
};

// As `f32x16{} + x`, of which GCC makes 16 stores where there is no AVX-512.
INLINE f32x16 splat(float x) { return (x + 0.0f) - f32x16{}; }

template <class T, class V>
INLINE V splat_by_parts(T x) {
    Parts<T> result;
    for (auto& part : result.part) part = typename Parts<T>::Part{} + x;
    return bits_of<V>(result);
}
INLINE i32x16 splat(int32_t x) { return splat_by_parts<int32_t, i32x16>(x); }
INLINE u32x16 splat(uint32_t x) { return splat_by_parts<uint32_t, u32x16>(x); }

INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {  // a * b + c, rounded once where the machine can
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    struct halves {
        __m256 part[2];
    };
    auto x = bits_of<halves>(a), y = bits_of<halves>(b), z = bits_of<halves>(c);
    for (int i = 0; i < 2; i++) z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
    return bits_of<f32x16>(z);
#elif defined(__aarch64__)
    struct quarters {
        float32x4_t part[4];
    };
    auto x = bits_of<quarters>(a), y = bits_of<quarters>(b), z = bits_of<quarters>(c);
    for (int i = 0; i < 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return bits_of<f32x16>(z);
#else
    return a * b + c;
#endif
}

// f of each part of a and b, which hold Ts; what it yields holds Rs.
template <class R, class T, class V, class F>
INLINE auto by_parts(V a, V b, F f) {
    typedef R Result __attribute__((vector_size(64)));
    auto x = bits_of<Parts<T>>(a), y = bits_of<Parts<T>>(b);
    Parts<R> result;
    for (int i = 0; i < 64 / WIDTH; i++) result.part[i] = f(x.part[i], y.part[i]);
    return bits_of<Result>(result);
}

// As the scalar std::max(a, b) = a < b ? b : a, so a NaN in `a` stays.
INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_maskz_max_ps(ALL, (__m512)b, (__m512)a);
#else
    return by_parts<float, float>(a, b, [](auto x, auto y) { return x < y ? y : x; });
#endif
}

INLINE i32x16 max(i32x16 a, i32x16 b) {
    return by_parts<int32_t, int32_t>(a, b, [](auto x, auto y) { return x < y ? y : x; });
}

// All bits of a lane are set where it holds. None holds for a NaN.
INLINE i32x16 less(f32x16 a, f32x16 b) {
    return by_parts<int32_t, float>(a, b, [](auto x, auto y) { return x < y; });
}
INLINE i32x16 less(i32x16 a, i32x16 b) {
    return by_parts<int32_t, int32_t>(a, b, [](auto x, auto y) { return x < y; });
}
INLINE i32x16 less_equal(f32x16 a, f32x16 b) {
    return by_parts<int32_t, float>(a, b, [](auto x, auto y) { return x <= y; });
}
INLINE i32x16 equal(f32x16 a, f32x16 b) {
    return by_parts<int32_t, float>(a, b, [](auto x, auto y) { return x == y; });
}

template <class V>
INLINE V select(i32x16 mask, V yes, V no) {  // of 16 numbers of 32 bits
#if defined(__AVX512F__)
    return mask ? yes : no;
#else
    return bits_of<V>((mask & bits_of<i32x16>(yes)) | (~mask & bits_of<i32x16>(no)));
#endif
}

// f of all lanes, as a fixed tree: of halves, of quarters, ...
template <class T, class V, class F>
INLINE T fold(V v, F f) {
    typedef T Eight __attribute__((vector_size(32)));
    typedef T Four __attribute__((vector_size(16)));
    struct eights {
        Eight part[2];
    };
    struct fours {
        Four part[2];
    };
    const auto e = bits_of<eights>(v);
    const auto q = bits_of<fours>(Eight(f(e.part[0], e.part[1])));
    const Four four = f(q.part[0], q.part[1]);
    return f(f(T(four[0]), T(four[2])), f(T(four[1]), T(four[3])));
}

INLINE float sum(f32x16 v) {
    return fold<float>(v, [](auto a, auto b) { return a + b; });
}
INLINE int32_t sum(i32x16 v) {
    return fold<int32_t>(v, [](auto a, auto b) { return a + b; });
}
INLINE float max_of(f32x16 v) {
    return fold<float>(v, [](auto a, auto b) { return a < b ? b : a; });
}
INLINE int32_t max_of(i32x16 v) {
    return fold<int32_t>(v, [](auto a, auto b) { return a < b ? b : a; });
}

template <class Part>
INLINE bool any_bit(Part part) {  // of a vector of the machine's width
    static_assert(sizeof part == WIDTH);
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)part, (__m512i)part) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)part, (__m256i)part);
#else
    typedef uint64_t Pair __attribute__((vector_size(16)));
    return (((Pair)part)[0] | ((Pair)part)[1]) != 0;
#endif
}

INLINE bool any(i32x16 mask) {  // whether a comparison held in any lane
    auto parts = bits_of<Parts<int32_t>>(mask);
    for (int i = 1; i < 64 / WIDTH; i++) parts.part[0] |= parts.part[i];
    return any_bit(parts.part[0]);
}

// -- loads and stores, which convert ----------------------------------------------------------------------------

INLINE u32x16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_maskz_cvtepu16_epi32(ALL, (__m256i)x);  // of the other form GCC makes two halves
#else
    return __builtin_convertvector(x, u32x16);
#endif
}
INLINE u16x16 narrow(u32x16 x) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_maskz_cvtepi32_epi16(ALL, (__m512i)x);
#else
    return __builtin_convertvector(x, u16x16);
#endif
}

INLINE f32x16 from_f16(u16x16 x) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    struct halves {
        __m128i part[2];
    };
    struct wide {
        __m256 part[2];
    };
    auto h = bits_of<halves>(x);
    return bits_of<f32x16>(wide{{_mm256_cvtph_ps(h.part[0]), _mm256_cvtph_ps(h.part[1])}});
#else  // exact: shift exponent and mantissa into place and multiply the bias away (subnormals come out right too)
    u32x16 w = widen(x), sign = (w & 0x8000u) << 16, rest = (w & 0x7fffu) << 13;
    f32x16 scaled = bits_of<f32x16>(rest) * 0x1p112f;
    u32x16 special = rest | 0x7f800000u;  // infinity and NaN
    return bits_of<f32x16>(sign | select(less((i32x16)rest, splat(0x0f800000)), bits_of<u32x16>(scaled), special));
#endif
}

INLINE u16x16 to_f16(f32x16 v) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    struct halves {
        __m256 part[2];
    };
    struct narrow {
        __m128i part[2];
    };
    auto h = bits_of<halves>(v);
    return bits_of<u16x16>(narrow{{_mm256_cvtps_ph(h.part[0], 0), _mm256_cvtps_ph(h.part[1], 0)}});
#else
    u32x16 x = bits_of<u32x16>(v), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
    u32x16 normal = (a - 0x38000000u + 0x0fffu + ((a >> 13) & 1u)) >> 13;
    u32x16 small = bits_of<u32x16>(bits_of<f32x16>(a) + 0.5f) - 0x3f000000u;  // adding 0.5 rounds to 2^-24
    i32x16 size = (i32x16)a;
    u32x16 out = select(less(size, splat(0x38800000)), small, normal);
    out = select(less(size, splat(0x477ff000)), out, u32x16{} + 0x7c00u);
    out = select(less(splat(0x7f800000), size), u32x16{} + 0x7e00u, out);
    return narrow(out | sign);
#endif
}

// Rounds to nearest, ties to even, as torch does; a NaN stays one. The instruction makes subnormal numbers 0.
INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 x = bits_of<u32x16>(v);
    u32x16 rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    i32x16 nan = less(splat(0x7f800000), (i32x16)(x & 0x7fffffffu));
    return narrow(select(nan, u32x16{} + 0x7fc0u, rounded));
#endif
}

INLINE f32x16 from_bf16(u16x16 x) { return bits_of<f32x16>(widen(x) << 16); }

INLINE f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE f32x16 load(const bf16* p) {
    u16x16 v;
    std::memcpy(&v, p, sizeof v);
    return from_bf16(v);
}
INLINE f32x16 load(const f16* p) {
    u16x16 v;
    std::memcpy(&v, p, sizeof v);
    return from_f16(v);
}
INLINE void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
INLINE void store(bf16* p, f32x16 v) {
    u16x16 n = to_bf16(v);
    std::memcpy(p, &n, sizeof n);
}
INLINE void store(f16* p, f32x16 v) {
    u16x16 n = to_f16(v);
    std::memcpy(p, &n, sizeof n);
}

// The first n of 16 numbers, all of them where n is 16 or more; what is not loaded is 0, what is not stored stays.
template <class T>
INLINE f32x16 load_some(const T* p, int64_t n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
INLINE void store_some(T* p, f32x16 v, int64_t n) {
    if (n >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}

// v as it would be after being stored as T and loaded again.
INLINE f32x16 rounded(f32x16 v, const float*) { return v; }
INLINE f32x16 rounded(f32x16 v, const bf16*) { return from_bf16(to_bf16(v)); }
INLINE f32x16 rounded(f32x16 v, const f16*) { return from_f16(to_f16(v)); }

// -- functions --------------------------------------------------------------------------------------------------

// e^x to about 1 ulp (Cephes' expf: x = n ln 2 + r, a polynomial in r); 0 below -87.3, infinity above 88.7.
INLINE f32x16 exp(f32x16 x) {
    f32x16 clamped = max(select(less(x, splat(88.8f)), x, splat(88.8f)), splat(-87.4f));
    f32x16 shifted = fma(clamped, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds to an integer
    f32x16 n = shifted - 12582912.0f;
    f32x16 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + 1.0f;
    // 2^n in two steps, so that neither leaves the range of normal numbers
    i32x16 e = bits_of<i32x16>(shifted) - 0x4b400000, half = e >> 1;
    f32x16 y = p * bits_of<f32x16>((half + 127) << 23) * bits_of<f32x16>((e - half + 127) << 23);
    y = select(less(x, splat(-87.3f)), splat(0.0f), y);
    y = select(less(splat(88.72284f), x), splat(std::numeric_limits<float>::infinity()), y);
    return select(equal(x, x), y, x);  // a NaN stays
}

// -- dot products -----------------------------------------------------------------------------------------------

// acc[i] += a[i].lo * b[i].lo + a[i].hi * b[i].hi for pairs of bf16 in 32-bit lanes, summed in fp32.
INLINE f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma(bits_of<f32x16>(a << 16), bits_of<f32x16>(b << 16), acc);
    return fma(bits_of<f32x16>(a & 0xffff0000u), bits_of<f32x16>(b & 0xffff0000u), acc);
#endif
}

// acc[i] += the dot product of four unsigned bytes of a and four signed ones of b, exactly.
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
    const __m256i even = _mm256_set1_epi16(0x00ff);
    for (int i = 0; i < 2; i++) {  // as above
        __m256i x0 = _mm256_and_si256(x.part[i], even), x1 = _mm256_srli_epi16(x.part[i], 8);
        __m256i y0 = _mm256_srai_epi16(_mm256_slli_epi16(y.part[i], 8), 8), y1 = _mm256_srai_epi16(y.part[i], 8);
        __m256i dot = _mm256_add_epi32(_mm256_madd_epi16(x0, y0), _mm256_madd_epi16(x1, y1));
        s.part[i] = _mm256_add_epi32(s.part[i], dot);
    }
    return bits_of<i32x16>(s);
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
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    const i32x16 lanes = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;  // four lanes: a square of bytes
    auto w = bits_of<Parts<uint8_t>>(lanes);
    const Bytes turned = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    for (auto& part : w.part) part = __builtin_shuffle(part, turned);
    return bits_of<u32x16>(w);
#endif
}

// Stores past the caches, whose lines need not be read for it, where the numbers lie in one line.
INLINE void store_away(float* p, f32x16 v) {
#if defined(__AVX512F__)
    if ((uintptr_t)p % 64 == 0) return _mm512_stream_ps(p, (__m512)v);
#endif
    store(p, v);
}

INLINE void stored_away() {  // orders such stores before those that come after them
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

}  // namespace quire
