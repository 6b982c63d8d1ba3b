// Vectors of 16 numbers, on every instruction set: with dots.h, the one place where instruction sets differ.
//
// The compilers' vector extensions give the arithmetic (+ - * / work on the types below, and become one, two or four
// instructions each); this file adds what they lack. Every file is compiled once for each instruction set, into a
// library of its own, so nothing here is decided at run time.
//
// Bits: a function gives the same bits wherever a number lies in a vector, on one instruction set. Nothing is
// contracted by the compiler (-ffp-contract=off); where a fused multiply-add is meant, `fma` says so.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "wide.h"
#endif

#define QUIRE_API extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOT_INLINE __attribute__((noinline))

// Of loops over an array of vectors: where the registers hold but a few, GCC unrolls them too late to find out that the
// array needs no memory.
#if defined(__AVX512F__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace quire {

using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));
using u32x4 = uint32_t __attribute__((vector_size(16)));
using u8x64 = uint8_t __attribute__((vector_size(64)));
using i8x64 = int8_t __attribute__((vector_size(64)));
template <class T, int N>
struct VectorOf {
#if defined(__aarch64__)
    using type = Wide<T, N>;
#else
    typedef T type __attribute__((vector_size(N * sizeof(T))));
#endif
};
template <class T>
using Line = typename VectorOf<T, 64 / sizeof(T)>::type;  // 64 bytes
using f32x16 = Line<float>;
using i32x16 = Line<int32_t>;
using u32x16 = Line<uint32_t>;
using i16x32 = Line<int16_t>;
using u16x16 = VectorOf<uint16_t, 16>::type;
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
#if defined(__aarch64__)
    if constexpr (is_wide<To> && is_wide<From>) {
        for (int i = 0; i < To::PARTS; i++) to.part[i] = (typename To::Part)from.part[i];
        return to;
    }
#endif
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
#if defined(__aarch64__)
template <class T>
using Parts = Wide<T, 64 / sizeof(T)>;
#else
template <class T>
struct Parts {
    typedef T Part __attribute__((vector_size(WIDTH)));
    Part part[64 / WIDTH];
};
#endif

// Of `f32x16{} + x` GCC makes an addition, and where there is no AVX-512 16 stores.
INLINE f32x16 splat(float x) { return x - f32x16{}; }

template <class Part, class T>
INLINE Part in_all_lanes(T x) {
#if defined(__aarch64__)
    return x - Part{};  // no instruction
#else
    return Part{} + x;
#endif
}

template <class T, class V>
INLINE V splat_by_parts(T x) {
    Parts<T> result;
    for (auto& part : result.part) part = in_all_lanes<typename Parts<T>::Part>(x);
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
    for (int i = 0; i < 4; i++) c.part[i] = vfmaq_f32(c.part[i], a.part[i], b.part[i]);
    return c;
#else
    return a * b + c;
#endif
}

// f of each part of a and b, which hold Ts; what it yields holds Rs.
template <class R, class T, class V, class F>
INLINE auto by_parts(V a, V b, F f) {
    auto x = bits_of<Parts<T>>(a), y = bits_of<Parts<T>>(b);
    Parts<R> result;
    for (int i = 0; i < 64 / WIDTH; i++) result.part[i] = f(x.part[i], y.part[i]);
    return bits_of<Line<R>>(result);
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

// The same numbers in another type.
template <class To, class From>
INLINE To converted(From v) {
#if defined(__aarch64__)
    To to;
    if constexpr (sizeof(To) == sizeof(From)) {
        for (int i = 0; i < To::PARTS; i++) to.part[i] = __builtin_convertvector(v.part[i], typename To::Part);
    } else if constexpr (std::is_same_v<From, u8x16>) {
        const auto low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
        to = To{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
    } else if constexpr (std::is_same_v<From, i8x16>) {
        const auto low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
        to = To{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    } else {  // to bytes, which hold them
        const auto a = vuzp1q_u16((uint16x8_t)v.part[0], (uint16x8_t)v.part[1]);
        const auto b = vuzp1q_u16((uint16x8_t)v.part[2], (uint16x8_t)v.part[3]);
        to = (To)vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b);
    }
    return to;
#else
    return __builtin_convertvector(v, To);
#endif
}

// Bytes as numbers of 32 bits, without their sign: of __builtin_convertvector GCC makes moves of single numbers.
INLINE u32x16 widened(u8x16 v) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_maskz_cvtepu8_epi32(ALL, (__m128i)v);
#elif defined(__AVX2__)
    struct halves {
        __m256i part[2];
    };
    const auto x = (__m128i)v;
    return bits_of<u32x16>(halves{{_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))}});
#else
    return converted<u32x16>(v);
#endif
}

// Numbers I... of a and b, which are counted on from one to the other.
template <int... I, class V>
INLINE V shuffle(V a, V b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    typedef std::conditional_t<sizeof a[0] == 4, int32_t, std::conditional_t<sizeof a[0] == 2, int16_t, uint8_t>> Index;
    typedef Index Indices __attribute__((vector_size(sizeof(V))));
    return __builtin_shuffle(a, b, Indices{I...});
#endif
}

// Each of the first 8 numbers twice.
INLINE f32x16 first_twice(f32x16 v) {
#if defined(__aarch64__)
    const auto a = v.part[0], b = v.part[1];
    return {vzip1q_f32(a, a), vzip2q_f32(a, a), vzip1q_f32(b, b), vzip2q_f32(b, b)};
#else
    return shuffle<0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7>(v, v);
#endif
}

// Number 2i in the place of 2i + 1, and the other way round.
INLINE f32x16 pairs_turned(f32x16 v) {
#if defined(__aarch64__)
    for (auto& part : v.part) part = vrev64q_f32(part);
    return v;
#else
    return shuffle<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(v, v);
#endif
}

// f of all lanes, as a fixed tree: of halves, of quarters, ...
template <class T, class V, class F>
INLINE T fold(V v, F f) {
    typedef T Four __attribute__((vector_size(16)));
#if defined(__aarch64__)
    const Four four = f(Four(f(v.part[0], v.part[2])), Four(f(v.part[1], v.part[3])));
#else
    typedef T Eight __attribute__((vector_size(32)));
    struct eights {
        Eight part[2];
    };
    struct fours {
        Four part[2];
    };
    const auto e = bits_of<eights>(v);
    const auto q = bits_of<fours>(Eight(f(e.part[0], e.part[1])));
    const Four four = f(q.part[0], q.part[1]);
#endif
    return f(f(T(four[0]), T(four[2])), f(T(four[1]), T(four[3])));
}

INLINE float sum(f32x16 v) {
    return fold<float>(v, [](auto a, auto b) { return a + b; });
}
INLINE int32_t sum(i32x16 v) {  // one that overflows wraps around
    return (int32_t)fold<uint32_t>(v, [](auto a, auto b) { return a + b; });
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

#if defined(__aarch64__)
INLINE uint16x8_t lower_halves(u32x4 a, u32x4 b) { return vuzp1q_u16((uint16x8_t)a, (uint16x8_t)b); }
#endif

INLINE u32x16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_maskz_cvtepu16_epi32(ALL, (__m256i)x);  // of the other form GCC makes two halves
#elif defined(__aarch64__)
    u32x16 wide;
    for (int i = 0; i < 2; i++) {
        wide.part[2 * i] = vmovl_u16(vget_low_u16(x.part[i]));
        wide.part[2 * i + 1] = vmovl_high_u16(x.part[i]);
    }
    return wide;
#else
    return __builtin_convertvector(x, u32x16);
#endif
}
INLINE u16x16 narrow(u32x16 x) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_maskz_cvtepi32_epi16(ALL, (__m512i)x);
#elif defined(__aarch64__)
    u16x16 narrow;
    for (int i = 0; i < 2; i++) narrow.part[i] = lower_halves(x.part[2 * i], x.part[2 * i + 1]);
    return narrow;
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
#elif defined(__aarch64__)
    f32x16 to;
    for (int i = 0; i < 2; i++) {
        const auto eight = bits_of<float16x8_t>(x.part[i]);
        to.part[2 * i] = vcvt_f32_f16(vget_low_f16(eight)), to.part[2 * i + 1] = vcvt_high_f32_f16(eight);
    }
    return to;
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
#elif defined(__aarch64__)
    u16x16 to;
    for (int i = 0; i < 2; i++)
        to.part[i] = bits_of<u16x16::Part>(vcvt_high_f16_f32(vcvt_f16_f32(v.part[2 * i]), v.part[2 * i + 1]));
    return to;
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
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    u16x16 to;
    for (int i = 0; i < 2; i++)
        to.part[i] = bits_of<u16x16::Part>(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.part[2 * i]), v.part[2 * i + 1]));
    return to;
#else
    u32x16 x = bits_of<u32x16>(v);
    u32x16 rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    i32x16 nan = less(splat(0x7f800000), (i32x16)(x & 0x7fffffffu));
    return narrow(select(nan, u32x16{} + 0x7fc0u, rounded));
#endif
}

INLINE f32x16 from_bf16(u16x16 x) { return bits_of<f32x16>(widen(x) << 16); }

template <class V>
INLINE V load_as(const void* p) {
    V v;
#if defined(__aarch64__)
    if constexpr (is_wide<V>) {
        for (int i = 0; i < V::PARTS; i++) std::memcpy(&v.part[i], (const char*)p + 16 * i, 16);
        return v;
    }
#endif
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store_as(void* p, V v) {
#if defined(__aarch64__)
    if constexpr (is_wide<V>) {
        for (int i = 0; i < V::PARTS; i++) std::memcpy((char*)p + 16 * i, &v.part[i], 16);
        return;
    }
#endif
    std::memcpy(p, &v, sizeof v);
}

INLINE f32x16 load(const float* p) { return load_as<f32x16>(p); }
INLINE f32x16 load(const bf16* p) { return from_bf16(load_as<u16x16>(p)); }
INLINE f32x16 load(const f16* p) { return from_f16(load_as<u16x16>(p)); }
INLINE void store(float* p, f32x16 v) { store_as(p, v); }
INLINE void store(bf16* p, f32x16 v) { store_as(p, to_bf16(v)); }
INLINE void store(f16* p, f32x16 v) { store_as(p, to_f16(v)); }

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
