// Dense weights into the panels that products read (see weight.h).
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
