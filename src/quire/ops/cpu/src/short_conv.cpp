// LFM2's gated short convolution over inputs in blocks: see `ops/short_conv.py`.
//
// Two loops over rows: what is convolved is made of two of a row's three parts, and stored; then it is convolved and
// gated. Each channel's sum runs over the taps in their order, so no bit depends on how many rows come at once.
#include "convolution.h"
#include "team.h"

namespace quire {

struct ShortConv {  // as in short_conv.py
    Inputs inputs;
    int64_t dtype, tokens;
    const void* x;  // [tokens, 3 * channels]: b, c, x
    const float *conv, *bias;  // [taps, channels], [channels]
    void *made, *out;  // [tokens, channels]: b * x, and the result
};

namespace {

template <class T>
void short_conv(const ShortConv& net) {
    const Inputs& in = net.inputs;
    const int64_t width = in.channels;
    const T* x = (const T*)net.x;
    T *made = (T*)net.made, *out = (T*)net.out;
    parallel_each(net.tokens, {8}, [&](int64_t row) {
        const T *first = x + row * 3 * width, *inner = first + 2 * width;
        T* to = made + row * width;
        for (int64_t i = 0; i < width; i += LANES)
            store_some(to + i, load_some(first + i, width - i) * load_some(inner + i, width - i), width - i);
        const int64_t span = in.span_of(row), position = in.position(span, row);
        if (const int64_t block = in.block(span, position))
            std::memcpy(in.stored<T>(block, position), to, width * sizeof(T));
    });
    parallel_each(net.tokens, {8}, [&](int64_t row) {
        const Taps<T> taps(in, in.span_of(row), row, [&](int64_t of) { return made + of * width; });
        const T* gate = x + row * 3 * width + width;
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t left = width - i;
            const f32x16 total = taps.at(in.taps, net.conv, width, load_some(net.bias + i, left), i, left);
            store_some(out + row * width + i, total * load_some(gate + i, left), left);
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

QUIRE_API void quire_short_conv(const ShortConv* net) {
    if (net->dtype == F32) short_conv<float>(*net);
    if (net->dtype == BF16) short_conv<bf16>(*net);
    if (net->dtype == F16) short_conv<f16>(*net);
}
