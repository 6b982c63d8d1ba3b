// What a depthwise causal convolution reads: inputs of this step, and before it those in blocks (see `ops/recurrent.py`).
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace quire {

constexpr int64_t MOST_TAPS = 16;

// A step's spans, and the blocks of one layer that their inputs are in.
struct Inputs {
    uint8_t* blocks;  // of the layer, in the first block, where the inputs begin
    int64_t block_bytes, block_size, channels, taps, spans, table_width;
    const int64_t *row_starts, *context_lens, *tables;

    int64_t span_of(int64_t row) const {
        return std::upper_bound(row_starts, row_starts + spans + 1, row) - row_starts - 1;
    }
    int64_t position(int64_t span, int64_t row) const { return context_lens[span] - (row_starts[span + 1] - row); }
    int64_t block(int64_t span, int64_t position) const { return tables[span * table_width + position / block_size]; }
    template <class T>
    T* stored(int64_t block, int64_t position) const {
        return (T*)(blocks + block * block_bytes) + position % block_size * channels;
    }
};

// The inputs of one row's taps: of those in this step, `row(tap's row)` has them; null: before the beginning.
template <class T>
struct Taps {
    const T* seen[MOST_TAPS];

    template <class Row>
    Taps(const Inputs& in, int64_t span, int64_t row, Row of_row) {
        const int64_t begin = in.row_starts[span], position = in.position(span, row);
        for (int64_t tap = 0; tap < in.taps; tap++) {
            const int64_t back = in.taps - 1 - tap, at = position - back;
            if (row - back >= begin)
                seen[tap] = of_row(row - back);
            else
                seen[tap] = at < 0 ? nullptr : in.stored<T>(in.block(span, at), at);
        }
    }
    // 16 channels of the sum, taps in their order, of which `left` are there.
    f32x16 at(int64_t taps, const float* conv, int64_t channels, f32x16 total, int64_t first, int64_t left) const {
        for (int64_t tap = 0; tap < taps; tap++)
            if (seen[tap])
                total = fma(load_some(seen[tap] + first, left), load_some(conv + tap * channels + first, left), total);
        return total;
    }
};

}  // namespace quire
