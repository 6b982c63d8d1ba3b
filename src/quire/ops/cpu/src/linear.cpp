// Matrix products y = x W^T + b, for any number of rows, over weights packed in panels of 32 outputs.
//
// A panel's inputs lie one after the other, each with its 32 outputs side by side (bf16: pairs of inputs, int8: quads,
// int4: two quads a byte), so that a product reads it as one stream. Rows are taken in blocks of up to MAX_ROWS, whose
// sums stay in registers while the panel streams by. Each sum takes its inputs in ascending order, so a row's bits
// depend neither on the number of rows nor on how they are cut into blocks.

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "team.h"
#include "linear_amx_coded.h"
#include "linear_dense.h"
#include "linear_mxfp4.h"

namespace quire {
namespace {

constexpr int FEW_ROWS = 4;     // that tiles would not do faster
constexpr int64_t PREPARED = 4096;  // numbers that a thread lays out, at least
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int MAX_ROWS = 3;
#else
constexpr int MAX_ROWS = 2;
#endif

// -- all of a product ---------------------------------------------------------------------------------------------

// Of codes in groups, more rows find no registers.
constexpr int ROWS_IN_GROUPS = std::min(MAX_ROWS, MAX_ROWS_IN_GROUPS);
int most_rows(const Weight& w) { return has_codes(w) && (w.format != INT8 || w.scales.at) ? ROWS_IN_GROUPS : MAX_ROWS; }

// Rows in blocks of nearly equal size.
struct Blocks {
    int64_t rows, count;
    Blocks(const Weight& w, int64_t rows) : rows(rows), count((rows + most_rows(w) - 1) / most_rows(w)) {}
    int64_t begin(int64_t block) const { return block * rows / count; }
};

// Activations as the product reads them: words [block of rows][step][row of the block]. Quantized ones have a scale for
// each BLOCK of a row, and what the sum of products of each segment of a row begins with, side by side in the same way;
// where the weight has offsets, so does minus the sum of each segment's codes. Of mxfp4, words are pairs of bf16, or numbers in fp32.
struct Activations {
    uint32_t* words;
    float* scales;
    int32_t* starts;
    float* totals;
    bool pairs;
};

int64_t totals_a_row(const Weight& w) { return w.offsets.at ? segments_a_row(w) : 0; }

bool has_tiles(const Weight& w) { return TILES && (w.format == DENSE_BF16 || has_codes(w)); }

int64_t words_a_row(const Weight& w) {
    if (has_tiles(w)) return tiled_row_bytes(w) / 4;  // at least those below
    switch (w.format) {
        case INT8:
        case INT6:
        case INT4: return round_up(w.in, 4) / 4;
        case DENSE_BF16: return PAIRS ? round_up(w.in, 2) / 2 : round_up(w.in, 2);
        default: return w.in;
    }
}

// Rows that there is room for in the layout.
int64_t places(const Weight& w, int64_t rows) { return has_tiles(w) && rows ? RowTiles(rows).places() : rows; }

// Where results go: `stride` numbers from one row to the next.
template <class Out>
struct Results {
    Out* y;
    int64_t stride;
};

// Asks for the lines where a panel's outputs of some rows will go: stores that wait for them hold up all that follow.
template <class Out>
INLINE void fetch_results(int64_t panel, int64_t rows, int64_t row, Results<Out> to) {
    for (int64_t r = row; r < row + rows; r++) {
        const Out* at = to.y + r * to.stride + panel * PANEL;
        __builtin_prefetch(at, 1);
        __builtin_prefetch(at + PANEL - 1, 1);
    }
}

// Adds the bias and stores a panel's outputs of some rows.
template <class Out>
INLINE void store_rows(const Weight& w, int64_t panel, f32x16 (*sums)[2], int rows, int64_t row, Results<Out> to) {
    for (int half = 0; half < 2; half++) {
        const int64_t at = panel * PANEL + half * LANES, count = std::min<int64_t>(LANES, w.out - at);
        if (count <= 0) break;
        if (w.bias) {
            const f32x16 bias = load_some(w.bias + at, count);
            for (int r = 0; r < rows; r++) sums[r][half] += bias;
        }
        if (count == LANES) {
            for (int r = 0; r < rows; r++) store(to.y + (row + r) * to.stride + at, sums[r][half]);
        } else {
            for (int r = 0; r < rows; r++) store_some(to.y + (row + r) * to.stride + at, sums[r][half], count);
        }
    }
}

// The rows from `row` on times a panel. Each format is a function of its own, so that nothing else claims the registers.
template <Format FORMAT, int ROWS>
__attribute__((noinline)) void multiply_as(const Weight& w, int64_t panel, const Activations& x, int64_t row,
                                           Later later, f32x16 (*out)[2]) {
    const char* data = panel_data(w, panel);
    const uint32_t* words = x.words + row * words_a_row(w);
    const float* scales = x.scales + row * scales_a_row(w);
    const int32_t* starts = x.starts + row * segments_a_row(w);
    const float* totals = x.totals + row * totals_a_row(w);
    Sums<ROWS> sums = {};
    if constexpr (FORMAT == DENSE_BF16 && PAIRS) times_pairs<ROWS>(data, words, w.in, later, sums);
    if constexpr (FORMAT == DENSE_BF16 && !PAIRS) times_widened_pairs<ROWS>(data, words, w.in, later, sums);
    if constexpr (FORMAT == DENSE_F32) times_single<float, ROWS>((const float*)data, words, w.in, sums);
    if constexpr (FORMAT == DENSE_F16) times_single<f16, ROWS>((const f16*)data, words, w.in, sums);
    if constexpr (FORMAT == INT8 || FORMAT == INT6 || FORMAT == INT4)
        times_codes<FORMAT, ROWS>(w, panel, data, words, scales, starts, totals, later, sums);
    if constexpr (FORMAT == MXFP4) {
        if (x.pairs)
            times_mxfp4_pairs<ROWS>(w, panel, data, words, later, sums);
        else
            times_mxfp4<ROWS>(w, panel, data, words, later, sums);
    }
    std::memcpy(out, sums, sizeof sums);
}

template <int ROWS>
void multiply(const Weight& w, int64_t panel, const Activations& x, int64_t row, Later later, f32x16 (*out)[2]) {
    switch (w.format) {
        case DENSE_F32: return multiply_as<DENSE_F32, ROWS>(w, panel, x, row, later, out);
        case DENSE_BF16: return multiply_as<DENSE_BF16, ROWS>(w, panel, x, row, later, out);
        case DENSE_F16: return multiply_as<DENSE_F16, ROWS>(w, panel, x, row, later, out);
        case INT8: return multiply_as<INT8, ROWS>(w, panel, x, row, later, out);
        case INT6: return multiply_as<INT6, std::min(ROWS, ROWS_IN_GROUPS)>(w, panel, x, row, later, out);
        case INT4: return multiply_as<INT4, std::min(ROWS, ROWS_IN_GROUPS)>(w, panel, x, row, later, out);
        case MXFP4: return multiply_as<MXFP4, ROWS>(w, panel, x, row, later, out);
    }
}

template <int ROWS = MAX_ROWS>
void multiply(int64_t rows, const Weight& w, int64_t panel, const Activations& x, int64_t row, Later later,
              f32x16 (*out)[2]) {
    if (rows == ROWS) return multiply<ROWS>(w, panel, x, row, later, out);
    if constexpr (ROWS > 1) multiply<ROWS - 1>(rows, w, panel, x, row, later, out);
}

// -- activations ----------------------------------------------------------------------------------------------------

// Of n rows of bf16, `stride` apart: `in` numbers to words [in / 2][n] of two numbers each.
[[maybe_unused]] INLINE void to_pairs(const bf16* x, int64_t stride, int64_t in, int64_t n, uint32_t* to) {
    for (int64_t j = 0; j + 2 <= in; j += 2)
        for (int64_t r = 0; r < n; r++) *to++ = load_as<uint32_t>(x + r * stride + j);
    for (int64_t r = 0; r < n && in % 2; r++) *to++ = x[r * stride + in - 1].bits;
}

// Of n rows, `stride` apart: `in` numbers to words [words][n] of a number in fp32 each; what is behind `in` is 0.
template <class T>
void to_floats(const T* x, int64_t stride, int64_t in, int64_t n, int64_t words, uint32_t* to) {
    for (int64_t j = 0; j < words; j += LANES)
        for (int64_t r = 0; r < n; r++) {
            const u32x16 numbers = bits_of<u32x16>(load_some(x + r * stride + j, std::max<int64_t>(0, in - j)));
            for (int64_t i = 0; i < LANES && j + i < words; i++) to[(j + i) * n + r] = numbers[i];
        }
}

// Activations are laid out in pieces: BLOCK inputs, or fewer, of a block of rows; all of them where a row has one scale.
int64_t pieces(const Weight& w) { return w.whole_rows ? 1 : (w.in + BLOCK - 1) / BLOCK; }

// A piece of a block of n rows as int8.
template <class T>
void prepare_codes(const Weight& w, const T* x, int64_t begin, int64_t n, int64_t piece, const Activations& to) {
    const int64_t end = w.whole_rows ? w.in : std::min(w.in, (piece + 1) * BLOCK);
    BlockScale of_rows[MAX_ROWS];
    for (int64_t r = 0, first = piece * BLOCK; r < n && w.shared == BLOCK; r++)
        of_rows[r] = scale_of(x + (begin + r) * w.in + first, end - first);
    for (int64_t first = piece * BLOCK; first < end; first += w.shared) {
        const int64_t count = std::min<int64_t>(w.shared, end - first);
        if (w.shared < BLOCK)
            for (int64_t r = 0; r < n; r++) of_rows[r] = scale_of(x + (begin + r) * w.in + first, count);
        float* scales = to.scales + begin * scales_a_row(w) + first / w.shared * n;
        for (int64_t r = 0; r < n; r++) scales[r] = of_rows[r].scale;
        const int64_t start = first / w.segment * n;
        const Codes codes{w.segment, n, w.format == INT6 ? w.raised : INT8_OFFSET, to.words + begin * words_a_row(w) + first / 4 * n,
                          to.starts + begin * segments_a_row(w) + start,
                          w.offsets.at ? to.totals + begin * totals_a_row(w) + start : nullptr};
        quantize_rows(x + begin * w.in + first, w.in, count, n, of_rows, codes);
        if (w.shared < BLOCK && codes.totals)
            for (int64_t r = 0; r < n; r++) codes.totals[r] *= of_rows[r].scale;
    }
}

template <class T>
void prepare(const Weight& w, const T* x, const Blocks& blocks, int64_t block, int64_t piece, const Activations& to) {
    const int64_t begin = blocks.begin(block), n = blocks.begin(block + 1) - begin, words = words_a_row(w);
    if (has_codes(w)) return prepare_codes(w, x, begin, n, piece, to);
    const int64_t first = piece * BLOCK, in = std::min(BLOCK, w.in - first);
    const T* from = x + begin * w.in + first;
    uint32_t* at = to.words + begin * words;
    if constexpr (PAIRS && std::is_same_v<T, bf16>)
        if (w.format == DENSE_BF16 || w.format == MXFP4) return to_pairs(from, w.in, in, n, at + first / 2 * n);
    to_floats(from, w.in, in, n, std::min(BLOCK, words - first), at + first * n);
}

// One row is its own layout where its type is that of the words.
bool ready(const Weight& w, int32_t dtype, int64_t rows) {
    const bool pairs = (w.format == DENSE_BF16 || w.format == MXFP4) && PAIRS && dtype == BF16 && w.in % 2 == 0;
    return rows == 1 && (pairs || ((w.format == DENSE_F32 || w.format == MXFP4) && dtype == F32));
}

Activations lay_out(const Weight& w, int32_t dtype, int64_t rows, void* scratch) {
    uint32_t* words = (uint32_t*)scratch;
    float* scales = (float*)(words + round_up(places(w, rows) * words_a_row(w), 16));
    int32_t* starts = (int32_t*)scales + round_up(places(w, rows) * scales_a_row(w), 16);
    return {words, scales, starts, (float*)(starts + places(w, rows) * segments_a_row(w)), PAIRS && dtype == BF16};
}

// A panel stays in the cache for all blocks of rows; where there are few panels for many threads, it is shared out.
int64_t parts_of_panel(const Weight& w, int64_t blocks) {
    const int64_t wanted = (4 * threads() + panels(w) - 1) / panels(w);
    return std::min(blocks, wanted);
}

// A panel times the blocks of rows first .. last - 1. `next`: what is read after it.
template <class Out>
INLINE void times_blocks(const Weight& w, int64_t panel, const Activations& x, const Blocks& blocks, int64_t first,
                         int64_t last, const char* next, Results<Out> to) {
    const bool once = last - first == 1;  // then the panel itself is what memory sends all the time
    Later later{once ? panel_data(w, panel) : next, 128 / (last - first)};
    for (int64_t b = first; b < last; b++) {
        const int64_t row = blocks.begin(b), count = blocks.begin(b + 1) - row;
        fetch_results(panel, count, row, to);
        f32x16 sums[MAX_ROWS][2];
        multiply(count, w, panel, x, row, later, sums);
        later.at += panel_bytes(w) / 128 * later.step;
        store_rows(w, panel, sums, count, row, to);
    }
}

// Asks for what a panel begins with, which memory sends while activations are prepared.
void fetch_begin(const Weight& w, int64_t panel) {
    const char *data = panel_data(w, panel), *end = data + std::min<int64_t>(panel_bytes(w), 2 * AHEAD);
    for (; data < end; data += 64) __builtin_prefetch(data, 0, 2);
}

// Bytes that activations are laid out in.
int64_t layout_bytes(const Weight& w, int64_t rows) {
    const int64_t all = places(w, rows), scales = round_up(all * scales_a_row(w), 16);
    return 4 * (round_up(all * words_a_row(w), 16) + scales + all * (segments_a_row(w) + totals_a_row(w)));
}

// Few activations each thread lays out for itself: that takes less time than getting what others have laid out from their
// caches, and than taking the lines back that they have read of the product before. One copy a thread, behind a line that
// says whether it is done.
constexpr int64_t APART = 1 << 14, APART_OF_TWO = 1 << 18;  // numbers, at most
constexpr int64_t LINE = 64;                                // of a cache

bool apart(const Weight& w, int64_t rows) { return rows * w.in <= (threads() > 2 ? APART : APART_OF_TWO); }
int64_t copy_bytes(const Weight& w, int64_t rows) { return LINE + round_up(layout_bytes(w, rows), LINE); }

template <class T, class Out>
void linear(const Weight& w, const T* x, int32_t dtype, int64_t rows, Results<Out> to, char* scratch) {
    const Blocks blocks(w, rows);
    const int64_t parts = parts_of_panel(w, blocks.count), count = pieces(w), total = blocks.count * count;
    const bool is_ready = ready(w, dtype, rows), copies = !is_ready && apart(w, rows);
    const int64_t copy = copy_bytes(w, rows);
    for (int t = 0; copies && t < threads(); t++) *(bool*)(scratch + t * copy) = false;
    Before preparation(is_ready || copies ? 0 : total, PREPARED / (BLOCK * std::min<int64_t>(rows, MAX_ROWS)));
    parallel(panels(w) * parts, {}, threads(), [&](int64_t begin, int64_t end, int thread) {
        bool* const done = copies ? (bool*)(scratch + thread * copy) : nullptr;
        Activations input = lay_out(w, dtype, rows, copies ? scratch + thread * copy + LINE : scratch);
        if (is_ready) input.words = (uint32_t*)x;
        auto prepare_piece = [&](int64_t i) { prepare(w, x, blocks, i / count, i % count, input); };
        if (copies ? !*done : !preparation.done()) fetch_begin(w, begin / parts);
        preparation.finish(prepare_piece);
        if (copies && !*done) {
            for (int64_t i = 0; i < total; i++) prepare_piece(i);
            *done = true;
        }
        for (int64_t item = begin; item < end; item++) {
            const int64_t panel = item / parts, part = item % parts;
            const int64_t first = part * blocks.count / parts, last = (part + 1) * blocks.count / parts;
            const char* next = panel_data(w, std::min(panel + 1, panels(w) - 1));
            times_blocks(w, panel, input, blocks, first, last, next, to);
        }
    });
}

// -- all of a product in tile registers: see linear_amx.h -----------------------------------------------------------

// Whether tiles do it. bf16 has other bits there, so all of it is done there; quantized products have the same bits
// either way, and a few rows wait for memory in any case.
bool in_tiles(const Weight& w, int64_t rows) {
    return has_tiles(w) && (w.format == DENSE_BF16 || rows > FEW_ROWS);
}

// One row of bf16 that fills its tiles is its own layout.
template <class T>
bool ready_for_tiles(const Weight& w, int64_t rows) {
    return rows == 1 && w.format == DENSE_BF16 && std::is_same_v<T, bf16> && w.in % 32 == 0;
}

template <class T>
void prepare_tiled_row(const Weight& w, const T* x, int64_t row, const RowTiles& tiles, const Activations& to) {
    const int64_t tile = row / tiles.height;
    char* const at = (char*)to.words + tiles.begin(tile) * tiled_row_bytes(w) + row % tiles.height * TILE_BYTES;
    const T* const from = x + row * w.in;
    if (w.format == DENSE_BF16) {
        for (int64_t j = 0; j < w.in; j += 2 * LANES) {
            bf16 line[2 * LANES] = {};
            const int64_t count = std::min<int64_t>(w.in - j, 2 * LANES);
            if constexpr (std::is_same_v<T, bf16>)
                std::memcpy(line, from + j, count * sizeof(bf16));
            else
                for (int64_t i = 0; i < count; i += LANES) store(line + i, load_some(from + j + i, count - i));
            std::memcpy(at + in_tile(2 * j, tiles.height), line, sizeof line);
        }
        return;
    }
    float* const totals = w.offsets.at ? to.totals + row * totals_a_row(w) : nullptr;
    quantize_tiled(w, from, tiles.height, at, to.scales + row * scales_a_row(w), totals);
}

// Some rows of activations that meet panels in tiles: blocks of two tiles of rows each; the last block may have one.
struct TiledRows {
    const Weight& w;
    const Activations& input;
    const RowTiles& tiles;

    int64_t blocks() const { return (tiles.count + 1) / 2; }
    bool has_two(int64_t block) const { return 2 * block + 1 < tiles.count; }
    int64_t first_row(int64_t block) const { return tiles.begin(2 * block); }
    int64_t rows_of(int64_t block) const { return std::min(tiles.rows, first_row(block + 1)) - first_row(block); }

    template <int COUNT>
    TileBlock<COUNT> block(int64_t index) const {
        TileBlock<COUNT> x{{}, {}, {}, tiles.height};
        for (int t = 0; t < COUNT; t++) {
            const int64_t row = tiles.begin(2 * index + t);
            x.rows[t] = (const char*)input.words + row * tiled_row_bytes(w);
            x.scales[t] = input.scales + row * scales_a_row(w);
            x.totals[t] = input.totals + row * totals_a_row(w);
        }
        return x;
    }
};

// Adds what bytes begin .. end - 1 of a block's activations bring; `part` is what the first of them meet, unpacked.
template <int COUNT>
void add_part(const TiledRows& rows, int64_t block, int64_t panel, const char* part, int64_t begin, int64_t end,
              const Soon& soon, TileSums<COUNT, f32x16>& sums) {
    const TileBlock<COUNT> x = rows.block<COUNT>(block);
    if (rows.w.format == DENSE_BF16) return add_part_bf16(rows.w, part, begin, end, x, soon, sums);
    add_part_coded(rows.w, panel, part, begin, end, x, soon, sums);
}

template <int COUNT, class Out>
void store_block(const TiledRows& rows, int64_t block, int64_t panel, TileSums<COUNT, f32x16>& sums, Results<Out> to) {
    const RowTiles& tiles = rows.tiles;
    if (rows.w.factors) scale_outputs<COUNT>(rows.w, panel, tiles.height, sums);
    for (int t = 0; t < COUNT; t++) {
        const int64_t tile = 2 * block + t;
        store_rows(rows.w, panel, sums[t], (int)tiles.rows_of(tile), tiles.begin(tile), to);
    }
}

// Blocks of rows whose activations stay in the cache while panels come by.
struct TileStrip {
    int64_t first, last;  // blocks
    int64_t count() const { return last - first; }
};

// A strip times the panels first .. last - 1, a part of each in turns. Sums wait [panel][block].
template <class Out>
void times_strip(const TiledRows& rows, TileStrip strip, int64_t first, int64_t last, Results<Out> to) {
    const Weight& w = rows.w;
    alignas(64) TileSums<2, f32x16> waiting[WAITING];
    alignas(64) char codes[UNPACKED * PANEL];
    const bool once = strip.count() == 1, packed = is_packed(w);
    const int64_t bytes = w.format == DENSE_BF16 ? tiled_row_bytes(w) : w.in, each = stored_step(w);
    const int64_t size = std::min(bytes, part_bytes(w, strip.count()));
    auto of_block = [&](int64_t b, auto work) __attribute__((always_inline)) {
        rows.has_two(b) ? work(std::integral_constant<int, 2>{}) : work(std::integral_constant<int, 1>{});
    };
    auto sums_of = [&](int64_t panel, int64_t b, auto count) -> TileSums<decltype(count)::value, f32x16>& {
        return (TileSums<decltype(count)::value, f32x16>&)waiting[(panel - first) * strip.count() + b - strip.first];
    };
    auto multiply_part = [&](int64_t panel, int64_t begin, int64_t end) {
        const char *data = panel_data(w, panel), *part = data + begin / TILE_BYTES * each;
        if (packed) unpack(w, part, end - begin, codes);
        const bool turns = last - first > 1, back = turns && panel + 1 == last;  // to the next part of the first panel
        const char* soon = once ? data + AHEAD : panel_data(w, back ? first : panel + 1) + (back ? size / TILE_BYTES * each : 0);
        for (int64_t b = strip.first; b < strip.last; b++) {
            const int64_t share = once && packed ? 0 : each / TILE_BYTES, i = b - strip.first;
            const int64_t from = i * share / strip.count(), behind = (i + 1) * share / strip.count();
            const Soon ahead{soon, each, from * TILE_BYTES, behind * TILE_BYTES, once};
            if (end == bytes) fetch_results(panel, rows.rows_of(b), rows.first_row(b), to);
            of_block(b, [&](auto count) {
                add_part<count>(rows, b, panel, packed ? codes : part, begin, end, ahead, sums_of(panel, b, count));
            });
        }
    };
    for (int64_t begin = 0; begin < bytes; begin += size)
        for (int64_t panel = first; panel < last; panel++) multiply_part(panel, begin, std::min(bytes, begin + size));
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t b = strip.first; b < strip.last; b++)
            of_block(b, [&](auto count) { store_block<count>(rows, b, panel, sums_of(panel, b, count), to); });
}

// A strip times all of the panels first .. last - 1.
template <class Out>
void times_panels(const TiledRows& rows, TileStrip strip, int64_t first, int64_t last, Results<Out> to) {
    const int64_t at_once = strip.count() * block_bytes(rows.w) <= HELD ? 1 : WAITING / strip.count();
    for (; first < last; first += at_once) times_strip(rows, strip, first, std::min(last, first + at_once), to);
}

// All rows in strips of nearly equal size, `least` of them if there are so many blocks.
struct TileStrips {
    int64_t blocks, count;
    TileStrips(const TiledRows& rows, int64_t least)
        : blocks(rows.blocks()),
          count(std::max(std::min(least, blocks), (blocks + strip_blocks(rows.w) - 1) / strip_blocks(rows.w))) {}
    TileStrip operator[](int64_t i) const { return {i * blocks / count, (i + 1) * blocks / count}; }
};

constexpr int64_t TILED_ROWS = 8;  // that a thread prepares, at least

template <class T, class Out>
void tiled_linear(const Weight& w, const T* x, int64_t rows, Results<Out> to, void* scratch) {
    const RowTiles tiles(rows);
    Activations input = lay_out(w, BF16, rows, scratch);
    const bool is_ready = ready_for_tiles<T>(w, rows);
    if (is_ready) input.words = (uint32_t*)x;
    const TiledRows tiled{w, input, tiles};
    const TileStrips strips(tiled, parts_of_panel(w, tiled.blocks()));
    const TileShapes shapes = tile_shapes(w, tiles.height);
    Before preparation(is_ready ? 0 : rows, TILED_ROWS);
    parallel(strips.count * panels(w), {}, threads(), [&](int64_t begin, int64_t end, int) {
        preparation.finish([&](int64_t row) { prepare_tiled_row(w, x, row, tiles, input); });
        configure_tiles(shapes);
        for (int64_t item = begin; item < end;) {
            const int64_t strip = item / panels(w), panel = item % panels(w);
            const int64_t count = std::min(end - item, panels(w) - panel);
            times_panels(tiled, strips[strip], panel, panel + count, to);
            item += count;
        }
        release_tiles();
    });
}

template <class T, class Out>
void linear_on(const Weight& w, const T* x, int32_t dtype, int64_t rows, Out* y, char* scratch) {
    for (const Weight* part = &w; part; y += part->out, part = part->next) {
        const Results<Out> to{y, w.width};
        if constexpr (TILES)
            if (in_tiles(*part, rows)) {
                tiled_linear(*part, x, rows, to, scratch);
                continue;
            }
        linear(*part, x, dtype, rows, to, scratch);
    }
}

template <class T>
void linear_to(const Weight& w, const T* x, int32_t dtype, int64_t rows, void* y, int32_t y_dtype, char* scratch) {
    if (y_dtype == F32)
        linear_on(w, x, dtype, rows, (float*)y, scratch);
    else
        linear_on(w, x, dtype, rows, (T*)y, scratch);
}

// -- a product in pieces: see linear.h ------------------------------------------------------------------------------

// Bytes in which a part's activations are laid out, in whole lines.
int64_t part_scratch(const Weight& w, int64_t rows) { return round_up(layout_bytes(w, rows), LINE); }

template <class T>
void prepare_part(const Weight& w, const Task& t, const T* x, char* scratch) {
    const Activations to = lay_out(w, t.dtype, t.rows, scratch);
    if constexpr (TILES)
        if (in_tiles(w, t.rows)) {
            for (int64_t row = 0; row < t.rows && !ready_for_tiles<T>(w, t.rows); row++)
                prepare_tiled_row(w, x, row, RowTiles(t.rows), to);
            return;
        }
    const Blocks blocks(w, t.rows);
    for (int64_t i = 0; i < blocks.count * pieces(w) && !ready(w, t.dtype, t.rows); i++)
        prepare(w, x, blocks, i / pieces(w), i % pieces(w), to);
}

template <class T>
void prepare_all(const Task& t, const T* x) {
    char* scratch = (char*)t.scratch;
    for (const Weight* part = t.weight; part; scratch += part_scratch(*part, t.rows), part = part->next)
        prepare_part(*part, t, x, scratch);
}

// The panels first .. last - 1 of a part.
template <class T, class Out>
void multiply_part(const Weight& w, const Task& t, int64_t first, int64_t last, const char* next, const T* x,
                   char* scratch, Results<Out> to) {
    Activations input = lay_out(w, t.dtype, t.rows, scratch);
    if constexpr (TILES)
        if (in_tiles(w, t.rows)) {
            const RowTiles tiles(t.rows);
            if (ready_for_tiles<T>(w, t.rows)) input.words = (uint32_t*)x;
            const TiledRows tiled{w, input, tiles};
            const TileStrips strips(tiled, 1);
            configure_tiles(tile_shapes(w, tiles.height));
            for (int64_t i = 0; i < strips.count; i++) times_panels(tiled, strips[i], first, last, to);
            return release_tiles();
        }
    const Blocks blocks(w, t.rows);
    if (ready(w, t.dtype, t.rows)) input.words = (uint32_t*)x;
    for (int64_t panel = first; panel < last; panel++) {
        const char* after = panel + 1 < last ? panel_data(w, panel + 1) : next;
        times_blocks(w, panel, input, blocks, 0, blocks.count, after, to);
    }
}

template <class T, class Out>
void multiply_panels(const Task& t, int64_t first, int64_t last, const char* next, const T* x, Out* y) {
    char* scratch = (char*)t.scratch;
    for (const Weight* part = t.weight; part && last > 0; part = part->next) {
        const int64_t own = panels(*part);
        if (first < own) {
            const char* after = last > own ? panel_data(*part->next, 0) : next;
            const Results<Out> to{y, t.stride};
            multiply_part(*part, t, std::max<int64_t>(first, 0), std::min(last, own), after, x, scratch, to);
        }
        first -= own, last -= own, y += part->out;
        scratch += part_scratch(*part, t.rows);
    }
}

template <class T>
void multiply_panels(const Task& t, int64_t first, int64_t last, const char* next, const T* x) {
    if (t.y_dtype == F32)
        multiply_panels(t, first, last, next, x, (float*)t.y);
    else
        multiply_panels(t, first, last, next, x, (T*)t.y);
}

}  // namespace

void prepare(const Task& t) {
    if (t.dtype == F32) prepare_all(t, (const float*)t.x);
    if (t.dtype == BF16) prepare_all(t, (const bf16*)t.x);
    if (t.dtype == F16) prepare_all(t, (const f16*)t.x);
}

void multiply(const Task& t, int64_t first, int64_t last, const char* next) {
    if (t.dtype == F32) multiply_panels(t, first, last, next, (const float*)t.x);
    if (t.dtype == BF16) multiply_panels(t, first, last, next, (const bf16*)t.x);
    if (t.dtype == F16) multiply_panels(t, first, last, next, (const f16*)t.x);
}

}  // namespace quire

using namespace quire;

// Bytes that a `Task` needs to lay out the activations of `rows` rows.
QUIRE_API int64_t quire_linear_scratch(const Weight* w, int64_t rows) {
    int64_t bytes = 0;
    for (; w; w = w->next) bytes += part_scratch(*w, rows);
    return bytes;
}

// Bytes that `quire_linear` needs for them, with as many threads as this one's loops have now.
QUIRE_API int64_t quire_linear_workspace(const Weight* w, int64_t rows) {
    int64_t most = 0;
    for (; w; w = w->next) {
        const bool tiles = TILES && in_tiles(*w, rows);
        most = std::max(most, !tiles && apart(*w, rows) ? threads() * copy_bytes(*w, rows) : layout_bytes(*w, rows));
    }
    return most;
}

// y [rows, out] = x [rows, in] W^T + b, with y in x's data type or in fp32.
QUIRE_API void quire_linear(const Weight* w, const void* x, int32_t dtype, int64_t rows, void* y, int32_t y_dtype,
                            char* workspace) {
    if (dtype == F32) linear_to(*w, (const float*)x, dtype, rows, y, y_dtype, workspace);
    if (dtype == BF16) linear_to(*w, (const bf16*)x, dtype, rows, y, y_dtype, workspace);
    if (dtype == F16) linear_to(*w, (const f16*)x, dtype, rows, y, y_dtype, workspace);
}
