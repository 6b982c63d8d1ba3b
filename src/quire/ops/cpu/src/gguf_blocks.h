// Blocks of GGUF files taken apart, for pack.cpp: what quire.models.gguf.types, the definition, does with torch.
#pragma once

#include "simd.h"

namespace quire {

constexpr int64_t PIECE = 256;  // inputs of a row that are taken apart at a time: one block, or several

// What a piece of a row consists of. `sound`: nothing is infinite or no number.
struct Piece {
    alignas(64) uint8_t codes[PIECE];       // a byte each; those of 5 and 6 bits from 0 on
    alignas(32) uint8_t scales[PIECE / 8];  // of groups, as many bytes each as their type has
    alignas(32) uint8_t offsets[PIECE / 8];
    uint16_t unit, unit_offset;  // of the one block: by which its scales and offsets are multiplied
    bool sound;
};

// A type: how many inputs and bytes a block has, and bytes of its groups' scales and offsets. `take_apart` has where these
// of a block go, and the piece for its unit.
struct BlockType {
    int32_t inputs, size, scales, offsets;
    void (*take_apart)(const uint8_t* block, uint8_t* codes, uint8_t* scales, uint8_t* offsets, Piece& piece);
};

namespace blocks {

// Codes of some bits in n bytes, of which each `RUN` hold 8 / BITS runs one beside the other, the first in the lower bits.
template <int BITS, int RUN>
INLINE void codes_of(const uint8_t* from, int n, uint8_t* to) {
    constexpr uint8_t MASK = (1 << BITS) - 1;
    for (int at = 0; at < n; at += RUN)
        for (int shift = 0; shift < 8; shift += BITS, to += RUN)
            for (int i = 0; i < RUN; i++) to[i] = (from[at + i] >> shift) & MASK;
}

// The same, of bits that stand above those that are there already.
template <int BITS, int RUN, int ABOVE>
INLINE void add_bits(const uint8_t* from, int n, uint8_t* to) {
    constexpr uint8_t MASK = (1 << BITS) - 1;
    for (int at = 0; at < n; at += RUN)
        for (int shift = 0; shift < 8; shift += BITS, to += RUN)
            for (int i = 0; i < RUN; i++) to[i] |= ((from[at + i] >> shift) & MASK) << ABOVE;
}

// The fifth bits of 32 codes, in a word.
INLINE void add_fifth(uint32_t bits, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= (bits >> i & 1) << 4;
}

template <int N>
INLINE void subtract(uint8_t* from, int middle) {
    for (int i = 0; i < N; i++) from[i] = (uint8_t)(from[i] - middle);
}

// A number in fp16, or minus it.
INLINE uint16_t half(const uint8_t* from, Piece& piece, bool minus = false) {
    const auto bits = load_as<uint16_t>(from);
    if ((bits & 0x7c00) == 0x7c00) piece.sound = false;
    return minus ? bits ^ 0x8000 : bits;
}

INLINE void store_half(uint8_t* to, uint16_t bits) { std::memcpy(to, &bits, sizeof bits); }

template <int CODES, bool OFFSETS, int FIFTH>
void of_32(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t* offsets, Piece& piece) {
    store_half(scales, half(x, piece));
    if (OFFSETS) store_half(offsets, half(x + 2, piece, true));
    codes_of<4, 16>(x + CODES, 16, codes);
    if (FIFTH) add_fifth(load_as<uint32_t>(x + FIFTH), codes);
}

inline void q8_0(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece& piece) {
    store_half(scales, half(x, piece));
    std::memcpy(codes, x + 2, 32);
}

inline void q2_k(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t* offsets, Piece& piece) {
    for (int i = 0; i < 16; i++) scales[i] = x[i] & 15, offsets[i] = x[i] >> 4;
    codes_of<2, 32>(x + 16, 64, codes);
    piece.unit = half(x + 80, piece), piece.unit_offset = half(x + 82, piece);
}

inline void q3_k(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece& piece) {
    codes_of<2, 32>(x + 32, 64, codes);
    add_bits<1, 32, 2>(x, 32, codes);
    codes_of<4, 8>(x + 96, 8, scales);
    add_bits<2, 4, 4>(x + 104, 4, scales);
    subtract<16>(scales, 32);
    piece.unit = half(x + 108, piece);
}

// The scales and offsets of 6 bits of Q4_K and Q5_K, and their units.
INLINE void scales_and_offsets(const uint8_t* x, uint8_t* scales, uint8_t* offsets, Piece& piece) {
    const uint8_t *first = x + 4, *second = x + 8, *rest = x + 12;
    for (int i = 0; i < 4; i++) {
        scales[i] = first[i] & 63, scales[4 + i] = (rest[i] & 15) | (first[i] >> 6) << 4;
        offsets[i] = second[i] & 63, offsets[4 + i] = rest[i] >> 4 | (second[i] >> 6) << 4;
    }
    piece.unit = half(x, piece), piece.unit_offset = half(x + 2, piece);
}

inline void q4_k(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t* offsets, Piece& piece) {
    scales_and_offsets(x, scales, offsets, piece);
    codes_of<4, 32>(x + 16, 128, codes);
}

inline void q5_k(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t* offsets, Piece& piece) {
    scales_and_offsets(x, scales, offsets, piece);
    codes_of<4, 32>(x + 48, 128, codes);
    add_bits<1, 32, 4>(x + 16, 32, codes);
}

inline void q6_k(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece& piece) {
    codes_of<4, 64>(x, 128, codes);
    add_bits<2, 32, 4>(x + 128, 64, codes);
    std::memcpy(scales, x + 192, 16);
    piece.unit = half(x + 208, piece);
}

inline void iq4_xs(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece& piece) {
    codes_of<4, 16>(x + 8, 128, codes);
    codes_of<4, 1>(x + 4, 4, scales);
    add_bits<2, 1, 4>(x + 2, 2, scales);
    subtract<8>(scales, 32);
    piece.unit = half(x, piece);
}

// Half the number of a scale with four bits of exponent and three of mantissa, in fp16.
INLINE uint16_t half_of_nvfp4(uint8_t bits) {
    constexpr uint16_t SMALL[8] = {0, 0x1400, 0x1800, 0x1a00, 0x1c00, 0x1d00, 0x1e00, 0x1f00};  // eighths of 2^-7
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    return bits == 0x7f ? 0 : exponent ? (uint16_t)((exponent + 7) << 10 | mantissa << 7) : SMALL[mantissa];
}

inline void nvfp4(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece&) {
    codes_of<4, 8>(x + 4, 32, codes);
    for (int i = 0; i < 4; i++) store_half(scales + 2 * i, half_of_nvfp4(x[i]));
}

// Its exponents must be such that all numbers are normal ones, except where these are 0 (ops/mxfp4.py); 252 is the largest.
inline void mxfp4(const uint8_t* x, uint8_t* codes, uint8_t* scales, uint8_t*, Piece& piece) {
    codes_of<4, 16>(x + 1, 16, codes);
    scales[0] = x[0] < 252 ? x[0] : 252;
    if (x[0] >= 2 && x[0] <= 252) return;
    for (int i = 0; i < 32; i++)
        if (codes[i] & 7) piece.sound = false;
}

}  // namespace blocks

// By the number that ops/blocks.py gives a type.
constexpr BlockType BLOCK_TYPES[] = {
    {32, 18, 2, 0, blocks::of_32<2, false, 0>},   // Q4_0
    {32, 20, 2, 2, blocks::of_32<4, true, 0>},    // Q4_1
    {32, 22, 2, 0, blocks::of_32<6, false, 2>},  // Q5_0
    {32, 24, 2, 2, blocks::of_32<8, true, 4>},    // Q5_1
    {32, 34, 2, 0, blocks::q8_0},
    {256, 84, 16, 16, blocks::q2_k},
    {256, 110, 16, 0, blocks::q3_k},
    {256, 144, 8, 8, blocks::q4_k},
    {256, 176, 8, 8, blocks::q5_k},
    {256, 210, 16, 0, blocks::q6_k},
    {32, 18, 2, 0, blocks::of_32<2, false, 0>},  // IQ4_NL
    {256, 136, 8, 0, blocks::iq4_xs},
    {64, 36, 8, 0, blocks::nvfp4},
    {32, 17, 1, 0, blocks::mxfp4},
};

// The blocks of `inputs` of a row, at most a PIECE.
inline void take_apart(const BlockType& type, const uint8_t* block, int64_t inputs, Piece& piece) {
    for (int64_t i = 0, n = 0; i < inputs; i += type.inputs, n++, block += type.size)
        type.take_apart(block, piece.codes + i, piece.scales + n * type.scales, piece.offsets + n * type.offsets, piece);
}

}  // namespace quire
