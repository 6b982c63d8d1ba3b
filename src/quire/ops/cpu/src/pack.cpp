// Weights into the panels that products read (see weight.h).
#include <algorithm>
#include <atomic>

#include "gguf_blocks.h"
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

// 8 codes of 4 bits that a word holds in order: the first four each to the lower half of a byte, the others to the upper.
uint32_t four_then_four(uint32_t codes) {
    auto halves = [](uint32_t x) {  // 16 bits to the lower halves of four bytes
        x = (x | x << 8) & 0x00ff00ffu;
        return (x | x << 4) & 0x0f0f0f0fu;
    };
    return halves(codes & 0xffffu) | halves(codes >> 16) << 4;
}

constexpr int64_t SOON = 256;  // bytes of a row that are asked for ahead: of 32 rows at a time memory sends none by itself

// Elements [n] of outputs' rows to [panels][padded][32], zeros where there is no output or element. A few of all of a
// panel's rows at a time: so each line comes and goes once.
template <class T, class Change>
void pack_columns(const char* const* rows, int64_t out, int64_t n, int64_t padded, T* to, const Change& change) {
    constexpr int64_t AT_ONCE = 64 / sizeof(T);
    parallel_each((out + PANEL - 1) / PANEL, {}, [=](int64_t panel) {
        T* p = to + panel * padded * PANEL;
        const int64_t count = std::min<int64_t>(PANEL, out - panel * PANEL);
        if (count < PANEL || padded > n) std::memset(p, 0, padded * PANEL * sizeof(T));
        for (int64_t first = 0; first < n; first += AT_ONCE)
            for (int64_t o = 0; o < count; o++) {
                const int64_t some = std::min(AT_ONCE, n - first);
                const char* at = rows[panel * PANEL + o] + first * sizeof(T);
                __builtin_prefetch(at + SOON);
                T line[AT_ONCE] = {};
                std::memcpy(line, at, some * sizeof(T));
                for (T& element : line) element = change(element);
                for (int64_t j = 0; j < some; j++) p[(first + j) * PANEL + o] = line[j];
            }
    });
}

// Adds to each byte; what is carried out of one is lost.
uint32_t add_to_bytes(uint32_t bytes, uint32_t more) {
    const uint32_t all = more * 0x01010101u;
    return ((bytes & 0x7f7f7f7fu) + (all & 0x7f7f7f7fu)) ^ ((bytes ^ all) & 0x80808080u);
}

// 16 bytes that are below 64, as three words: the lower four bits of the first eight, those of the second, and the upper two
// of all (see linear_coded.h).
INLINE void pack_six_bits(const uint32_t* quads, uint32_t* word) {
    constexpr uint32_t LOWER = 0x0f0f0f0fu, UPPER = 0x30303030u;
    const uint32_t a = quads[0], b = quads[1], c = quads[2], d = quads[3];
    word[0] = (a & LOWER) | (b & LOWER) << 4;
    word[PANEL] = (c & LOWER) | (d & LOWER) << 4;
    word[2 * PANEL] = (a & UPPER) >> 4 | (b & UPPER) >> 2 | (c & UPPER) | (d & UPPER) << 2;
}

// Rows [in] of bytes that are so once they are raised.
void pack_six_bits(const char* const* rows, int64_t out, int64_t in, uint32_t raised, uint32_t* to) {
    parallel_each((out + PANEL - 1) / PANEL, {}, [=](int64_t panel) {
        const int64_t count = std::min<int64_t>(PANEL, out - panel * PANEL);
        uint32_t* p = to + panel * in / 16 * 3 * PANEL;
        if (count < PANEL) std::memset(p, 0, in / 16 * 3 * PANEL * sizeof *p);
        for (int64_t first = 0; first < in; first += 64)
            for (int64_t o = 0; o < count; o++) {
                const char* row = rows[panel * PANEL + o];
                __builtin_prefetch(row + first + SOON);
                for (int64_t j = first; j < std::min(in, first + 64); j += 16) {
                    uint32_t quads[4];
                    std::memcpy(quads, row + j, sizeof quads);
                    for (uint32_t& quad : quads) quad = add_to_bytes(quad, raised);
                    pack_six_bits(quads, p + j / 16 * 3 * PANEL + o);
                }
            }
    });
}

constexpr uint8_t LARGEST = 252;  // exponent of MXFP4: a greater one scales only zeros

// Codes of 4 bits, a byte each in a word, the even ones' bits below the odd ones': see `even_then_odd`.
INLINE uint32_t even_then_odd_of(uint64_t codes) {
    auto four = [](uint64_t x) { return (uint32_t)(x | x >> 12 | x >> 24 | x >> 36) & 0xffffu; };
    constexpr uint64_t EVEN = 0x000f000f000f000full;
    return four(codes & EVEN) | four(codes >> 8 & EVEN) << 16;
}

// Codes of an output, a byte each, to its panel: those of n inputs, a multiple of 32; `word`: where the first of them go.
INLINE void store_codes(int32_t format, const uint8_t* codes, int64_t n, uint32_t* word) {
    const auto quads = (const uint32_t*)codes;
    switch (format) {
        case INT4:
            for (int64_t i = 0; i < n / 8; i++) word[i * PANEL] = quads[2 * i] | quads[2 * i + 1] << 4;
            return;
        case INT6:
            for (int64_t i = 0; i < n / 16; i++) pack_six_bits(quads + 4 * i, word + 3 * PANEL * i);
            return;
        case INT8:
            for (int64_t i = 0; i < n / 4; i++) word[i * PANEL] = quads[i];
            return;
        default:
            for (int64_t i = 0; i < n / 8; i++) word[i * PANEL] = even_then_odd_of(load_as<uint64_t>(codes + 8 * i));
    }
}

// A panel's numbers of some inputs from `first` on: where they are, how many, and of how many bytes.
struct Column {
    char* at;
    int64_t count;
    int32_t size;

    Column(const Numbers& of, int64_t panel, int64_t first, int64_t inputs)
        : at((char*)of.at), count(0), size(of.type == F16 ? 2 : 1) {
        if (!at) return;
        count = (inputs + of.each - 1) / of.each;
        at += (panel * of.count + first / of.each) * PANEL * size;
    }

    void store(const void* from, int64_t output) const {
        if (size == 2)
            for (int64_t i = 0; i < count; i++) ((uint16_t*)at)[i * PANEL + output] = ((const uint16_t*)from)[i];
        else
            for (int64_t i = 0; i < count; i++) ((uint8_t*)at)[i * PANEL + output] = ((const uint8_t*)from)[i];
    }

    void fill(uint8_t byte) const {
        if (count) std::memset(at, byte, count * PANEL * size);
    }
};

// Words of a panel that a PIECE of inputs takes.
int64_t words_a_piece(int32_t format) {
    return PANEL * (format == INT8 ? PIECE / 4 : format == INT6 ? PIECE / 16 * 3 : PIECE / 8);
}

// A panel of a weight that is made of blocks; false if a scale of it is infinite or no number.
bool pack_panel(const Weight& w, const BlockType& type, const char* const* rows, int64_t panel) {
    const int64_t outputs = std::min<int64_t>(PANEL, w.out - panel * PANEL), bytes = PIECE / type.inputs * type.size;
    auto* word = (uint32_t*)panel_data(w, panel);
    if (outputs < PANEL || (w.format == INT8 && w.in % 64)) std::memset(word, 0, panel_bytes(w));
    Piece piece;
    piece.sound = true;
    for (int64_t first = 0; first < w.in; first += PIECE, word += words_a_piece(w.format)) {
        const int64_t inputs = std::min(PIECE, w.in - first), at = first / type.inputs * type.size;
        const Column scales(w.scales, panel, first, inputs), offsets(w.offsets, panel, first, inputs);
        const Column units(w.block_scales, panel, first, inputs), more(w.block_offsets, panel, first, inputs);
        if (outputs < PANEL) {
            scales.fill(w.format == MXFP4 ? LARGEST : 0);
            for (const Column* each : {&offsets, &units, &more}) each->fill(0);
        }
        for (int64_t o = 0; o < outputs; o++) {
            const auto block = (const uint8_t*)rows[panel * PANEL + o] + at;
            for (int64_t ahead = bytes; ahead < 2 * bytes; ahead += 64) __builtin_prefetch(block + ahead);
            take_apart(type, block, inputs, piece);
            store_codes(w.format, piece.codes, inputs, word + o);
            scales.store(piece.scales, o);
            offsets.store(piece.offsets, o);
            units.store(&piece.unit, o);
            more.store(&piece.unit_offset, o);
        }
    }
    return piece.sound;
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
    const int64_t words = w->in / 8, groups = w->in / w->scales.each;
    parallel_each(panels(*w), {}, [=](int64_t panel) {
        for (int64_t o = 0; o < PANEL; o++) {
            const int64_t row = panel * PANEL + o;
            uint32_t* word = to + panel * words * PANEL + o;
            uint8_t* scale = to_scales + panel * groups * PANEL + o;
            for (int64_t j = 0; j < words; j++)
                word[j * PANEL] = row < w->out ? even_then_odd(load_as<uint32_t>(codes[row] + 4 * j)) : 0;
            for (int64_t g = 0; g < groups; g++)
                scale[g * PANEL] = row < w->out ? std::min(scales[row][g], LARGEST) : LARGEST;
        }
    });
}

// Packs codes of 8 bits (of which those of 6 bits are made), or two of 4 bits a byte, the even inputs' below; `rows` are the
// addresses of the outputs' rows.
QUIRE_API void quire_pack_codes(const Weight* w, const char* const* rows, uint32_t* to) {
    if (w->format == INT6) return pack_six_bits(rows, w->out, w->in, (uint32_t)w->raised, to);
    if (w->format == INT4) return pack_columns(rows, w->out, w->in / 8, w->in / 8, to, four_then_four);
    pack_columns(rows, w->out, w->in / 4, round_up(w->in, 64) / 4, to, [](uint32_t quad) { return quad; });
    for (int64_t o = 0; w->in % 4 && o < w->out; o++) {  // the last ones fill no word
        uint32_t* word = to + (o / PANEL * round_up(w->in, 64) / 4 + w->in / 4) * PANEL + o % PANEL;
        std::memcpy(word, rows[o] + w->in / 4 * 4, w->in % 4);
    }
}

// Packs `count` numbers an output, of `size` bytes each: scales or offsets.
QUIRE_API void quire_pack_numbers(const Weight* w, const char* const* rows, int64_t count, int32_t size, void* to) {
    auto same = [](auto number) { return number; };
    if (size == 1) pack_columns(rows, w->out, count, count, (uint8_t*)to, same);
    if (size == 2) pack_columns(rows, w->out, count, count, (uint16_t*)to, same);
    if (size == 4) pack_columns(rows, w->out, count, count, (uint32_t*)to, same);
}

// Packs blocks of a GGUF file, whose type has this number; `rows` are the addresses of the outputs' rows. What the weight
// points to is written. Returns 0 if a scale is infinite or no number, or makes numbers too large.
QUIRE_API int32_t quire_pack_blocks(const Weight* w, int32_t type, const char* const* rows) {
    std::atomic<bool> sound{true};
    parallel_each(panels(*w), {}, [&](int64_t panel) {
        if (!pack_panel(*w, BLOCK_TYPES[type], rows, panel)) sound.store(false, std::memory_order_relaxed);
    });
    return sound.load();
}
