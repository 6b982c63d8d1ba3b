// What kernels share that go through rows and states in blocks tile by tile: see `ops/states.py`.
#pragma once

#include "simd.h"

namespace quire {

constexpr int64_t TILE = 16;  // `TILE` of states.py
static_assert(TILE == LANES);

INLINE int64_t padded(int64_t width) { return round_up(width, LANES); }

// 16 numbers, of which `left` are there where they are not all. `WHOLE`: all widths are multiples of 16.
template <bool WHOLE, class T>
INLINE f32x16 some(const T* p, int64_t left) {
    if constexpr (WHOLE) return load(p);
    return left > 0 ? load_some(p, left) : f32x16{};
}

template <bool WHOLE, class T>
INLINE void put(T* p, f32x16 v, int64_t left) {
    if constexpr (WHOLE) return store(p, v);
    store_some(p, v, left);
}

INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

}  // namespace quire
