// The gate of an MLP.
#pragma once

#include "simd.h"

namespace quire {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1 };

// What the sigmoid is taken of, by which an activation multiplies its input. GELU's is that of `gelu_tanh_mul` in
// elementwise.py.
template <Activation ACTIVATION>
INLINE f32x16 sigmoid_input(f32x16 g) {
    if constexpr (ACTIVATION == SILU) return g;
    return (g * g * 0.07135481627f + 1.5957691216f) * g;
}

// activation(gate) * up; the former is rounded to the data type before the product.
template <Activation ACTIVATION = SILU, class T>
inline void gate_part(const T* gate, const T* up, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 g = load_some(gate + i, size - i), u = load_some(up + i, size - i);
        store_some(out + i, rounded(g / (1.0f + exp(-sigmoid_input<ACTIVATION>(g))), out) * u, size - i);
    }
}

}  // namespace quire
