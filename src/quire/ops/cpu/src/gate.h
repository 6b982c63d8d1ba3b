// The gate of an MLP.
#pragma once

#include <type_traits>

#include "simd.h"

namespace quire {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, RELU2 = 3 };

// How many inputs each output has: a gate and what it multiplies, or what is squared.
INLINE int64_t inputs_of(int32_t activation) { return activation == RELU2 ? 1 : 2; }

// What the sigmoid is taken of, by which an activation multiplies its input. GELU's is that of `_gelu_tanh` in
// elementwise.py.
template <Activation ACTIVATION>
INLINE f32x16 sigmoid_input(f32x16 g) {
    if constexpr (ACTIVATION == SILU) return g;
    if constexpr (ACTIVATION == CLAMPED_SWIGLU) return g * 1.702f;
    return (g * g * 0.07135481627f + 1.5957691216f) * g;
}

// Calls body with the activation as a constant.
template <class Body>
inline void with_activation(int32_t activation, const Body& body) {
    if (activation == SILU) body(std::integral_constant<Activation, SILU>());
    if (activation == GELU_TANH) body(std::integral_constant<Activation, GELU_TANH>());
    if (activation == CLAMPED_SWIGLU) body(std::integral_constant<Activation, CLAMPED_SWIGLU>());
    if (activation == RELU2) body(std::integral_constant<Activation, RELU2>());
}

// activation(gate) * up; the former is rounded to the data type before the product. Of RELU2 there is no `up`.
template <Activation ACTIVATION, class T>
inline void gate_part(const T* gate, const T* up, T* out, int64_t size) {
    if constexpr (ACTIVATION == RELU2) {
        for (int64_t i = 0; i < size; i += LANES) {
            const f32x16 positive = max(load_some(gate + i, size - i), splat(0.0f));
            store_some(out + i, positive * positive, size - i);
        }
        return;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 g = load_some(gate + i, size - i), u = load_some(up + i, size - i);
        if constexpr (ACTIVATION == CLAMPED_SWIGLU) {
            g = -max(-g, splat(-7.0f));
            u = -max(-max(u, splat(-7.0f)), splat(-7.0f)) + 1.0f;
        }
        store_some(out + i, rounded(g / (1.0f + exp(-sigmoid_input<ACTIVATION>(g))), out) * u, size - i);
    }
}

}  // namespace quire
