// What is done row by row: norms, the gate, rotation with the store of keys and values, the embedding.
#include "simd.h"

namespace quire {
namespace {

template <class T>
void silu_mul(const T* x, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * size, *up = gate + size;
        T* to = out + row * size;
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = size - i < LANES ? size - i : LANES;
            f32x16 g = load_some(gate + i, n), u = load_some(up + i, n);
            store_some(to + i, rounded(g / (1.0f + exp(-g)), to) * u, n);
        }
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

// silu(gate) * up for x [rows, 2 * size] = gate | up; silu is rounded to the data type before the product.
QUIRE_API void quire_silu_mul(int32_t dtype, const void* x, void* out, int64_t rows, int64_t size) {
    if (dtype == F32) silu_mul((const float*)x, (float*)out, rows, size);
    if (dtype == BF16) silu_mul((const bf16*)x, (bf16*)out, rows, size);
    if (dtype == F16) silu_mul((const f16*)x, (f16*)out, rows, size);
}
