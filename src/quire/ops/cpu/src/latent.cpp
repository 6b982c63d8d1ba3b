// Latent attention (https://arxiv.org/abs/2405.04434) over the paged cache, absorbed: all heads share one key a token,
// a row of the cache, and the value is that row's beginning.
//
// The work is cut into items: a row tile, which is some heads of some consecutive tokens of one span, against some
// splits of its context, `split` keys each. An item goes over the key tiles of its splits: it multiplies a tile with
// all its rows (while the next one is on its way), and merges it into the rows' running softmax. A row's splits are
// merged last, in ascending order: by the item, where it has all of them; else the items leave them in memory, and they
// are merged when all items are done. So one token keeps all threads busy.
//
// Why a row's bits depend on nothing else: splits and key tiles lie at constant absolute positions; within a split, a
// score and an output number have one fp32 accumulator each, and a tile's weights one sum, in ascending order; a key or
// a tile that a row cannot see adds zeros, and merging a split that it cannot see adds zeros to what is multiplied by
// one.

#include "latent_math.h"
#include "team.h"

namespace quire {

// A row tile's part of the context. Rows are its tokens' heads, token by token.
struct LatentItem {
    int64_t span, row, tokens, position, head, heads;  // first row of the batch, position of its token, first head
    int64_t split, splits;                             // first split, and how many
    int64_t left;  // which state in memory is the first row's of the first split; -1: the item has all splits
};

// A row tile whose splits several items have computed.
struct LatentMerge {
    int64_t row, tokens, head, heads, splits, left;
};

// What the layers of a step share. Python fills it in: see latent.py, which has the same fields.
struct LatentStep {
    KvCache kv;
    int64_t dtype, heads, key, latent;  // numbers of a row that are its key, and of these its value
    int64_t split, table_width, items, merges, most_rows, threads, scratch_bytes;
    const int64_t* tables;  // [spans, table_width]
    const LatentItem* item;
    const LatentMerge* merge;
    char* scratch;  // [threads, scratch_bytes]
    float* left;    // states of rows
    Trees trees;    // their rows are items of one token
    float scale;
};

namespace {

// Rows' running softmax, each [dims + LANES]: sum of weighted values, total of the weights, top score.
struct States {
    float* at;
    int64_t dims;

    static int64_t size(int64_t dims) { return dims + LANES; }
    int64_t stride() const { return size(dims); }
    float* out(int64_t r) const { return at + r * stride(); }
    float& total(int64_t r) const { return out(r)[dims]; }
    float& top(int64_t r) const { return out(r)[dims + 1]; }

    // Row r takes in what row `other` of `later` has: of keys behind its own.
    void merge(int64_t r, const States& later, int64_t other) const {
        const float highest = std::max(top(r), later.top(other));
        const f32x16 mine = exp2_of_negative(splat(top(r) - highest));
        const f32x16 theirs = exp2_of_negative(splat(later.top(other) - highest));
        total(r) = total(r) * mine[0] + later.total(other) * theirs[0];
        for (int64_t i = 0; i < dims; i += LANES)
            store(out(r) + i, load(out(r) + i) * mine + load(later.out(other) + i) * theirs);
        top(r) = highest;
    }

    // Row r's result: row `to` of rows [latent] of a `DType`, one of those that become lanes of `L`.
    template <class L>
    void finish(int64_t r, int64_t dtype, void* rows, int64_t to, int64_t latent) const {
        with_floats<L>(dtype, [&](auto number) {
            auto* row = (decltype(number)*)rows + to * latent;
            for (int64_t i = 0; i < latent; i += LANES) store_some(row + i, load(out(r) + i) / total(r), latent - i);
        });
    }
};

// -- memory -------------------------------------------------------------------------------------------------------

// A thread's memory for an item of at most `m` rows.
template <class L>
struct LatentScratch {
    using lane = typename L::lane;
    int64_t depth;        // lanes of a key
    int64_t width;        // lanes of a row that is written out
    int64_t stride;       // rows, padded
    lane* columns;        // in tiles, [dims / 16][KEY_TILE / NUMBERS][16]: the values of the key tile
    lane* weights_of;     // in tiles, [stride][KEY_TILE / NUMBERS]: the weights, row by row
    lane* q;              // [stride / 16][depth][16]
    lane* tile;           // [KEY_TILE][width]: rows that cannot be read in place
    lane* zeros;          // such a row
    const lane** row_of;  // [KEY_TILE + KEYS_AT_ONCE]: of the tile's keys, 16 of which lie evenly, and zeros behind them
    float* scales;        // [KEY_TILE]
    float* scores;        // [KEY_TILE][stride]
    lane* weights;        // [KEY_TILE / NUMBERS][stride]
    float* shrink;        // [stride]
    RowTotals* totals;    // [stride / 16]
    States first, later;  // of the first split, then of all so far; of another
    static constexpr int64_t COLUMNS = Packed<L>::COLUMNS;

    // Lays it out from `at` on; the bytes that it takes.
    int64_t lay_out(char* at, int64_t m, int64_t key, int64_t latent) {
        char* const begin = at;
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = (std::remove_reference_t<decltype(pointer)>)at;
            at += (count * sizeof(*pointer) + 63) / 64 * 64;
        };
        first.dims = later.dims = round_up(latent, WIDE<L>);
        depth = round_up(key, L::NUMBERS * DEPTH_STEP<L>) / L::NUMBERS;
        width = round_up(key, WIDE<L>) / L::NUMBERS;
        stride = round_up(m, LANES);
        take(q, stride * depth);
        take(tile, KEY_TILE * width);
        take(zeros, width);
        take(row_of, KEY_TILE + KEYS_AT_ONCE<L>);
        take(scales, KEY_TILE);
        take(scores, KEY_TILE * stride);
        take(weights, KEY_TILE / L::NUMBERS * stride);
        take(shrink, stride);
        take(totals, stride / LANES);
        const int64_t states = IN_TILES<L> ? stride : m;  // tiles are whole
        take(first.at, states * first.stride());
        take(later.at, states * later.stride());
        if (!IN_TILES<L>) return at - begin;
        take(columns, first.dims / LANES * COLUMNS);
        take(weights_of, stride * KEY_TILE / L::NUMBERS);
        return at - begin;
    }
};

// Asks for the rows of positions from .. end - 1 before they are needed: all of them in the course of `steps` steps.
class RowsAhead {
  public:
    RowsAhead(const TileSource& source, int64_t from, int64_t end, int64_t steps)
        : source_(source), position_(from), end_(end), group_lines_((LANES * source.kv.row_bytes() + 63) / 64),
          pace_((end - from + LANES - 1) / LANES * group_lines_ / steps + 1) {}

    void step() {
        for (int64_t left = pace_; left > 0;) {
            if (line_ == group_lines_) {  // on to the next 16 rows
                if (position_ >= end_) return;
                char* plane = source_.plane(position_, KEYS);
                const int64_t row = source_.kv.row_of(position_);
                if (source_.kv.quantized()) __builtin_prefetch(source_.kv.scales(plane) + row, 0, 2);
                at_ = plane + row * source_.kv.row_bytes();
                position_ += LANES, line_ = 0;
            }
            const int64_t last = std::min(group_lines_, line_ + left);
            left -= last - line_;
            for (; line_ < last; line_++) __builtin_prefetch(at_ + line_ * 64, 0, 2);
        }
    }

  private:
    const TileSource source_;
    int64_t position_;
    const int64_t end_, group_lines_, pace_;  // lines of 16 rows, and of a step
    int64_t line_ = group_lines_;
    const char* at_ = nullptr;
};

// -- an item ------------------------------------------------------------------------------------------------------

template <class L>
struct LatentWork {
    using lane = typename L::lane;
    const LatentStep& step;
    LatentScratch<L>& scratch;
    const LatentItem& item;
    int64_t layer;
    const int64_t rows = item.tokens * item.heads, end = item.position + item.tokens;  // keys that the last row sees
    const int64_t panels = (rows + LANES - 1) / LANES;
    const int64_t panel_groups = (panels + SCORE_VECTORS - 1) / SCORE_VECTORS;  // what the products take at once
    const int64_t row_blocks = (rows + ROWS_AT_ONCE<L> - 1) / ROWS_AT_ONCE<L>, stripes = scratch.first.dims / WIDE<L>;

    int64_t position_of(int64_t r) const { return item.position + r / item.heads; }
    int64_t head(int64_t r) const { return item.head + r % item.heads; }

    void run(const void* q, int64_t q_stride, void* out) {
        pack_queries(q, q_stride);
        if constexpr (IN_TILES<L>) configure_attention(TILE_ROWS);
        merge_splits();
        if constexpr (IN_TILES<L>) release_tiles();
        for (int64_t r = 0; item.left < 0 && r < rows; r++)
            scratch.first.template finish<L>(r, step.dtype, out, (item.row + r / item.heads) * step.heads + head(r), step.latent);
    }

    void merge_splits() {
        const States &first = scratch.first, &later = scratch.later;
        for (int64_t s = 0; s < item.splits; s++) {
            if (item.left >= 0) {
                leave(s);
                continue;
            }
            attend(s, s ? later : first);
            for (int64_t r = 0; s && r < rows; r++) first.merge(r, later, r);
        }
    }

    // The states of the item's s-th split, to memory; in tiles by way of the scratch memory, which has room for whole ones.
    void leave(int64_t s) {
        const States &here = scratch.first, there{step.left + (item.left + s * rows) * here.stride(), here.dims};
        attend(item.split + s, IN_TILES<L> ? here : there);
        if (IN_TILES<L>) std::memcpy(there.at, here.at, rows * here.stride() * sizeof(float));
    }

    // Queries side by side, 16 a panel; the last panel is filled up with zeros.
    void pack_queries(const void* q, int64_t q_stride) {
        with_floats<L>(step.dtype, [&](auto number) { pack_queries_of((const decltype(number)*)q, q_stride); });
    }
    template <class T>
    void pack_queries_of(const T* q, int64_t q_stride) {
        constexpr int64_t N = WIDE<L>;
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t i = 0; i < step.key; i += N) {
                typename L::vector square[LANES] = {};
                const int64_t n = std::min(step.key - i, N), first = panel * LANES;
                for (int64_t r = first; r < std::min(first + LANES, rows); r++) {
                    const T* from = q + (item.row + r / item.heads) * q_stride + head(r) * step.key;
                    square[r - first] = L::of_row(from + i, int(n));
                }
                transpose(square);
                std::memcpy(scratch.q + (panel * scratch.depth + i / L::NUMBERS) * LANES, square,
                            std::min<int64_t>(scratch.depth - i / L::NUMBERS, LANES) * sizeof square[0]);
            }
    }

    // One split.
    void attend(int64_t split, const States& states) {
        std::memset(states.at, 0, rows * states.stride() * sizeof(float));
        for (int64_t panel = 0; panel < panels; panel++) scratch.totals[panel] = RowTotals{{}, splat(LOWEST)};
        const int64_t first = split * step.split / KEY_TILE;
        const int64_t last = (std::min((split + 1) * step.split, end) - 1) / KEY_TILE;
        for (int64_t tile = first; tile <= last; tile++) attend_tile(tile, states);
        for (int64_t r = 0; r < rows; r++) {
            const RowTotals& totals = scratch.totals[r / LANES];
            states.total(r) = totals.sum[r % LANES], states.top(r) = totals.top[r % LANES];
        }
    }

    void attend_tile(int64_t tile, const States& states) {
        const TileSource source = source_of(tile * KEY_TILE);
        const int64_t keys = std::min(end - source.start, KEY_TILE);
        const int64_t steps = (keys + KEYS_AT_ONCE<L> - 1) / KEYS_AT_ONCE<L> * panel_groups + stripes * row_blocks;
        RowsAhead next = ahead(source.start + KEY_TILE, steps);
        find_rows(source, keys);
        for (int64_t panel = 0; panel < panels; panel += SCORE_VECTORS) {
            multiply_keys<SCORE_VECTORS>(source.start, keys, panel, next);
            for (int64_t p = panel; p < std::min(panel + SCORE_VECTORS, panels); p++) softmax(tile, keys, p);
        }
        multiply_values(keys, states, next);
    }

    // The span's rows; `start`: of a key tile.
    TileSource source_of(int64_t start) const {
        return {step.kv, step.tables + item.span * step.table_width, layer, 0, start, 0, end,
                step.trees.base(item.span), step.trees.path(item.row)};
    }

    // Where the item's rows end that lie in order.
    int64_t order_ends() const {
        return std::min({end, (item.split + item.splits) * step.split, step.trees.base(item.span)});
    }

    // Asks for a key tile's rows, if the item has it, as far as they lie in order.
    RowsAhead ahead(int64_t start, int64_t steps) const {
        return {source_of(start), start, std::max(start, std::min(order_ends(), start + KEY_TILE)), steps};
    }

    // The 16 rows from this position on, in the course of a product; those behind the end of the order are none.
    Later later(int64_t position) const {
        if (position >= order_ends()) return {(const char*)scratch.q, 0};
        const int64_t bytes = step.kv.row_bytes();
        const char* at = source_of(position).plane(position, KEYS) + position % step.kv.block_size * bytes;
        return {at, LANES * bytes / scratch.depth};
    }

    // Where the products read the tile's rows.
    void find_rows(const TileSource& source, int64_t keys) {
        const bool direct = in_place<L>(step.kv, step.key, step.latent);
        for (int64_t k = 0; k < keys; k += LANES) {
            const int64_t position = source.start + k;
            const char* at = source.plane(position, KEYS) + position % step.kv.block_size * step.kv.row_bytes();
            const bool branching = position + LANES > source.base;
            const char* of_path[LANES];
            if (branching) source.rows(position, KEYS, (const char*)scratch.zeros, of_path);
            if (step.kv.quantized()) source.scales(position, KEYS, scratch.scales + k);
            for (int64_t i = k; i < std::min(k + LANES, keys); i++, at += step.kv.row_bytes()) {
                const char* row = branching ? of_path[i - k] : at;
                const bool here = direct && !branching;
                scratch.row_of[i] = here ? (const lane*)row : scratch.tile + i * scratch.width;
                if (!here) write_out<L>(step.kv, row, step.key, scratch.tile + i * scratch.width);
            }
        }
        for (int64_t i = 0; i < KEYS_AT_ONCE<L>; i++) scratch.row_of[keys + i] = scratch.zeros;
    }

    // For V panels of rows, or the fewer that there are.
    template <int V>
    void multiply_keys(int64_t start, int64_t keys, int64_t panel, RowsAhead& ahead) {
        if constexpr (V > 1)
            if (panels - panel < V) return multiply_keys<V - 1>(start, keys, panel, ahead);
        for (int64_t k = 0; k < keys; k += KEYS_AT_ONCE<L>) {
            const lane* q = scratch.q + panel * scratch.depth * LANES;
            float* scores = scratch.scores + k * scratch.stride + panel * LANES;
            if constexpr (IN_TILES<L>)
                multiply_in_tiles<false>(std::min(KEYS_AT_ONCE<L>, keys - k), V,
                                         {{scratch.row_of[k], scratch.row_of[k + TILE_ROWS]},
                                          {apart(k, keys), apart(k + TILE_ROWS, keys)}, q, scratch.depth * LANES,
                                          scratch.depth, scores, scratch.stride});
            else
                multiply<L, V>({scratch.row_of[k], apart(k, keys), q, scratch.depth, scores, scratch.stride,
                                panel ? Later{(const char*)q, 0} : later(start + k + LANES)});
            if (IN_TILES<L>) ahead.step();
        }
    }

    // Lanes from key k's row to the next one's. Rows behind the last key's may hold anything: nobody looks at their scores.
    int64_t apart(int64_t k, int64_t keys) const {
        const bool written_out = scratch.row_of[k] >= scratch.tile && scratch.row_of[k] < scratch.tile + KEY_TILE * scratch.width;
        return k >= keys ? 0 : written_out ? scratch.width : step.kv.row_bytes() / int64_t(sizeof(lane));
    }

    void softmax(int64_t tile, int64_t keys, int64_t panel) {
        int32_t of[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t r = std::min(panel * LANES + i, rows - 1);
            of[i] = int32_t(std::max<int64_t>(0, position_of(r) + 1 - tile * KEY_TILE));  // or more than there are
        }
        const auto seen = load_as<i32x16>(of);
        const float* scales = step.kv.quantized() ? scratch.scales : nullptr;
        auto one = [&](auto whole) {
            return softmax_rows<L, decltype(whole)::value>(
                scratch.scores + panel * LANES, scratch.stride, keys, step.scale, scales, seen,
                scratch.weights + panel * LANES, scratch.totals[panel]);
        };
        const f32x16 shrink = seen[0] >= keys ? one(std::true_type{}) : one(std::false_type{});
        store(scratch.shrink + panel * LANES, shrink);
    }

    void multiply_values(int64_t keys, const States& states, RowsAhead& ahead) {
        if constexpr (IN_TILES<L>)
            multiply_values_in_tiles(keys, states, ahead);
        else
            multiply_values_in_rows(keys, states);
    }

    void multiply_values_in_rows(int64_t keys, const States& states) {
        for (int64_t stripe = 0; stripe < stripes; stripe++)
            for (int64_t block = 0; block < row_blocks; block++) {
                const int64_t r = block * rows / row_blocks;  // blocks of nearly equal size
                multiply<L>((block + 1) * rows / row_blocks - r,
                            {scratch.row_of, stripe * LANES, scratch.weights + r, (keys + L::NUMBERS - 1) / L::NUMBERS,
                             scratch.stride, scratch.shrink + r, states.out(r) + stripe * WIDE<L>, states.stride()});
            }
    }

    // Values and weights laid out as tiles want them, once for all rows and columns; up to whole tiles of 32 keys, zeros.
    void multiply_values_in_tiles(int64_t keys, const States& states, RowsAhead& ahead) {
        constexpr int64_t LENGTH = KEY_TILE / L::NUMBERS, COLUMNS = LatentScratch<L>::COLUMNS;
        const int64_t length = round_up(keys, KEYS_AT_ONCE<L>) / L::NUMBERS;
        for (int64_t i = 0; i < length; i++)
            for (int64_t stripe = 0; stripe < stripes; stripe++) {
                typename L::part columns[L::NUMBERS];
                L::side_by_side(scratch.row_of + i * L::NUMBERS, stripe * LANES, columns);
                for (int64_t p = 0; p < L::NUMBERS; p++)
                    std::memcpy(scratch.columns + (stripe * L::NUMBERS + p) * COLUMNS + i * LANES, &columns[p], 64);
            }
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t i = 0; i < length; i += LANES) turn_weights(panel, i, (keys + L::NUMBERS - 1) / L::NUMBERS);
        for (int64_t stripe = 0; stripe < stripes; stripe++)
            for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE<L>) {
                const int64_t n = std::min(ROWS_AT_ONCE<L>, rows - r), stride = states.stride();
                const lane* weights = scratch.weights_of + r * LENGTH;
                float* out = states.out(r) + stripe * WIDE<L>;
                shrink_rows(out, stride, scratch.shrink + r, n, L::NUMBERS);
                multiply_in_tiles<true>(n, L::NUMBERS, {{weights, weights + TILE_ROWS * LENGTH}, {LENGTH, LENGTH},
                                                        scratch.columns + stripe * L::NUMBERS * COLUMNS, COLUMNS, length,
                                                        out, stride});
                ahead.step();
            }
    }

    // 16 rows' weights of 16 lanes of keys from lane `at` on, of which there are `count`.
    void turn_weights(int64_t panel, int64_t at, int64_t count) {
        typename L::vector square[LANES] = {};
        for (int64_t i = at; i < std::min<int64_t>(at + LANES, count); i++)
            std::memcpy(&square[i - at], scratch.weights + i * scratch.stride + panel * LANES, sizeof square[0]);
        transpose(square);
        for (int64_t r = 0; r < LANES; r++)
            std::memcpy(scratch.weights_of + (panel * LANES + r) * KEY_TILE / L::NUMBERS + at, &square[r], sizeof square[0]);
    }
};

constexpr int64_t MERGED_ROWS = 8;  // that a thread merges, at least

// -- a layer ------------------------------------------------------------------------------------------------------

// The r-th row of a row tile whose splits lie in memory.
template <class L>
void merge_row(const LatentStep& step, const LatentMerge& tile, int64_t r, void* out) {
    const int64_t rows = tile.tokens * tile.heads;
    const States states{step.left, round_up(step.latent, WIDE<L>)};
    for (int64_t s = 1; s < tile.splits; s++) states.merge(tile.left + r, states, tile.left + s * rows + r);
    const int64_t token = tile.row + r / tile.heads, head = tile.head + r % tile.heads;
    states.finish<L>(tile.left + r, step.dtype, out, token * step.heads + head, step.latent);
}

template <class L>
void attend(const LatentStep& step, int64_t layer, const void* q, int64_t q_stride, void* out) {
    parallel(step.items, ONE_BY_ONE, step.threads, [&](int64_t i, int64_t, int thread) {
        LatentScratch<L> scratch;
        scratch.lay_out(step.scratch + thread * step.scratch_bytes, step.most_rows, step.key, step.latent);
        std::memset(scratch.zeros, 0, scratch.width * sizeof(*scratch.zeros));
        LatentWork<L>{step, scratch, step.item[i], layer}.run(q, q_stride, out);
    });
    parallel_each(step.merges * step.most_rows, {MERGED_ROWS}, [&](int64_t i) {
        const LatentMerge& tile = step.merge[i / step.most_rows];
        const int64_t r = i % step.most_rows;
        if (r < tile.tokens * tile.heads) merge_row<L>(step, tile, r, out);
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs; reads the shapes, `dtype` and `most_rows` of the step.
QUIRE_API int64_t quire_latent_scratch_bytes(const LatentStep* step) {
    return with_lanes(step->dtype, [&](auto lanes) {
        LatentScratch<decltype(lanes)> scratch;
        return scratch.lay_out(nullptr, step->most_rows, step->key, step->latent);
    });
}

// One layer: q [tokens, heads, key] with `q_stride` numbers from token to token; out [tokens, heads, latent].
// A plain cache has q's data type.
QUIRE_API void quire_attend_latent(const LatentStep* step, int64_t layer, const void* q, int64_t q_stride, void* out) {
    with_lanes(step->dtype, [&](auto lanes) { attend<decltype(lanes)>(*step, layer, q, q_stride, out); });
}
