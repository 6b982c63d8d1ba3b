// Tile registers (Intel AMX): eight of them, each of up to 16 rows of 64 bytes, and the products of two.
//
// Each function is one instruction. They are written in assembly, because GCC's intrinsics are macros that take a
// register's number as a literal only, and because GCC 12's do not tell the compiler which memory they read.
//
// Compiled with QUIRE_EMULATE_AMX they are plain C++ that does what Intel documents ("Intel 64 and IA-32 Architectures
// Software Developer's Manual", volume 2, LDTILECFG to TDPBF16PS), the rounding included, and that ends the process
// where the processor would refuse an instruction. That is how the tests run the products on any machine.
//
// On real hardware (an Intel Xeon) the self-tests of `quire doctor` passed, and texts were those of other kernels.
#pragma once

#include <cfloat>

#include "simd.h"

namespace quire {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// The registers' shapes, as LDTILECFG reads them. A register that is not used has no rows.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int height, int bytes) { rows[tile] = (uint8_t)height, row_bytes[tile] = (uint16_t)bytes; }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(__AMX_TILE__) && !defined(QUIRE_EMULATE_AMX)

constexpr bool TILES = true;  // this library has tile registers

INLINE void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

// Rows that lie `stride` bytes apart.
template <int TILE>
INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

// c[m][n] += the dot product of a's row m and b's column n, whose elements are pairs of bf16, in fp32.
template <int C, int A, int B>
INLINE void multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// As `multiply_pairs` for quads of signed bytes, in int32.
template <int C, int A, int B>
INLINE void multiply_quads() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#else

#if defined(QUIRE_EMULATE_AMX)
constexpr bool TILES = true;
#else
constexpr bool TILES = false;  // nothing below is used
#endif
#define EMULATED [[maybe_unused]] static __attribute__((noinline))

// An instruction that is being emulated, and the memory of a load or store: nothing, unless somebody counts them (see
// benchmarks/amx_counts.cpp).
struct Watched {
    enum Kind { LOAD, STORE, PRODUCT };
#if defined(QUIRE_WATCH_TILES)
    explicit Watched(Kind kind, const void* at = nullptr, int64_t stride = 0, int rows = 0, int bytes = 0);
    ~Watched();
#else
    explicit Watched(Kind, const void* = nullptr, int64_t = 0, int = 0, int = 0) {}
#endif
};

// A thread's registers.
struct Tiles {
    TileShapes shapes;
    bool configured = false;
    alignas(64) uint8_t data[8][TILE_ROWS][TILE_BYTES];

    void require(bool allowed) const {
        if (!configured || !allowed) __builtin_trap();
    }
    int rows(int tile) const { return shapes.rows[tile]; }
    int words(int tile) const { return shapes.row_bytes[tile] / 4; }
    void clear(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
};

inline Tiles& tiles() {
    static thread_local Tiles all;
    return all;
}

EMULATED void configure_tiles(const TileShapes& shapes) {
    tiles().configured = true;
    tiles().require(shapes.palette == 1 && shapes.start_row == 0);
    for (int t = 0; t < 8; t++) {
        const int rows = shapes.rows[t], bytes = shapes.row_bytes[t];
        tiles().require(rows <= TILE_ROWS && bytes <= TILE_BYTES && (rows == 0) == (bytes == 0));
        tiles().clear(t);
    }
    tiles().shapes = shapes;
}

EMULATED void release_tiles() { tiles().configured = false; }

template <int TILE>
EMULATED void zero_tile() {
    tiles().require(tiles().rows(TILE) > 0);
    tiles().clear(TILE);
}

template <int TILE>
EMULATED void load_tile(const void* from, int64_t stride) {
    const Watched load(Watched::LOAD, from, stride, tiles().rows(TILE), 4 * tiles().words(TILE));
    zero_tile<TILE>();
    for (int row = 0; row < tiles().rows(TILE); row++)
        std::memcpy(tiles().data[TILE][row], (const char*)from + row * stride, 4 * tiles().words(TILE));
}

template <int TILE>
EMULATED void store_tile(void* to, int64_t stride) {
    const Watched store(Watched::STORE, to, stride, tiles().rows(TILE), 4 * tiles().words(TILE));
    tiles().require(tiles().rows(TILE) > 0);
    for (int row = 0; row < tiles().rows(TILE); row++)
        std::memcpy((char*)to + row * stride, tiles().data[TILE][row], 4 * tiles().words(TILE));
}

// The registers of c += a b, whose shapes must fit: c [m, n], a [m, k], b [k, n].
template <int C, int A, int B>
INLINE void require_product() {
    static_assert(C != A && A != B && B != C, "the registers of a product must differ");
    const Tiles& t = tiles();
    t.require(t.rows(C) > 0 && t.rows(C) == t.rows(A) && t.words(C) == t.words(B) && t.words(A) == t.rows(B));
}

// Subnormal numbers are zeros, read or written.
INLINE float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

INLINE float widened(uint16_t x) { return flushed(bits_of<float>((uint32_t)x << 16)); }

// First and second numbers of the pairs are summed apart, in ascending order and from zero; then c takes both sums'
// sum. Every step is rounded to fp32.
template <int C, int A, int B>
EMULATED void multiply_pairs() {
    const Watched product(Watched::PRODUCT);
    require_product<C, A, B>();
    Tiles& t = tiles();
    uint16_t a[TILE_ROWS][32], b[TILE_ROWS][32];
    float wide[TILE_ROWS][32], c[TILE_ROWS][16];
    std::memcpy(a, t.data[A], sizeof a), std::memcpy(b, t.data[B], sizeof b), std::memcpy(c, t.data[C], sizeof c);
    for (int k = 0; k < t.rows(B); k++)
        for (int n = 0; n < 32; n++) wide[k][n] = widened(b[k][n]);
    for (int m = 0; m < t.rows(C); m++) {
        float sums[32] = {};
        for (int k = 0; k < t.rows(B); k++) {
            const float pair[2] = {widened(a[m][2 * k]), widened(a[m][2 * k + 1])};
            for (int n = 0; n < 32; n++) sums[n] = flushed(__builtin_fmaf(pair[n % 2], wide[k][n], sums[n]));
        }
        for (int n = 0; n < t.words(C); n++)
            c[m][n] = flushed(flushed(c[m][n]) + flushed(sums[2 * n] + sums[2 * n + 1]));
    }
    std::memcpy(t.data[C], c, sizeof c);
}

template <int C, int A, int B>
EMULATED void multiply_quads() {
    const Watched product(Watched::PRODUCT);
    require_product<C, A, B>();
    Tiles& t = tiles();
    int8_t a[TILE_ROWS][64], b[TILE_ROWS][64];
    int32_t c[TILE_ROWS][16];
    std::memcpy(a, t.data[A], sizeof a), std::memcpy(b, t.data[B], sizeof b), std::memcpy(c, t.data[C], sizeof c);
    for (int m = 0; m < t.rows(C); m++)
        for (int k = 0; k < t.rows(B); k++)
            for (int n = 0; n < t.words(C); n++)
                for (int i = 0; i < 4; i++) c[m][n] += a[m][4 * k + i] * b[k][4 * n + i];
    std::memcpy(t.data[C], c, sizeof c);
}

#endif

// -- one or two tiles of rows, each against one or two tiles of 16 outputs -----------------------------------------

// The registers: of the sums of row tile t and half h of the outputs, of a row tile and of a half.
constexpr int sums_tile(int t, int h) { return 2 * t + h; }
constexpr int row_tile(int t) { return 4 + t; }
constexpr int half_tile(int h) { return 6 + h; }

// For rows in tiles of this height, of which `depth` bytes are multiplied at a time.
inline TileShapes product_shapes(int height, int depth) {
    TileShapes shapes;
    for (int t = 0; t < 2; t++) {
        shapes.set(row_tile(t), height, depth);
        shapes.set(half_tile(t), depth / 4, TILE_BYTES);
        for (int h = 0; h < 2; h++) shapes.set(sums_tile(t, h), height, TILE_BYTES);
    }
    return shapes;
}

template <int COUNT, int HALVES = 2>
INLINE void zero_sums() {
    zero_tile<sums_tile(0, 0)>();
    if constexpr (HALVES == 2) zero_tile<sums_tile(0, 1)>();
    if constexpr (COUNT == 2) zero_tile<sums_tile(1, 0)>();
    if constexpr (COUNT == 2 && HALVES == 2) zero_tile<sums_tile(1, 1)>();
}

// Sums in memory: rows `stride` bytes apart, of a tile after that of the other; halves side by side.
template <int COUNT, int HALVES = 2>
INLINE void load_sums(const void* from, int64_t stride) {
    const char *first = (const char*)from, *second = first + TILE_ROWS * stride;
    load_tile<sums_tile(0, 0)>(first, stride);
    if constexpr (HALVES == 2) load_tile<sums_tile(0, 1)>(first + TILE_BYTES, stride);
    if constexpr (COUNT == 2) load_tile<sums_tile(1, 0)>(second, stride);
    if constexpr (COUNT == 2 && HALVES == 2) load_tile<sums_tile(1, 1)>(second + TILE_BYTES, stride);
}

template <int COUNT, int HALVES = 2>
INLINE void store_sums(void* to, int64_t stride) {
    char *first = (char*)to, *second = first + TILE_ROWS * stride;
    store_tile<sums_tile(0, 0)>(first, stride);
    if constexpr (HALVES == 2) store_tile<sums_tile(0, 1)>(first + TILE_BYTES, stride);
    if constexpr (COUNT == 2) store_tile<sums_tile(1, 0)>(second, stride);
    if constexpr (COUNT == 2 && HALVES == 2) store_tile<sums_tile(1, 1)>(second + TILE_BYTES, stride);
}

// Adds the products of a tile of rows with the halves that are in their registers.
template <bool QUADS, int T, int HALVES = 2>
INLINE void add_tile(const void* rows, int64_t stride) {
    load_tile<row_tile(T)>(rows, stride);
    if constexpr (QUADS) {
        multiply_quads<sums_tile(T, 0), row_tile(T), half_tile(0)>();
        if constexpr (HALVES == 2) multiply_quads<sums_tile(T, 1), row_tile(T), half_tile(1)>();
    } else {
        multiply_pairs<sums_tile(T, 0), row_tile(T), half_tile(0)>();
        if constexpr (HALVES == 2) multiply_pairs<sums_tile(T, 1), row_tile(T), half_tile(1)>();
    }
}

}  // namespace quire
