// Panels of a weight in fp32, bf16 or fp16 times rows, for linear.cpp.
#pragma once

#include "weight.h"

namespace quire {

template <int ROWS>
INLINE void times_pairs(const char* w, const uint32_t* x, int64_t in, Later later, Sums<ROWS>& sums) {
    for (int64_t j = 0; j < in; j += 2, w += 128, x += ROWS) {
        fetch(w), later.fetch();
        const u32x16 w0 = load_as<u32x16>(w), w1 = load_as<u32x16>(w + 64);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const u32x16 pair = splat_word(x + r);
            sums[r][0] = dot2(sums[r][0], w0, pair);
            sums[r][1] = dot2(sums[r][1], w1, pair);
        }
    }
}

// As `times_pairs`, for activations in fp32: the same products in the same order.
template <int ROWS>
INLINE void times_widened_pairs(const char* w, const uint32_t* x, int64_t in, Later later, Sums<ROWS>& sums) {
    for (int64_t j = 0; j < in; j += 2, w += 128) {
        fetch(w), later.fetch();
        const u32x16 w0 = load_as<u32x16>(w), w1 = load_as<u32x16>(w + 64);
        for (int odd = 0; odd < 2; odd++, x += ROWS) {
            const f32x16 v0 = bits_of<f32x16>(odd ? w0 & 0xffff0000u : w0 << 16);
            const f32x16 v1 = bits_of<f32x16>(odd ? w1 & 0xffff0000u : w1 << 16);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const f32x16 value = splat(load_as<float>(x + r));
                sums[r][0] = fma(v0, value, sums[r][0]);
                sums[r][1] = fma(v1, value, sums[r][1]);
            }
        }
    }
}

template <class T, int ROWS>
INLINE void times_single(const T* w, const uint32_t* x, int64_t in, Sums<ROWS>& sums) {
    for (int64_t j = 0; j < in; j++, w += PANEL, x += ROWS) {
        const f32x16 w0 = load(w), w1 = load(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const f32x16 value = splat(load_as<float>(x + r));
            sums[r][0] = fma(w0, value, sums[r][0]);
            sums[r][1] = fma(w1, value, sums[r][1]);
        }
    }
}

}  // namespace quire
