// Grouped-query attention over the paged cache, for any mixture of spans: causal, or with rows that see what follows.
//
// The work is cut into items: some KV heads of a row tile, which is some consecutive rows of one span. A head's rows
// are the tokens' query heads that share it, token by token. For each head, an item goes over the key tiles that its
// rows can see: it packs a tile's keys and values from the cache once (while the next tile's are on their way),
// multiplies, and merges the tile into the rows' running softmax (https://arxiv.org/abs/2205.14135).
//
// Why a row's bits depend on nothing else: key tiles lie at constant absolute positions; a score and an output number
// have one fp32 accumulator each, over head dimensions and over keys in ascending order (in tile registers 32 numbers are
// summed apart first: see attention_tiles.h); a tile, or 16 keys, that a row cannot see changes none of its numbers, so
// it does not matter which of them are left out.
//
// Rows of a tree all see the same keys up to the tree's base. The tiles before it are theirs together; those from
// there on, one or two, are packed for each row by itself, with the keys of its path.

#include "attention_few.h"
#include "team.h"

namespace quire {
// What the layers of a step share. Python fills it in: see attention.py, which has the same fields.
struct AttentionStep {
    KvCache kv;
    int64_t dtype, heads, window, ahead, table_width, items, most_rows, threads, scratch_bytes;
    const int64_t* tables;  // [spans, table_width]
    // [items, 7]: span, first row of the batch, rows, position of the first (in a tree: from its base on), position
    // behind the last that they see, KV head, KV heads
    const int64_t* item;
    char* scratch;          // [threads, scratch_bytes]
    Trees trees;
    float scale;
};

namespace {

// -- an item ----------------------------------------------------------------------------------------------------

// A thread's memory for an item. `m` is its rows: tokens times query heads.
template <class L>
struct Scratch {
    using lane = typename L::lane;
    Packed<L> tile;
    lane* q;           // [states, depth]: of the heads that take turns, all rows
    lane* transposed_q;  // in tiles, the same of few rows: of each head [depth, rows]
    float* scores;     // [m, KEY_TILE]
    lane* weights;     // [m, KEY_TILE / NUMBERS]: of the values
    float* out;        // [states, dims]
    f32x16* total;     // [states], lanes not yet summed
    float *top, *shrink;  // [states], [m]

    // Lays it out from `at` on, for at most `m` rows of a head; the bytes that it takes.
    int64_t lay_out(char* at, int64_t m, const KvCache& kv) {
        char* const begin = at;
        m = rows_in_tiles<L>(m);
        const int64_t states = std::max<int64_t>(m, kv.kv_heads * FEW_ROWS);
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = (std::remove_reference_t<decltype(pointer)>)at;
            at += (count * sizeof(*pointer) + 63) / 64 * 64;
        };
        tile.depth = round_up(kv.head_dim, L::NUMBERS * DEPTH_STEP<L>) / L::NUMBERS;
        tile.dims = (kv.head_dim + LANES * L::NUMBERS - 1) / (LANES * L::NUMBERS) * (LANES * L::NUMBERS);
        tile.panel = (tile.depth + LANES - 1) / LANES * LANES * LANES + LANES;
        take(tile.keys, GROUPS * tile.panel);
        take(tile.values, tile.dims / LANES * Packed<L>::COLUMNS);
        take(tile.key_scales, KEY_TILE);
        take(tile.value_scales, KEY_TILE);
        take(tile.apart, LANES * kv.row_bytes());
        take(q, states * tile.depth);
        take(transposed_q, IN_TILES<L> ? states * tile.depth : 0);
        take(scores, m * KEY_TILE);
        take(weights, m * KEY_TILE / L::NUMBERS);
        take(out, states * tile.dims);
        take(total, states);
        take(top, states);
        take(shrink, m);
        return at - begin;
    }
};

template <class L>
struct Item {
    const AttentionStep& step;
    Scratch<L>& scratch;
    int64_t span, row, tokens, position, end, head, heads, layer;  // `end`: behind the last position that is seen
    const float* sinks;  // a score of each query head that belongs to no key; or null
    const int64_t group = step.heads / step.kv.kv_heads;  // query heads of a KV head
    const int64_t base = step.trees.base(span);
    const int64_t* branches = nullptr;  // [tokens] positions of rows in a tree; `position` is the lowest

    int64_t rows() const { return tokens * group; }  // of a KV head
    // The keys that a row sees: first_seen .. behind_seen - 1 of its token's position.
    int64_t position_of(int64_t r) const { return branches ? branches[r / group] : position + r / group; }
    int64_t first_seen(int64_t at) const { return step.window ? std::max<int64_t>(0, at - step.window + 1) : 0; }
    int64_t behind_seen(int64_t at) const { return std::min(end, at + step.ahead + 1); }

    Groups groups(int64_t tile, int64_t r, int64_t stop) const {
        const int64_t from = first_seen(branches ? position : position_of(r)) - tile * KEY_TILE;
        const int64_t to = (branches ? end : behind_seen(position_of(stop - 1))) - tile * KEY_TILE;
        constexpr int64_t KEYS_AT_ONCE = std::max<int64_t>(LANES, L::NUMBERS * DEPTH_STEP<L>), EACH = KEYS_AT_ONCE / LANES;
        return {std::max<int64_t>(0, from) / KEYS_AT_ONCE * EACH,
                std::min(round_up(std::max<int64_t>(0, to), KEYS_AT_ONCE) / LANES, GROUPS)};
    }

    void run(const void* q, int64_t q_stride, void* out, Ahead& of_few) {
        Ahead none(step.kv, layer), &ahead = rows() <= FEW_ROWS ? of_few : none;
        if (end > base) branch();
        configure();
        const int64_t first = first_seen(position) / KEY_TILE;
        const int64_t last = branches ? base / KEY_TILE - 1 : (end - 1) / KEY_TILE;  // of the tiles of all rows
        const int64_t most = rows() <= FEW_ROWS ? heads : 1;  // heads that take turns at a tile
        for (int64_t h = head; h < head + heads; h += most) {
            for (int64_t k = 0; k < most; k++) begin(h + k, k * rows(), q, q_stride);
            for (int64_t tile = first; tile <= last; tile++)
                for (int64_t k = 0; k < most; k++) attend(source(h + k, tile), k * rows(), ahead);
            for (int64_t k = 0; branches && k < most; k++) attend_paths(h + k, k * rows(), last + 1);
            for (int64_t k = 0; k < most; k++) finish(h + k, k * rows(), out);
        }
        if constexpr (IN_TILES<L>) release_tiles();
    }

    void configure() const {
        if constexpr (IN_TILES<L>) is_few() ? configure_few(rows()) : configure_attention(rows());
    }
    bool is_few() const { return rows() <= FEW_ROWS; }

    // What a few rows read, in the order of `run`: many hide the reading anyway, and a tree's own tiles lie anywhere.
    Ahead::Part reads() const {
        const int64_t seen = end > base ? base / KEY_TILE * KEY_TILE : end;
        const int64_t* table = step.tables + span * step.table_width;
        return {table, first_seen(position), seen, head, rows() <= FEW_ROWS ? heads : 0};
    }

    void branch() {
        branches = step.trees.positions + row;
        position = *std::min_element(branches, branches + tokens);
        end = *std::max_element(branches, branches + tokens) + 1;
    }

    // For each row of a tree, the tiles from `first` on.
    void attend_paths(int64_t h, int64_t state, int64_t first) {
        Ahead none(step.kv, layer);
        for (int64_t t = 0; t < tokens; t++) {
            Item one{step, scratch, span, row + t, 1, branches[t], branches[t] + 1, head, heads, layer, sinks};
            one.configure();
            one.transpose_queries(state + t * group);
            for (int64_t tile = std::max(first, first_seen(one.position) / KEY_TILE); tile * KEY_TILE < one.end; tile++)
                one.attend(one.source(h, tile), state + t * group, none);
        }
        configure();
    }

    TileSource source(int64_t h, int64_t tile) const {
        const int64_t* table = step.tables + span * step.table_width;
        return {step.kv, table, layer, h, tile * KEY_TILE, first_seen(position), end, base, step.trees.path(row)};
    }

    // Where row r of KV head h lies in [tokens, heads, head_dim], as a query head.
    int64_t query_head(int64_t h, int64_t r) const { return h * group + r % group; }

    // A head's rows begin at `state` in the memory that outlives a tile.
    void begin(int64_t h, int64_t state, const void* q, int64_t q_stride) {
        const int64_t size = step.kv.head_dim;
        for (int64_t r = 0; r < rows(); r++) {
            const int64_t from = (row + r / group) * q_stride + query_head(h, r) * size;
            pack_query<L>(step.dtype, q, from, size, scratch.tile.depth, scratch.q + (state + r) * scratch.tile.depth);
            scratch.top[state + r] = sinks ? sinks[query_head(h, r)] * LOG2_E : LOWEST;
            scratch.total[state + r] = f32x16{sinks ? 1.0f : 0.0f};
        }
        std::memset(scratch.out + state * scratch.tile.dims, 0, rows() * scratch.tile.dims * sizeof(float));
        transpose_queries(state);
    }

    // The queries of few rows, for `score_transposed`.
    void transpose_queries(int64_t state) {
        const int64_t depth = scratch.tile.depth, count = rows();
        typename L::lane* to = scratch.transposed_q + state * depth;
        for (int64_t d = 0; IN_TILES<L> && is_few() && d < depth; d++)
            for (int64_t r = 0; r < count; r++) *to++ = scratch.q[(state + r) * depth + d];
    }

    void finish(int64_t h, int64_t state, void* out) {
        const int64_t size = step.kv.head_dim;
        for (int64_t r = 0; r < rows(); r++) {
            const int64_t to = ((row + r / group) * step.heads + query_head(h, r)) * size;
            const float *from = scratch.out + (state + r) * scratch.tile.dims, total = sum(scratch.total[state + r]);
            with_floats<L>(step.dtype, [&](auto number) {
                for (int64_t i = 0; i < size; i += LANES)
                    store_some((decltype(number)*)out + to + i, load(from + i) / total, size - i);
            });
        }
    }

    // One key tile, merged into all rows.
    void attend(const TileSource& source, int64_t state, Ahead& ahead) {
        if constexpr (FEW_APART<L>)
            if (is_few()) return attend_few(source, state, ahead);
        const int64_t tile = source.start / KEY_TILE;
        const Groups seen = groups(tile, 0, rows());
        if (IN_TILES<L> && is_few()) score_transposed(source, state, ahead, seen);
        for (int64_t first = 0; first < GROUPS && !(IN_TILES<L> && is_few()); first += VECTORS) {
            const int64_t end = std::min(first + VECTORS, seen.end);
            pack_keys(source, ahead, std::max(first, seen.first), end, scratch.tile);
            multiply_keys(tile, state, first);
        }
        each_block(tile, [&](int64_t r, int64_t n, Groups g) {
            for (int64_t i = r; i < r + n; i++) softmax(tile, i, state + i, g);
        });
        pack_values(source, ahead, seen.first, seen.end, scratch.tile);
        multiply_values(tile, state);
    }

    // Scores of few rows, in tiles, two groups of keys at a time: in place, or written out as they would lie.
    void score_transposed(const TileSource& source, int64_t state, Ahead& ahead, Groups seen) {
        if constexpr (IN_TILES<L>) {
            const Packed<L>& p = scratch.tile;
            const int64_t row = p.depth * sizeof(typename L::lane), size = step.kv.row_bytes();
            const bool codes = step.kv.quantized(), in_place = !codes && row == size;
            for (int64_t g = seen.first; g < seen.end; g += 2) {
                const int64_t count = std::min<int64_t>(2, seen.end - g);
                const char *keys[2], *next[2];
                for (int64_t i = 0; i < count; i++) {
                    const int64_t position = source.start + (g + i) * LANES;
                    typename L::lane* apart = p.keys + (g + i) * p.panel;
                    next[i] = ahead.next();
                    if (codes) {
                        source.scales(position, KEYS, p.key_scales + (g + i) * LANES);
                        source.scales(position, VALUES, p.value_scales + (g + i) * LANES);
                    }
                    keys[i] = source.group(position, KEYS, in_place ? (char*)apart : p.apart);
                    if (in_place) continue;
                    for (int64_t r = 0; r < LANES; r++)
                        pack_query<L>(step.kv.format, keys[i] + r * size, 0, step.kv.head_dim, p.depth, apart + r * p.depth);
                    keys[i] = (const char*)apart;
                }
                alignas(64) f32x16 scores[2][LANES];
                const typename L::lane* q = scratch.transposed_q + state * p.depth;
                const auto score = count == 2 ? quire::score_transposed<2> : quire::score_transposed<1>;
                score(keys, row, next, LANES * size, q, p.depth, rows(), (float*)scores);
                for (int64_t i = 0; i < count; i++) {
                    transpose(scores[i]);
                    for (int64_t r = 0; r < rows(); r++) store(scratch.scores + r * KEY_TILE + (g + i) * LANES, scores[i][r]);
                }
            }
        }
    }

    // `attend` for few rows.
    void attend_few(const TileSource& source, int64_t state, Ahead& ahead) {
        const int64_t tile = source.start / KEY_TILE, stride = step.kv.row_bytes();
        const Groups seen = groups(tile, 0, rows());
        const int64_t count = seen.end - seen.first, position = source.start + seen.first * LANES;
        const Packed<L>& p = scratch.tile;
        const char *at[GROUPS], *next_keys[GROUPS], *next_values[GROUPS];
        auto find = [&](int64_t which) {  // what lies apart goes where keys are packed otherwise
            for (int64_t g = 0; g < count; g++)
                at[g] = source.group(position + g * LANES, which, (char*)(p.keys + g * p.panel));
        };
        for (int64_t g = 0; g < count; g++) next_keys[g] = ahead.next();
        for (int64_t g = 0; g < count; g++) next_values[g] = ahead.next();
        find(KEYS);
        for (int64_t g = seen.first; step.kv.quantized() && g < seen.end; g++) {
            source.scales(source.start + g * LANES, KEYS, p.key_scales + g * LANES);
            source.scales(source.start + g * LANES, VALUES, p.value_scales + g * LANES);
        }
        score_keys<L>(step.kv, {at, next_keys, stride}, count, scratch.q + state * p.depth, p.depth, rows(),
                      scratch.scores + seen.first * LANES);
        for (int64_t r = 0; r < rows(); r++) softmax(tile, r, state + r, seen);
        find(VALUES);
        constexpr int64_t STEP = LANES / L::NUMBERS;
        add_values<L>(step.kv, {at, next_values, stride}, count, scratch.weights + seen.first * STEP, scratch.shrink, rows(),
                      scratch.out + state * p.dims, p.dims);
    }

    // The scores of `VECTORS` groups of keys from `first` on.
    void multiply_keys(int64_t tile, int64_t state, int64_t first) {
        const Packed<L>& p = scratch.tile;
        each_block(tile, [&](int64_t r, int64_t n, Groups g) {
            const int64_t from = std::max(first, g.first), to = std::min(first + VECTORS, g.end);
            if (from >= to) return;
            const typename L::lane* q = scratch.q + (state + r) * p.depth;
            float* scores = scratch.scores + r * KEY_TILE + from * LANES;
            multiply<L>(n, to - from, {q, p.depth, p.keys + from * p.panel, p.panel, p.depth,
                                              scores, KEY_TILE, nullptr});
        });
    }

    void multiply_values(int64_t tile, int64_t state) {
        const Packed<L>& p = scratch.tile;
        constexpr int64_t LENGTH = KEY_TILE / L::NUMBERS, STEP = LANES / L::NUMBERS;  // lanes of a tile and of a group
        const int64_t panels = (step.kv.head_dim + LANES - 1) / LANES;
        for (int64_t first = 0; first < panels; first += VECTORS)
            each_block(tile, [&](int64_t r, int64_t n, Groups g) {
                if (g.first >= g.end) return;
                const typename L::lane* weights = scratch.weights + r * LENGTH + g.first * STEP;
                const typename L::lane* values = p.values + first * Packed<L>::COLUMNS + g.first * STEP * LANES;
                float* out = scratch.out + (state + r) * p.dims + first * LANES;
                multiply<L>(n, std::min<int64_t>(VECTORS, panels - first),
                                  {weights, LENGTH, values, Packed<L>::COLUMNS, (g.end - g.first) * STEP,
                                   out, p.dims, scratch.shrink + r});
            });
    }

    // Calls work(first row, rows, groups that they see) for the rows in blocks of the products' size.
    template <class F>
    void each_block(int64_t tile, F work) const {
        for (int64_t r = 0; r < rows(); r += BLOCK_ROWS<L>) {
            const int64_t n = std::min(BLOCK_ROWS<L>, rows() - r);
            work(r, n, groups(tile, r, r + n));
        }
    }

    // Row r's scores become weights 2^(score - top); also its running top and total, at `state`, and how much to shrink
    // what it has so far.
    void softmax(int64_t tile, int64_t r, int64_t state, Groups g) {
        const int64_t position = position_of(r), to = behind_seen(position) - tile * KEY_TILE;
        const int64_t from = first_seen(position) - tile * KEY_TILE;
        const Groups whole{0, GROUPS};
        const bool all = from <= 0 && to >= KEY_TILE;
        auto weigh = [&](auto codes, auto seen) {
            scratch.shrink[r] = softmax_row<L, decltype(codes)::value, decltype(seen)::value>(
                scratch.scores + r * KEY_TILE, step.scale, scratch.tile, all ? whole : g,
                int32_t(std::max<int64_t>(from, 0)), int32_t(std::min<int64_t>(to, KEY_TILE)),
                scratch.weights + r * KEY_TILE / L::NUMBERS, scratch.top[state], scratch.total[state]);
        };
        auto of = [&](auto codes) { all ? weigh(codes, std::true_type{}) : weigh(codes, std::false_type{}); };
        step.kv.quantized() ? of(std::true_type{}) : of(std::false_type{});
    }
};

// -- a layer ----------------------------------------------------------------------------------------------------

template <class L>
void attend(const AttentionStep& step, int64_t layer, const void* q, int64_t q_stride, const float* sinks, void* out) {
    // Where no item is much longer than another, who takes several can read ahead from one to the next.
    auto cost = [&](int64_t i) { return step.item[i * 7 + 2] * step.item[i * 7 + 4]; };
    const bool even = step.items && cost(0) <= 2 * cost(step.items - 1);  // the longest come first
    parallel(step.items, {1, even ? Ahead::MOST : 1}, step.threads, [&](int64_t first, int64_t last, int thread) {
        Scratch<L> scratch;
        scratch.lay_out(step.scratch + thread * step.scratch_bytes, step.most_rows, step.kv);
        auto item = [&](int64_t i) {
            const int64_t* of = step.item + i * 7;
            return Item<L>{step, scratch, of[0], of[1], of[2], of[3], of[4], of[5], of[6], layer, sinks};
        };
        Ahead ahead(step.kv, layer);
        for (int64_t i = first; i < last; i++) ahead.add(item(i).reads());
        ahead.begin();
        for (int64_t i = first; i < last; i++) item(i).run(q, q_stride, out, ahead);
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs; reads the shapes, `dtype` and `most_rows` of the step.
QUIRE_API int64_t quire_attention_scratch_bytes(const AttentionStep* step) {
    return with_lanes(step->dtype, [&](auto lanes) {
        Scratch<decltype(lanes)> scratch;
        return scratch.lay_out(nullptr, step->most_rows, step->kv);
    });
}

// One layer: q [tokens, heads, head_dim] with `q_stride` numbers from token to token; out is contiguous.
// A plain cache has q's data type. A row's running softmax begins with its head's sink [heads], where there are any.
QUIRE_API void quire_attend(const AttentionStep* step, int64_t layer, const void* q, int64_t q_stride,
                            const float* sinks, void* out) {
    with_lanes(step->dtype, [&](auto lanes) { attend<decltype(lanes)>(*step, layer, q, q_stride, sinks, out); });
}
