// The choice of positions in sparse attention (https://arxiv.org/abs/2512.02556): scores of a small indexer, whose keys
// are the ends of the cache's rows, and the best of them.
//
// Scores are computed by items: some rows of one span against some key tiles. A score is a sum over heads of
// weight * relu(query . key); 16 heads lie side by side, so a lane adds up every sixteenth, and the lanes are added in
// order. A score is kept as a whole number in whose order scores are. When a round of rows has all of its scores, each
// row takes the best: the lowest of them is found bit by bit, by counting how many there are above.
//
// Why a row's bits depend on nothing else: a product and a lane have one fp32 accumulator each, in ascending order; key
// tiles are there for speed alone.

#include "latent_math.h"
#include "team.h"

namespace quire {

// Rows of a span, which continue one another, against key tiles tile .. tile + tiles - 1.
struct ChoiceItem {
    int64_t span, row, tokens, position, tile, tiles;  // first row and its position
};

// What the layers of a step share. Python fills it in: see sparse.py, which has the same fields.
struct ChoiceStep {
    KvCache kv;
    int64_t dtype, heads, width, top, table_width, most_tokens, stride, threads, scratch_bytes;
    const int64_t* tables;                // [spans, table_width]
    const ChoiceItem* item;               // of all rounds
    const int64_t *spans, *positions;     // [rows]
    char* scratch;                        // [threads, scratch_bytes]
    int32_t* ranks;                       // [rows of a round, stride]
};

namespace {

// -- scores -------------------------------------------------------------------------------------------------------

// A thread's memory for an item.
template <class L>
struct ChoiceScratch {
    using lane = typename L::lane;
    int64_t depth, panels;  // lanes of a key; of 16 heads
    lane* q;                // [tokens, panels, depth, 16]
    float* weights;         // [tokens, panels, 16], 0 behind the last head
    lane* tile;             // [KEY_TILE][depth, of whole vectors]
    int64_t tile_stride;
    float* scales;  // [KEY_TILE]
    float* scores;  // [KEY_TILE][panels * 16]
    char* zeros;    // a row of the cache

    // Lays it out from `at` on; the bytes that it takes.
    int64_t lay_out(char* at, const ChoiceStep& step) {
        char* const begin = at;
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = (std::remove_reference_t<decltype(pointer)>)at;
            at += (count * sizeof(*pointer) + 63) / 64 * 64;
        };
        depth = (step.width + L::NUMBERS - 1) / L::NUMBERS;
        panels = (step.heads + LANES - 1) / LANES;
        tile_stride = (step.width + WIDE<L> - 1) / WIDE<L> * LANES;
        take(q, step.most_tokens * panels * depth * LANES);
        take(weights, step.most_tokens * panels * LANES);
        take(tile, KEY_TILE * tile_stride);
        take(scales, KEY_TILE);
        take(scores, KEY_TILE * panels * LANES);
        take(zeros, step.kv.row_bytes());
        return at - begin;
    }
};

// Whole numbers in the order of x. There is one 0, since equal scores are equal whatever their sign.
INLINE i32x16 ranks_of(f32x16 x) {
    const i32x16 bits = bits_of<i32x16>(x + 0.0f);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

template <class L>
struct ChoiceWork {
    const ChoiceStep& step;
    ChoiceScratch<L>& scratch;
    const ChoiceItem& item;
    int64_t layer;

    // `ranks`: of the item's first row.
    void run(const void* q, const float* weights, int32_t* ranks) {
        std::memset(scratch.zeros, 0, step.kv.row_bytes());
        with_floats<L>(step.dtype, [&](auto number) {
            for (int64_t token = 0; token < item.tokens; token++) pack((const decltype(number)*)q, weights, token);
        });
        for (int64_t tile = item.tile; tile < item.tile + item.tiles; tile++) {
            const int64_t start = tile * KEY_TILE;
            write_out(start);
            for (int64_t token = 0; token < item.tokens; token++) {
                const int64_t keys = std::min(item.position + token + 1 - start, KEY_TILE);
                if (keys > 0) score(token, keys, ranks + token * step.stride + start);
            }
        }
    }

    // A row's queries, 16 heads side by side, and their weights.
    template <class T>
    void pack(const T* q, const float* weights, int64_t token) {
        const T* from = q + (item.row + token) * step.heads * step.width;
        for (int64_t panel = 0; panel < scratch.panels; panel++) {
            const int64_t first = panel * LANES, at = token * scratch.panels + panel;
            for (int64_t i = 0; i < step.width; i += WIDE<L>) {
                typename L::vector square[LANES] = {};
                const int64_t n = std::min(step.width - i, WIDE<L>);
                for (int64_t head = first; head < std::min(first + LANES, step.heads); head++)
                    square[head - first] = L::of_row(from + head * step.width + i, int(n));
                transpose(square);
                std::memcpy(scratch.q + (at * scratch.depth + i / L::NUMBERS) * LANES, square,
                            (n + L::NUMBERS - 1) / L::NUMBERS * sizeof square[0]);
            }
            const f32x16 own = load_some(weights + (item.row + token) * step.heads + first, step.heads - first);
            store(scratch.weights + at * LANES, own);
        }
    }

    // A tile's index keys as lanes; those that the last row does not see, which no one may have written, as zeros.
    void write_out(int64_t start) {
        const TileSource source{step.kv, step.tables + item.span * step.table_width, layer, 0, start, 0,
                                item.position + item.tokens};
        const int64_t behind = (step.kv.head_dim - step.width) * step.kv.number_bytes();
        for (int64_t k = 0; k < KEY_TILE && start + k < source.end; k += LANES) {
            const char* rows[LANES];
            if (start + k + KEY_TILE < source.end) {  // of the next tile, which are to be there by then
                source.rows(start + k + KEY_TILE, KEYS, scratch.zeros, rows);
                for (const char* row : rows)
                    for (int64_t at = behind; at < step.kv.row_bytes(); at += 64) __builtin_prefetch(row + at, 0, 2);
            }
            source.rows(start + k, KEYS, scratch.zeros, rows);
            if (step.kv.quantized()) source.scales(start + k, KEYS, scratch.scales + k);
            for (int64_t i = 0; i < LANES; i++)
                quire::write_out<L>(step.kv, rows[i] + behind, step.width, scratch.tile + (k + i) * scratch.tile_stride);
        }
    }

    // The ranks of a row's scores of the tile's first keys; behind them, up to a multiple of 16, lies anything.
    void score(int64_t token, int64_t keys, int32_t* ranks) {
        const int64_t stride = scratch.panels * LANES, all = (keys + LANES - 1) / LANES * LANES;
        for (int64_t panel = 0; panel < scratch.panels; panel += SCORE_VECTORS)
            multiply_keys<SCORE_VECTORS>(token, panel, all);
        const float* weights = scratch.weights + token * stride;
        for (int64_t k = 0; k < all; k += LANES) {
            f32x16 square[LANES] = {};
            for (int64_t i = 0; i < LANES; i++)
                for (int64_t at = 0; at < stride; at += LANES)
                    square[i] = fma(load(weights + at), max(load(scratch.scores + (k + i) * stride + at), splat(0.0f)),
                                    square[i]);
            transpose(square);
            f32x16 sum = square[0];
            for (int64_t i = 1; i < LANES; i++) sum += square[i];
            if (step.kv.quantized()) sum *= load(scratch.scales + k);
            const i32x16 made = ranks_of(sum);
            std::memcpy(ranks + k, &made, sizeof made);
        }
    }

    // For V panels of heads, or the fewer that there are.
    template <int V>
    void multiply_keys(int64_t token, int64_t panel, int64_t keys) {
        if constexpr (V > 1)
            if (scratch.panels - panel < V) return multiply_keys<V - 1>(token, panel, keys);
        const int64_t stride = scratch.panels * LANES, at = token * scratch.panels + panel;
        for (int64_t k = 0; k < keys; k += LANES)
            multiply<L, V>({scratch.tile + k * scratch.tile_stride, scratch.tile_stride,
                            scratch.q + at * scratch.depth * LANES, scratch.depth,
                            scratch.scores + k * stride + panel * LANES, stride, {(const char*)scratch.q, 0}});
    }
};

// -- the best of them ---------------------------------------------------------------------------------------------

i32x16 load_ranks(const int32_t* p) {
    i32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// How many of `count` ranks, a multiple of 16, are at least so much.
int64_t reaching(const int32_t* ranks, int64_t count, int32_t least) {
    i32x16 below = {};  // less one for each
    for (int64_t i = 0; i < count; i += LANES) below += less(load_ranks(ranks + i), splat(least));
    return count + sum(below);
}

// Writes the slots of the `top` best of a row's positions, ascending; of equal ones the first are taken.
void take_best(const ChoiceStep& step, const int64_t* table, int32_t* ranks, int64_t seen, int64_t* slots) {
    const int64_t count = (seen + LANES - 1) / LANES * LANES;
    constexpr int32_t LAST = std::numeric_limits<int32_t>::min();
    std::fill(ranks + seen, ranks + count, LAST);
    uint32_t bits = 0;  // of the lowest that is taken, from the highest bit on; its sign is turned
    for (int bit = 31; bit >= 0; bit--) {
        const uint32_t more = bits | 1u << bit;
        if (reaching(ranks, count, int32_t(more ^ 0x80000000u)) >= step.top) bits = more;
    }
    const int32_t lowest = int32_t(bits ^ 0x80000000u);
    int64_t ties = step.top;
    if (lowest < std::numeric_limits<int32_t>::max()) ties -= reaching(ranks, count, lowest + 1);
    for (int64_t i = 0; i < count; i += LANES) {
        const i32x16 there = load_ranks(ranks + i);
        if (!any(~less(there, splat(lowest)))) continue;
        for (int64_t p = i; p < std::min(i + LANES, seen); p++) {
            if (ranks[p] < lowest || (ranks[p] == lowest && ties-- <= 0)) continue;
            *slots++ = table[p / step.kv.block_size] * step.kv.block_size + p % step.kv.block_size;
        }
    }
}

// A round: the items that score some rows, and then these rows.
struct Round {
    int64_t first_item, last_item, first_row, last_row;
};

template <class L>
void choose(const ChoiceStep& step, int64_t layer, const void* q, const float* weights, int64_t* slots, Round round) {
    parallel(round.last_item - round.first_item, ONE_BY_ONE, int(step.threads), [&](int64_t i, int64_t, int thread) {
        ChoiceScratch<L> scratch;
        scratch.lay_out(step.scratch + thread * step.scratch_bytes, step);
        const ChoiceItem& item = step.item[round.first_item + i];
        int32_t* ranks = step.ranks + (item.row - round.first_row) * step.stride;
        ChoiceWork<L>{step, scratch, item, layer}.run(q, weights, ranks);
    });
    parallel_each(round.last_row - round.first_row, ONE_BY_ONE, [&](int64_t i) {
        const int64_t row = round.first_row + i;
        const int64_t* table = step.tables + step.spans[row] * step.table_width;
        take_best(step, table, step.ranks + i * step.stride, step.positions[row] + 1, slots + row * step.top);
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs; reads the shapes and `dtype` of the step.
QUIRE_API int64_t quire_choice_scratch_bytes(const ChoiceStep* step) {
    return with_lanes(step->dtype, [&](auto lanes) {
        ChoiceScratch<decltype(lanes)> scratch;
        return scratch.lay_out(nullptr, *step);
    });
}

// One layer, one round: q [rows, heads, width], weights [rows, heads], slots [rows, top]. A plain cache has q's data type.
QUIRE_API void quire_choose(const ChoiceStep* step, int64_t layer, const void* q, const float* weights, int64_t* slots,
                            int64_t first_item, int64_t last_item, int64_t first_row, int64_t last_row) {
    const Round round{first_item, last_item, first_row, last_row};
    with_lanes(step->dtype, [&](auto lanes) { choose<decltype(lanes)>(*step, layer, q, weights, slots, round); });
}
