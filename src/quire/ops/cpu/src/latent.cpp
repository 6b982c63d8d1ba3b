// Latent attention (https://arxiv.org/abs/2405.04434) over the paged cache, absorbed: all heads share one key a token,
// a row of the cache, and the value is that row's beginning.
//
// The work is cut into items: a row tile, which is some heads of some consecutive tokens of one span, against some
// splits of its context, `split` keys each. An item goes over the key tiles of its splits: it packs a tile from the
// cache once for all its rows (while the next one is on its way), multiplies, and merges it into the rows' running
// softmax. A row's splits are merged last, in ascending order: by the item, where it has all of them; else the items
// leave them in memory, and they are merged when all items are done. So one token keeps all threads busy.
//
// Why a row's bits depend on nothing else: splits and key tiles lie at constant absolute positions; within a split, a
// score and an output number have one fp32 accumulator each, in ascending order; a tile that a row cannot see changes
// none of its numbers, and merging a split that it cannot see adds zeros to what is multiplied by one.
#include <omp.h>

#include "attention_math.h"

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
    int64_t dtype, heads, latent, split, table_width, items, merges, most_rows, threads, scratch_bytes;
    const int64_t* tables;  // [spans, table_width]
    const LatentItem* item;
    const LatentMerge* merge;
    char* scratch;  // [threads, scratch_bytes]
    float* left;    // states of rows
    float scale;
};

namespace {

// Running softmax of rows, each [dims + 2 * LANES]: sum of weighted values, lanes of the weights' total, the top score.
struct States {
    float* at;
    int64_t dims;

    static int64_t size(int64_t dims) { return dims + 2 * LANES; }
    int64_t stride() const { return size(dims); }
    float* out(int64_t r) const { return at + r * stride(); }
    f32x16& total(int64_t r) const { return *(f32x16*)(out(r) + dims); }
    float& top(int64_t r) const { return out(r)[dims + LANES]; }

    void begin(int64_t rows) const {
        std::memset(at, 0, rows * stride() * sizeof(float));
        for (int64_t r = 0; r < rows; r++) top(r) = LOWEST;
    }

    // Row r takes in what row `other` of `later` has: of keys behind its own.
    void merge(int64_t r, const States& later, int64_t other) const {
        const float highest = std::max(top(r), later.top(other));
        const f32x16 mine = exp2_of_negative(splat(top(r) - highest));
        const f32x16 theirs = exp2_of_negative(splat(later.top(other) - highest));
        for (int64_t i = 0; i < dims + LANES; i += LANES)  // the total lies behind the output
            store(out(r) + i, load(out(r) + i) * mine + load(later.out(other) + i) * theirs);
        top(r) = highest;
    }

    template <class T>
    void finish(int64_t r, T* to, int64_t latent) const {
        const float sum_of_weights = sum(total(r));
        for (int64_t i = 0; i < latent; i += LANES) store_some(to + i, load(out(r) + i) / sum_of_weights, latent - i);
    }
};

// Numbers of a row's output, padded.
int64_t padded(int64_t latent, int64_t multiple) { return (latent + multiple - 1) / multiple * multiple; }

// -- memory -------------------------------------------------------------------------------------------------------

// A thread's memory for an item of at most `m` rows.
template <class L>
struct LatentScratch {
    using lane = typename L::lane;
    Packed<L> tile;
    lane* q;              // [m, depth]
    float* scores;        // [m, KEY_TILE]
    lane* weights;        // [m, KEY_TILE / NUMBERS]: of the values
    float* shrink;        // [m]
    States first, later;  // of the first split, then of all so far; of another

    // Lays it out from `at` on; the bytes that it takes.
    int64_t lay_out(char* at, int64_t m, const KvCache& kv, int64_t latent) {
        char* const begin = at;
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = (std::remove_reference_t<decltype(pointer)>)at;
            at += (count * sizeof(*pointer) + 63) / 64 * 64;
        };
        first.dims = later.dims = padded(latent, LANES);
        tile.depth = (kv.head_dim + L::NUMBERS - 1) / L::NUMBERS;
        tile.dims = padded(latent, LANES * L::NUMBERS);
        tile.panel = padded(tile.depth, LANES) * LANES + LANES;
        take(tile.keys, GROUPS * tile.panel);
        take(tile.values, tile.dims / LANES * Packed<L>::COLUMNS);
        take(tile.key_scales, KEY_TILE);
        take(tile.value_scales, KEY_TILE);
        take(tile.zeros, kv.row_bytes());
        take(q, m * tile.depth);
        take(scores, m * KEY_TILE);
        take(weights, m * KEY_TILE / L::NUMBERS);
        take(shrink, m);
        take(first.at, m * first.stride());
        take(later.at, m * later.stride());
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
        for (int64_t i = 0; i < pace_ && (line_ || position_ < end_); i++) {
            if (line_ == 0) {  // of the next 16 rows
                at_ = source_.plane(position_, KEYS) + position_ % source_.kv.block_size * source_.kv.row_bytes();
                position_ += LANES;
            }
            __builtin_prefetch(at_ + line_ * 64, 0, 2);
            line_ = line_ + 1 == group_lines_ ? 0 : line_ + 1;
        }
    }

  private:
    const TileSource source_;
    int64_t position_;
    const int64_t end_, group_lines_, pace_;  // lines of 16 rows, and of a step
    int64_t line_ = 0;
    const char* at_ = nullptr;
};

// While a tile is packed, nothing is asked for: that would only delay its own rows.
struct NothingAhead {
    void step(int64_t) {}
};

// -- an item ------------------------------------------------------------------------------------------------------

template <class T, class L, class S>
struct LatentWork {
    const LatentStep& step;
    LatentScratch<L>& scratch;
    const LatentItem& item;
    int64_t layer;
    const int64_t rows = item.tokens * item.heads, end = item.position + item.tokens;  // keys that the last row sees
    const int64_t panels = scratch.first.dims / LANES;

    int64_t position_of(int64_t r) const { return item.position + r / item.heads; }

    // Groups of the tile that row r sees.
    Groups groups(int64_t tile, int64_t r) const {
        const int64_t keys = std::max<int64_t>(0, position_of(r) + 1 - tile * KEY_TILE);
        return {0, std::min((keys + LANES - 1) / LANES, GROUPS)};
    }

    void run(const T* q, int64_t q_stride, T* out) {
        for (int64_t r = 0; r < rows; r++) {
            const T* from = q + (item.row + r / item.heads) * q_stride + head(r) * step.kv.head_dim;
            pack_query<L>(from, step.kv.head_dim, scratch.q + r * scratch.tile.depth);
        }
        const States &first = scratch.first, &later = scratch.later;
        for (int64_t s = 0; s < item.splits; s++) {
            if (item.left >= 0) {
                attend(item.split + s, {step.left + (item.left + s * rows) * first.stride(), first.dims});
                continue;
            }
            attend(s, s ? later : first);
            for (int64_t r = 0; s && r < rows; r++) first.merge(r, later, r);
        }
        if (item.left >= 0) return;
        for (int64_t r = 0; r < rows; r++)
            first.finish(r, out + ((item.row + r / item.heads) * step.heads + head(r)) * step.latent, step.latent);
    }

    int64_t head(int64_t r) const { return item.head + r % item.heads; }

    // One split.
    void attend(int64_t split, const States& states) {
        states.begin(rows);
        const int64_t first = split * step.split / KEY_TILE;
        const int64_t last = (std::min((split + 1) * step.split, end) - 1) / KEY_TILE;
        for (int64_t tile = first; tile <= last; tile++) attend_tile(tile, states);
    }

    void attend_tile(int64_t tile, const States& states) {
        const int64_t* table = step.tables + item.span * step.table_width;
        const TileSource source{step.kv, table, layer, 0, tile * KEY_TILE, 0, end};
        const int64_t item_end = std::min(end, (item.split + item.splits) * step.split), next = source.start + KEY_TILE;
        const int64_t vectors = GROUPS / VECTORS + (panels + VECTORS - 1) / VECTORS, blocks = (rows + ROWS - 1) / ROWS;
        RowsAhead ahead(source, next, std::max(next, std::min(item_end, next + KEY_TILE)), vectors * blocks);
        NothingAhead nothing_ahead;
        for (int64_t group = 0; group < groups(tile, rows - 1).end; group++) {  // keys and values in one go
            pack_keys<L, S>(source, nothing_ahead, group, group + 1, scratch.tile);
            pack_values<L, S>(source, nothing_ahead, group, group + 1, step.latent, scratch.tile);
        }
        multiply_keys(tile, ahead);
        each_block(tile, [&](int64_t r, int64_t n, Groups seen) {
            for (int64_t i = r; i < r + n; i++) softmax(tile, i, seen, states);
        });
        multiply_values(tile, states, ahead);
    }

    void multiply_keys(int64_t tile, RowsAhead& ahead) {
        const Packed<L>& p = scratch.tile;
        for (int64_t first = 0; first < GROUPS; first += VECTORS)
            each_block(tile, [&](int64_t r, int64_t n, Groups seen) {
                if (first >= seen.end) return;
                multiply<L, false>(n, std::min<int64_t>(VECTORS, seen.end - first),
                                   {scratch.q + r * p.depth, p.depth, p.keys + first * p.panel, p.panel, p.depth,
                                    scratch.scores + r * KEY_TILE + first * LANES, KEY_TILE, nullptr});
                ahead.step();
            });
    }

    void multiply_values(int64_t tile, const States& states, RowsAhead& ahead) {
        constexpr int64_t LENGTH = KEY_TILE / L::NUMBERS, STEP = LANES / L::NUMBERS;  // lanes of a tile and of a group
        for (int64_t first = 0; first < panels; first += VECTORS)
            each_block(tile, [&](int64_t r, int64_t n, Groups seen) {
                if (!seen.end) return;
                multiply<L, true>(n, std::min<int64_t>(VECTORS, panels - first),
                                  {scratch.weights + r * LENGTH, LENGTH,
                                   scratch.tile.values + first * Packed<L>::COLUMNS, Packed<L>::COLUMNS,
                                   seen.end * STEP, states.out(r) + first * LANES, states.stride(),
                                   scratch.shrink + r});
                ahead.step();
            });
    }

    // Calls work(first row, rows, groups that they see) for the rows in blocks of the products' size.
    template <class F>
    void each_block(int64_t tile, F work) const {
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int64_t n = std::min<int64_t>(ROWS, rows - r);
            work(r, n, groups(tile, r + n - 1));
        }
    }

    void softmax(int64_t tile, int64_t r, Groups seen, const States& states) {
        const int64_t keys = std::min(position_of(r) + 1 - tile * KEY_TILE, KEY_TILE);  // none: not above 0
        auto one = [&](auto whole) {
            return softmax_row<L, S, decltype(whole)::value>(
                scratch.scores + r * KEY_TILE, step.scale, scratch.tile, seen, 0, int32_t(std::max<int64_t>(keys, 0)),
                scratch.weights + r * KEY_TILE / L::NUMBERS, states.top(r), states.total(r));
        };
        scratch.shrink[r] = keys == KEY_TILE ? one(std::true_type{}) : one(std::false_type{});
    }
};

// -- a layer ------------------------------------------------------------------------------------------------------

// The r-th row of a row tile whose splits lie in memory.
template <class T>
void merge_row(const LatentStep& step, const LatentMerge& tile, int64_t r, T* out) {
    const int64_t rows = tile.tokens * tile.heads;
    const States states{step.left, padded(step.latent, LANES)};
    for (int64_t s = 1; s < tile.splits; s++) states.merge(tile.left + r, states, tile.left + s * rows + r);
    const int64_t token = tile.row + r / tile.heads, head = tile.head + r % tile.heads;
    states.finish(tile.left + r, out + (token * step.heads + head) * step.latent, step.latent);
}

template <class T, class L, class S>
void attend(const LatentStep& step, int64_t layer, const T* q, int64_t q_stride, T* out) {
#pragma omp parallel num_threads(step.threads)
    {
        LatentScratch<L> scratch;
        char* const mine = step.scratch + omp_get_thread_num() * step.scratch_bytes;
        scratch.lay_out(mine, step.most_rows, step.kv, step.latent);
        std::memset(scratch.tile.zeros, 0, step.kv.row_bytes());
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < step.items; i++)
            LatentWork<T, L, S>{step, scratch, step.item[i], layer}.run(q, q_stride, out);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < step.merges * step.most_rows; i++) {
            const LatentMerge& tile = step.merge[i / step.most_rows];
            const int64_t r = i % step.most_rows;
            if (r < tile.tokens * tile.heads) merge_row(step, tile, r, out);
        }
    }
}

template <class T>
void attend(const LatentStep& step, int64_t layer, const void* q, int64_t q_stride, void* out) {
    using L = typename LanesOf<T>::type;
    if (step.kv.format == KV_INT8) return attend<T, L, int8>(step, layer, (const T*)q, q_stride, (T*)out);
    if (step.kv.format == KV_FP8) return attend<T, L, fp8>(step, layer, (const T*)q, q_stride, (T*)out);
    attend<T, L, T>(step, layer, (const T*)q, q_stride, (T*)out);
}

template <class T>
int64_t scratch_bytes(const LatentStep& step) {
    LatentScratch<typename LanesOf<T>::type> scratch;
    return scratch.lay_out(nullptr, step.most_rows, step.kv, step.latent);
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs; reads the shapes, `dtype` and `most_rows` of the step.
QUIRE_API int64_t quire_latent_scratch_bytes(const LatentStep* step) {
    if (step->dtype == F32) return scratch_bytes<float>(*step);
    return step->dtype == BF16 ? scratch_bytes<bf16>(*step) : scratch_bytes<f16>(*step);
}

// One layer: q [tokens, heads, head_dim] with `q_stride` numbers from token to token; out [tokens, heads, latent].
// A plain cache has q's data type.
QUIRE_API void quire_attend_latent(const LatentStep* step, int64_t layer, const void* q, int64_t q_stride, void* out) {
    if (step->dtype == F32) attend<float>(*step, layer, q, q_stride, out);
    if (step->dtype == BF16) attend<bf16>(*step, layer, q, q_stride, out);
    if (step->dtype == F16) attend<f16>(*step, layer, q, q_stride, out);
}
