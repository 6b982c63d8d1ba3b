// The gate of an MLP.
#pragma once

#include "simd.h"

namespace quire {

// silu(gate) * up; silu is rounded to the data type before the product.
template <class T>
inline void silu_mul_part(const T* gate, const T* up, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        f32x16 g = load_some(gate + i, size - i), u = load_some(up + i, size - i);
        store_some(out + i, rounded(g / (1.0f + exp(-g)), out) * u, size - i);
    }
}

}  // namespace quire
