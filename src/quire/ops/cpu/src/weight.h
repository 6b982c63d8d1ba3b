// A packed weight: panels of 32 outputs, as quire.ops.cpu.linear makes them.
#pragma once

#include "dots.h"

namespace quire {

enum Format : int32_t { DENSE_F32 = 0, DENSE_BF16 = 1, DENSE_F16 = 2, INT8 = 3, INT4 = 4, MXFP4 = 5, INT6 = 6 };

// Types of the numbers that scales and offsets consist of: those of `DType`, and whole ones.
enum Number : int32_t { U8 = 3, I8 = 4 };

// Scales and offsets of groups as quire.ops.coded describes them: [panels, groups, 32] each.
struct Numbers {
    const void* at;  // null: there are none
    int32_t type;    // a DType or a Number
    int32_t each;    // inputs that share one
    int64_t count;   // groups
};

// As quire.ops.cpu.linear describes it. INT8, INT6 and INT4 are codes of so many bits, whatever their scheme (ops/coded.py).
struct Weight {
    int32_t format;
    int64_t in, out;  // out: of this part of a product
    const void* data;
    const float* bias;  // [outputs] or null
    Numbers scales;     // of mxfp4: exponents
    Numbers offsets, block_scales, block_offsets;  // of codes
    const float* factors;                          // the same, [outputs] or null
    int32_t segment;     // inputs whose products are summed as whole numbers: within a group and a BLOCK
    int32_t shared;      // inputs of a row of activations that have one scale: a BLOCK, or a segment
    int32_t whole_rows;  // all of a row's BLOCKs have the same scale
    int32_t raised;      // what was added to the numbers of 6 bits, so that they are 0 to 63
    int8_t table[16];    // what codes of 4 bits stand for
    int64_t width;       // outputs of the whole product
    const Weight* next;  // its next part, whose outputs follow; null: this is the last one
};

constexpr int PANEL = 32;
constexpr int64_t BLOCK = 256;  // inputs of a row that are quantized with one scale
constexpr int AHEAD = 8192;  // bytes that are asked for before they are needed

inline int64_t panels(const Weight& w) { return (w.out + PANEL - 1) / PANEL; }

inline bool has_codes(const Weight& w) { return w.format == INT8 || w.format == INT4 || w.format == INT6; }

// Scales of a row of activations.
inline int64_t scales_a_row(const Weight& w) { return has_codes(w) ? (w.in + w.shared - 1) / w.shared : 0; }

// Sums of whole numbers of a row, of which each is scaled by itself.
inline int64_t segments_a_row(const Weight& w) { return has_codes(w) ? (w.in + w.segment - 1) / w.segment : 0; }

// Whether activations that were laid out for one of them serve the other.
inline bool laid_out_alike(const Weight& a, const Weight& b) {
    if (a.next || b.next || a.format != b.format || a.in != b.in) return false;
    if (a.segment != b.segment || a.shared != b.shared || a.whole_rows != b.whole_rows) return false;
    return a.raised == b.raised && !a.offsets.at == !b.offsets.at;
}

// Bytes of a panel.
inline int64_t panel_bytes(const Weight& w) {
    switch (w.format) {
        case DENSE_F32: return w.in * PANEL * 4;
        case DENSE_F16: return w.in * PANEL * 2;
        case DENSE_BF16: return round_up(w.in, 2) * PANEL * 2;
        case INT8: return round_up(w.in, 64) * PANEL;
        case INT6: return w.in * PANEL / 16 * 12;
        default: return w.in * PANEL / 2;
    }
}

inline const char* panel_data(const Weight& w, int64_t panel) { return (const char*)w.data + panel * panel_bytes(w); }

INLINE u32x16 splat_word(const void* p) { return splat(load_as<uint32_t>(p)); }

// How long lines of a weight are to stay in the caches (0: they are the first to leave). A step reads a weight once, and
// weights are larger than all caches: what can stay there is what the next step begins with, its Python above all. On Zen
// 5 this gains 3 to 8 % of a small model's step in int8 and int4; on Intel's processors such lines pass by the second level
// and what fills it, so the default stays where this has not been measured.
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
constexpr int LOCALITY = 0;
#else
constexpr int LOCALITY = 3;
#endif

// Asks for the two lines that 32 outputs of a panel take. Where they are wanted again, for the panel's next rows, `Later`
// has asked for them in the second level, and there they stay.
INLINE void fetch(const char* p) {
    __builtin_prefetch(p + AHEAD, 0, LOCALITY);
    __builtin_prefetch(p + AHEAD + 64, 0, LOCALITY);
}

// What is read after a panel, asked for while that one is multiplied: where several blocks of rows take turns at a
// panel, only the first one waits for memory, and memory would wait for the others.
struct Later {
    const char* at;
    int64_t step;  // bytes for each 128 of the panel

    void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += step;
    }
};

// A panel's 32 outputs of some rows. Rows of activations are read as words of 32 bits (a number in fp32, a pair of bf16, a
// quad of int8), those of all rows of a block side by side: word `step` of row `r` is x[step * ROWS + r].
template <int ROWS>
using Sums = f32x16[ROWS][2];

}  // namespace quire
