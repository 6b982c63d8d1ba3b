// Dense weights into the panels that products read (see weight.h).
#include <algorithm>

#include "team.h"
#include "weight.h"

namespace quire {
namespace {

// Outputs' rows [in] to panels [in / step][32][step], zeros where there is no output or input.
template <class T>
void pack(const T* const* rows, int64_t out, int64_t in, int step, T* to) {
    const int64_t padded = round_up(in, step);
    parallel_each((out + PANEL - 1) / PANEL, {}, [=](int64_t panel) {
        T* p = to + panel * PANEL * padded;
        for (int64_t j = 0; j < padded; j += step)
            for (int64_t o = 0; o < PANEL; o++)
                for (int64_t i = 0; i < step; i++) {
                    const int64_t row = panel * PANEL + o;
                    *p++ = row < out && j + i < in ? rows[row][j + i] : T{};
                }
    });
}

// Where 8 codes of 4 bits go that a word holds in order: the even ones to the lower half, the odd ones to the upper.
uint32_t even_then_odd(uint32_t codes) {
    auto halves = [](uint32_t x) {  // of each byte's lower half, side by side
        x &= 0x0f0f0f0fu;
        x = (x | x >> 4) & 0x00ff00ffu;
        return (x | x >> 8) & 0xffffu;
    };
    return halves(codes) | halves(codes >> 4) << 16;
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of a packed weight of one of the dense formats.
QUIRE_API int64_t quire_packed_bytes(const Weight* w) { return panels(*w) * panel_bytes(*w); }

// Packs a dense weight of the format's type into `to`; `rows` are the addresses of its outputs' rows.
QUIRE_API void quire_pack(const Weight* w, const void* const* rows, void* to) {
    if (w->format == DENSE_F32) pack((const uint32_t* const*)rows, w->out, w->in, 1, (uint32_t*)to);
    if (w->format == DENSE_F16) pack((const uint16_t* const*)rows, w->out, w->in, 1, (uint16_t*)to);
    if (w->format == DENSE_BF16) pack((const uint16_t* const*)rows, w->out, w->in, 2, (uint16_t*)to);
}

// Packs a weight in MXFP4: `codes` and `scales` are the addresses of its outputs' rows, [in / 2] and [in / 32] bytes; see
// linear_mxfp4.h for where they go. Padding has codes 0.
QUIRE_API void quire_pack_mxfp4(const Weight* w, const char* const* codes, const uint8_t* const* scales, uint32_t* to,
                                uint8_t* to_scales) {
    const int64_t words = w->in / 8, groups = w->in / w->group;
    const uint8_t largest = 252;  // a greater one scales only zeros
    parallel_each(panels(*w), {}, [=](int64_t panel) {
        for (int64_t o = 0; o < PANEL; o++) {
            const int64_t row = panel * PANEL + o;
            uint32_t* word = to + panel * words * PANEL + o;
            uint8_t* scale = to_scales + panel * groups * PANEL + o;
            for (int64_t j = 0; j < words; j++)
                word[j * PANEL] = row < w->out ? even_then_odd(load_as<uint32_t>(codes[row] + 4 * j)) : 0;
            for (int64_t g = 0; g < groups; g++)
                scale[g * PANEL] = row < w->out ? std::min(scales[row][g], largest) : largest;
        }
    });
}
