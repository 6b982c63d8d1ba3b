// The cache of keys and values in memory: where a row lies, and writing one, plain or quantized.
//
// A block holds planes [layers, kv_heads, sides], and perhaps another model's behind or before them: from one block to
// the next it is `block_bytes`. A plane holds one head's keys (0) or values (1) of a block's tokens: [block_size,
// head_dim] numbers. With one side, a value is the beginning of its key (see latent.cpp). In the quantized formats these
// are codes of a byte, and behind them lie the tokens' scales, [block_size] fp32: a number is its code times its token's
// scale.
#pragma once

#include "simd.h"

namespace quire {

// The first three are `DType`.
enum KvFormat : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_F16 = 2, KV_INT8 = 3, KV_FP8 = 4 };

// Plane's index.
enum : int64_t { KEYS = 0, VALUES = 1 };

struct KvCache {
    char* data;  // of block 0
    int64_t block_bytes, kv_heads, block_size, head_dim;  // `block_size` is a power of two
    int32_t format, sides;  // a KvFormat; 2, or 1

    bool quantized() const { return format >= KV_INT8; }
    int64_t number_bytes() const { return format == KV_F32 ? 4 : quantized() ? 1 : 2; }
    int64_t row_bytes() const { return head_dim * number_bytes(); }
    int64_t plane_bytes() const { return block_size * (row_bytes() + (quantized() ? 4 : 0)); }
    char* plane(int64_t block, int64_t layer, int64_t head, int64_t which) const {
        const int64_t side = sides == 1 ? 0 : which;
        return data + block * block_bytes + ((layer * kv_heads + head) * sides + side) * plane_bytes();
    }
    // Where a position, or a slot, lies: in which block, and in which row of its planes. Divisions would take longer.
    int64_t block_of(int64_t position) const { return position >> __builtin_ctzll(block_size); }
    int64_t row_of(int64_t position) const { return position & (block_size - 1); }
    float* scales(char* plane) const { return (float*)(plane + block_size * row_bytes()); }
};

constexpr float INT8_LARGEST = 127.0f, FP8_LARGEST = 448.0f;

// Rounds to the nearest integer, ties to even, for |v| < 2^22.
INLINE f32x16 nearest(f32x16 v) { return (v + 12582912.0f) - 12582912.0f; }

INLINE f32x16 clamped(f32x16 v, float largest) { return -max(-max(v, splat(-largest)), splat(-largest)); }

// Bits 0 .. 7 of each lane: v as an e4m3 number (torch.float8_e4m3fn), rounded to nearest even, for |v| <= 448.
INLINE u32x16 to_fp8(f32x16 v) {
    u32x16 x = bits_of<u32x16>(v), sign = (x >> 24) & 0x80u, a = x & 0x7fffffffu;
    u32x16 normal = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1u)) >> 20;
    u32x16 small = bits_of<u32x16>(bits_of<f32x16>(a) + 16384.0f) - 0x46800000u;  // adding 2^14 rounds to 2^-9
    return sign | select(less(bits_of<i32x16>(a), splat(0x3c800000)), small, normal);
}

// A quantized row: the scale is the largest magnitude over the format's largest number. A row of zeros has scale 0; a
// row with a NaN or an infinity has scale NaN (and codes 0), so that whoever reads it sees that it is not finite.
template <class T>
INLINE float quantize_row(const T* row, int64_t size, bool fp8, uint8_t* codes) {
    i32x16 top = {};  // magnitudes as bits: their order is that of the numbers, and NaN is above infinity
    for (int64_t i = 0; i < size; i += LANES) {
        top = max(top, bits_of<i32x16>(load_some(row + i, size - i)) & 0x7fffffff);
    }
    const int32_t highest = max_of(top);
    const float largest = fp8 ? FP8_LARGEST : INT8_LARGEST, scale = bits_of<float>(highest) / largest;
    if (highest >= 0x7f800000 || scale == 0.0f) {
        std::memset(codes, 0, size);
        return highest >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? size - i : LANES;
        // A scale among the subnormal numbers is coarse: then the quotient may be above the largest.
        f32x16 v = clamped(load_some(row + i, n) / scale, largest);
        u32x16 wide = fp8 ? to_fp8(v) : bits_of<u32x16>(converted<i32x16>(nearest(v)));
        u8x16 bytes = converted<u8x16>(wide);
        std::memcpy(codes + i, &bytes, n);
    }
    return scale;
}

template <class To, class From>
INLINE void convert_row(const From* row, int64_t size, To* to) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? size - i : LANES;
        store_some(to + i, load_some(row + i, n), n);
    }
}

// Asks for the lines of one head's rows of keys and values in a slot. A slot's rows lie far apart and are rarely in a
// cache: without this, each store would wait for memory by itself.
INLINE void fetch_kv_rows(const KvCache& kv, int64_t slot, int64_t layer, int64_t head) {
    for (int64_t side = 0; side < kv.sides; side++) {
        const char* row = kv.plane(kv.block_of(slot), layer, head, side) + kv.row_of(slot) * kv.row_bytes();
        for (int64_t byte = 0; byte < kv.row_bytes(); byte += 64) __builtin_prefetch(row + byte, 1);
    }
}

// Writes one head's row of keys or values, `row` [head_dim], into the slot `block * block_size + offset`.
template <class T>
INLINE void store_kv_row(const KvCache& kv, int64_t slot, int64_t layer, int64_t head, int64_t which, const T* row) {
    const int64_t offset = kv.row_of(slot), size = kv.head_dim;
    char* plane = kv.plane(kv.block_of(slot), layer, head, which);
    char* to = plane + offset * kv.row_bytes();
    if (kv.quantized()) {
        kv.scales(plane)[offset] = quantize_row(row, size, kv.format == KV_FP8, (uint8_t*)to);
    } else if (kv.format == KV_F32) {
        convert_row(row, size, (float*)to);
    } else if (kv.format == KV_BF16) {
        convert_row(row, size, (bf16*)to);
    } else {
        convert_row(row, size, (f16*)to);
    }
}

}  // namespace quire
