// The gated delta rule, over rows and states in blocks: see `ops/states.py`, which has the formulas and the layout.
//
// Two loops: rows are convolved and normalized, a head of a row at a time; heads of spans go through the rule, tile by tile,
// and are normed and gated (where a head is shared out by its columns, in a loop of its own). Every sum runs in one order,
// over a tile at an absolute position, in lanes that do not meet: no bit depends on how many rows come at once, on the
// columns that are worked on together, or on the number of threads. Lanes of a tile that no row has been written to may
// hold anything, and are never added.
#include <algorithm>
#include <cmath>

#include "recurrent_math.h"
#include "team.h"

namespace quire {

struct DeltaNet {  // as in recurrent.py
    uint8_t* blocks;  // of a layer, in the first block
    int64_t block_bytes, states, keys, updates, decays, inputs;  // from one block to the next; where the parts begin
    int64_t block_size, key_heads, heads, key_dim, value_dim, decay_dim, taps, channels;
    int64_t dtype, spans, tokens, table_width;
    const int64_t *row_starts, *context_lens, *tables;
    const void* x;  // [tokens, channels + heads * value_dim]
    const float *ab;  // [tokens, heads * (decay_dim + 1)]
    const float *conv, *decay, *shift, *norm;  // conv: [taps, channels]
    float *mixed, *rates, *results;  // head by head, each [tokens, its width]; as ab; [tokens, heads * value_dim]
    uint8_t* scratch;  // of each thread
    int64_t scratch_bytes;
    void* out;  // [tokens, heads * value_dim]
    float eps;
    int32_t sigmoid;  // the gate's function: sigmoid; 0: silu
    int64_t rate_columns() const { return heads * (decay_dim + 1); }
    int64_t units() const { return 2 * key_heads + heads; }  // of a row: heads of queries, of keys, of values
    int64_t span_of(int64_t row) const { return std::upper_bound(row_starts, row_starts + spans + 1, row) - row_starts - 1; }
    // Convolved rows of a head: those of queries come first, then those of keys, then those of values.
    float* mixed_keys(int64_t unit) const { return mixed + unit * tokens * key_dim; }
    float* mixed_values(int64_t head) const { return mixed_keys(2 * key_heads) + head * tokens * value_dim; }
};

namespace {

constexpr float L2_EPS = 1e-6f;
// Parts of a block that there is.
struct Block {
    const DeltaNet& net;
    uint8_t* first;
    Block(const DeltaNet& net, int64_t block) : net(net), first(net.blocks + block * net.block_bytes) {}
    float* state(int64_t head) const { return (float*)(first + net.states) + head * net.key_dim * net.value_dim; }
    float* keys(int64_t key_head) const {  // [block_size, key_dim]
        return (float*)(first + net.keys) + key_head * net.block_size * net.key_dim;
    }
    float* updates(int64_t head) const {  // [block_size, value_dim]
        return (float*)(first + net.updates) + head * net.block_size * net.value_dim;
    }
    float* decays(int64_t head) const {  // [block_size, decay_dim]
        return (float*)(first + net.decays) + head * net.block_size * net.decay_dim;
    }
    template <class T>
    T* inputs(int64_t offset) const {
        return (T*)(first + net.inputs) + offset * net.channels;
    }
};

// Asks for `count` numbers, which will be written where `WRITES`.
template <int WRITES, class T>
INLINE void ask(const T* numbers, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(numbers + i, WRITES, 3);
}

// -- rows ---------------------------------------------------------------------------------------------------------

// One head's channels of a row: which they are, and where its taps' inputs and what is stored lie.
template <class T>
struct Unit {
    int64_t row, unit, dim, first;
    bool is_key;  // or a query
    const T* own;  // inputs of the row itself
    const T* seen[16];  // by tap; null: before the beginning
    T* inputs;  // where the block keeps them; null: it is not there
    float* keys;  // likewise, where the unit is a key

    void find(const DeltaNet& net, int64_t item) {
        row = item / net.units(), unit = item % net.units(), is_key = unit < 2 * net.key_heads;
        const int64_t span = net.span_of(row), begin = net.row_starts[span], size = net.block_size;
        const int64_t position = net.context_lens[span] - (net.row_starts[span + 1] - row), values = unit - 2 * net.key_heads;
        const int64_t width = net.channels + net.heads * net.value_dim, *table = net.tables + span * net.table_width;
        dim = is_key ? net.key_dim : net.value_dim;
        first = is_key ? unit * dim : 2 * net.key_heads * net.key_dim + values * dim;
        own = (const T*)net.x + row * width + first;
        for (int64_t tap = 0; tap < net.taps; tap++) {
            const int64_t back = net.taps - 1 - tap, at = position - back;
            if (row - back >= begin)
                seen[tap] = own - back * width;
            else
                seen[tap] = at < 0 ? nullptr : Block(net, table[at / size]).template inputs<T>(at % size) + first;
        }
        inputs = nullptr, keys = nullptr;
        if (const int64_t number = table[position / size]) {
            const Block block(net, number);
            inputs = block.template inputs<T>(position % size) + first;
            if (is_key && unit >= net.key_heads) keys = block.keys(unit - net.key_heads) + position % size * dim;
        }
    }

    // Asks for all that: few lines here and there, which would be waited for one by one.
    void expect(const DeltaNet& net) const {
        for (int64_t tap = 0; tap < net.taps; tap++) {
            ask<0>(net.conv + tap * net.channels + first, dim);
            if (seen[tap]) ask<0>(seen[tap], dim);
        }
        if (inputs) ask<1>(inputs, dim);
        if (keys) ask<1>(keys, dim);
    }
};

// Convolves one head's channels of a row to `out`; the sum of their squares. `TAPS`: how many there are, all of whose inputs
// are there; 0: any number, of any inputs.
template <bool WHOLE, int TAPS, class T>
f32x16 convolve(const DeltaNet& net, const Unit<T>& of, float* out) {
    const int64_t taps = TAPS ? TAPS : net.taps, channels = net.channels, dim = of.dim;
    const float* conv = net.conv + of.first;
    f32x16 squares = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        f32x16 total = {};
        for (int64_t tap = 0; tap < taps; tap++)
            if (TAPS || of.seen[tap])
                total = fma(some<WHOLE>(of.seen[tap] + i, dim - i), some<WHOLE>(conv + tap * channels + i, dim - i), total);
        total = silu(total);
        squares = fma(total, total, squares);
        put<WHOLE>(out + i, total, dim - i);
    }
    return squares;
}

// Mixes one head's channels of a row, and brings queries and keys to length 1. Inputs and keys are stored.
template <bool WHOLE, class T>
void mix(const DeltaNet& net, const Unit<T>& of) {
    const int64_t dim = of.dim;
    float* out = (of.is_key ? net.mixed_keys(of.unit) : net.mixed_values(of.unit - 2 * net.key_heads)) + of.row * dim;
    const f32x16 squares = net.taps == 4 && of.seen[0] ? convolve<WHOLE, 4>(net, of, out) : convolve<WHOLE, 0>(net, of, out);
    if (of.is_key) {
        float scale = 1.0f / std::sqrt(sum(squares) + L2_EPS);
        if (of.unit < net.key_heads) scale *= 1.0f / std::sqrt((float)dim);
        for (int64_t i = 0; i < dim; i += LANES) put<WHOLE>(out + i, some<WHOLE>(out + i, dim - i) * scale, dim - i);
    }
    if (of.inputs) std::memcpy(of.inputs, of.own, dim * sizeof(T));
    if (of.keys) std::memcpy(of.keys, out, dim * sizeof(float));
}

// log(1 + x) of numbers from 0 to 1, to about 1 ulp: 2 atanh(x / (2 + x)), as a series.
INLINE f32x16 log1p(f32x16 x) {
    const f32x16 z = x / (2.0f + x), square = z * z;
    f32x16 series = splat(1.0f / 15.0f);
    for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, splat(1.0f / (float)odd));
    return 2.0f * z * series;
}

// Of each head of a row, how its state decays, and how far it is corrected.
void rate(const DeltaNet& net, int64_t row) {
    const int64_t decays = net.heads * net.decay_dim;
    const float* ab = net.ab + row * net.rate_columns();
    float* out = net.rates + row * net.rate_columns();
    for (int64_t i = 0; i < decays; i += LANES) {
        const int64_t left = decays - i;
        const f32x16 a = load_some(ab + i, left) + load_some(net.shift + i, left);
        const f32x16 size = select(less(a, splat(0.0f)), -a, a), softplus = max(a, splat(0.0f)) + log1p(exp(-size));
        store_some(out + i, load_some(net.decay + i, left) * softplus, left);
    }
    for (int64_t i = 0; i < net.heads; i += LANES)
        store_some(out + decays + i, sigmoid(load_some(ab + decays + i, net.heads - i)), net.heads - i);
}

// -- the rule -----------------------------------------------------------------------------------------------------

// What a thread needs for one head: of the rows of a tile, keys and queries with the factors of the state or of the tile's
// end, sums of decays, products with the state, updates; a state.
struct Room {
    float *keys, *queries, *sums, *decays, *of_keys, *of_queries, *updates, *state;
    Room(uint8_t* from, int64_t key_dim, int64_t width) {
        float* next = (float*)from;
        const auto take = [&](int64_t count) {
            float* part = next;
            next += padded(count);
            return part;
        };
        keys = take(key_dim * TILE), queries = take(key_dim * TILE), sums = take(key_dim * TILE), decays = take(key_dim);
        of_keys = take(TILE * width), of_queries = take(TILE * width), updates = take(TILE * width);
        state = take(key_dim * width);
    }
    static int64_t bytes(int64_t key_dim, int64_t width) {
        return 4 * (3 * key_dim * TILE + padded(key_dim) + 3 * TILE * width + key_dim * width);
    }
};

// Some columns of a head of a span.
struct Part {
    int64_t span, head, first, width;
};

// A tile of a part: `old` rows of it were computed before, and `rows` are there after this step.
struct Tile {
    Block block;
    bool there;  // whether the block is
    int64_t old, rows, row, offset;  // of its first position: the step's row, and where it is in its block
    const float *keys[TILE], *queries[TILE];  // of each row; queries of new ones
};

Tile tile_of(const DeltaNet& net, const Part& part, int64_t begin) {
    const int64_t end = net.context_lens[part.span], first = net.row_starts[part.span];
    const int64_t start = end - (net.row_starts[part.span + 1] - first), size = net.block_size, dim = net.key_dim;
    const int64_t number = net.tables[part.span * net.table_width + begin / size], key_head = part.head / (net.heads / net.key_heads);
    Tile tile{Block(net, number), number != 0, std::clamp<int64_t>(start - begin, 0, TILE), std::min(end - begin, TILE),
              first + begin - start, begin % size, {}, {}};
    for (int64_t j = 0; j < tile.old; j++) tile.keys[j] = tile.block.keys(key_head) + (tile.offset + j) * dim;
    for (int64_t i = tile.old; i < tile.rows; i++) {
        tile.queries[i] = net.mixed_keys(key_head) + (tile.row + i) * dim;
        tile.keys[i] = net.mixed_keys(net.key_heads + key_head) + (tile.row + i) * dim;
    }
    return tile;
}

// A tile's stored rows.
Beside beside_state(const DeltaNet& net, const Part& part, const Tile& tile) {
    const int64_t keys = part.head % (net.heads / net.key_heads) ? 0 : net.key_dim, decays = net.decay_dim > 1 ? net.decay_dim : 0;
    const auto lines = [&](int64_t width) { return tile.old * width / LANES; };
    return {{tile.block.updates(part.head) + tile.offset * net.value_dim, tile.keys[0], tile.block.decays(part.head) + tile.offset * decays},
            {lines(net.value_dim), lines(keys), lines(decays)}};
}

// Asks for where a tile's new rows go, and for the sum of decays that the next head begins with.
void expect(const DeltaNet& net, const Part& part, const Tile& tile) {
    if (!tile.there) return;
    for (int64_t i = tile.old; i < tile.rows; i++) {
        ask<1>(tile.block.updates(part.head) + (tile.offset + i) * net.value_dim + part.first, part.width);
        ask<1>(tile.block.decays(part.head) + (tile.offset + i) * net.decay_dim, net.decay_dim);
    }
    ask<0>(tile.block.decays(part.head + 1) + (tile.offset + tile.old - 1) * net.decay_dim, net.decay_dim);
}

// The sums of decays of a tile's new rows, their keys and queries with the factors of the state, and its products with them.
template <bool WHOLE>
void meet_state(const DeltaNet& net, const Part& part, const Tile& tile, const float* state, int64_t state_stride, const Room& room) {
    const int64_t dim = net.key_dim, decay_dim = net.decay_dim, stride = padded(part.width);
    const float *k[TILE], *q[TILE], *stored = tile.block.decays(part.head) + tile.offset * decay_dim;
    for (int64_t i = tile.old; i < tile.rows; i++) {
        const float* rates = net.rates + (tile.row + i) * net.rate_columns() + part.head * decay_dim;
        float* sums = room.sums + i * decay_dim;
        const float* last = i > tile.old ? sums - decay_dim : stored + (i - 1) * decay_dim;
        for (int64_t d = 0; d < decay_dim; d++) sums[d] = rates[d] + (i ? last[d] : 0.0f);
        k[i] = room.keys + i * dim, q[i] = room.queries + i * dim;
        decays_of<WHOLE>(sums, nullptr, decay_dim, dim, room.decays);
        scale<WHOLE>(tile.keys[i], room.decays, dim, room.keys + i * dim);
        scale<WHOLE>(tile.queries[i], room.decays, dim, room.queries + i * dim);
    }
    all_products(state, state_stride, dim, k + tile.old, q + tile.old, tile.rows - tile.old, part.width,
                 room.of_keys + tile.old * stride, room.of_queries + tile.old * stride, stride, beside_state(net, part, tile));
}

// What was computed of a tile before: updates and sums of decays.
template <bool WHOLE>
void recall(const DeltaNet& net, const Part& part, const Tile& tile, const Room& room) {
    const int64_t values = net.value_dim, width = part.width;
    const float* updates = tile.block.updates(part.head) + tile.offset * values + part.first;
    for (int64_t j = 0; j < tile.old; j++)
        for (int64_t c = 0; c < width; c += LANES)
            store(room.updates + j * padded(width) + c, some<WHOLE>(updates + j * values + c, width - c));
    const float* sums = tile.block.decays(part.head) + tile.offset * net.decay_dim;
    std::memcpy(room.sums, sums, tile.old * net.decay_dim * sizeof(float));
}

// Row i of a tile: its update, which is stored, and its result.
template <bool WHOLE>
void correct(const DeltaNet& net, const Part& part, const Tile& tile, int64_t i, const Room& room) {
    const int64_t row = tile.row + i, head = part.head, values = net.value_dim, width = part.width, stride = padded(width);
    const float beta = net.rates[row * net.rate_columns() + net.heads * net.decay_dim + head];
    float seen[TILE], read[TILE];
    const auto weigh_rows = net.decay_dim == 1 ? weigh<WHOLE, false> : weigh<WHOLE, true>;
    weigh_rows(tile.keys, room.sums, i, tile.queries[i], net.key_dim, seen, read);
    const float* v = net.mixed_values(head) + row * values + part.first;
    float* out = net.results + (row * net.heads + head) * values + part.first;
    float* kept = tile.block.updates(head) + (tile.offset + i) * values + part.first;
    f32x16 knowns[BEFORE], results[BEFORE];
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t place = c / LANES % BEFORE;
        if (place == 0) {
            const float* rows = room.updates + c;
            if (stride - c >= BEFORE * LANES)
                before<BEFORE>(rows, stride, i, seen, read, knowns, results);
            else
                for (int64_t v = 0; c + v * LANES < width; v++)
                    before<1>(rows + v * LANES, stride, i, seen, read, knowns + v, results + v);
        }
        f32x16 update = some<WHOLE>(v + c, width - c) - load(room.of_keys + i * stride + c) - knowns[place];
        update = update * beta;
        store(room.updates + i * stride + c, update);
        const f32x16 result = fma(splat(read[i]), update, results[place]);
        put<WHOLE>(out + c, result + load(room.of_queries + i * stride + c), width - c);
        if (tile.there) put<WHOLE>(kept + c, update, width - c);
    }
}

// The state after a whole tile, to `next`; `away`: nobody reads it in this step.
template <bool WHOLE>
void fold(const DeltaNet& net, const Part& part, const Tile& tile, const float* state, int64_t state_stride, float* next,
          int64_t next_stride, bool away, const Room& room) {
    const int64_t dim = net.key_dim, decay_dim = net.decay_dim;
    const float* total = room.sums + (TILE - 1) * decay_dim;
    for (int64_t j = 0; j < TILE; j++) {
        decays_of<WHOLE>(total, room.sums + j * decay_dim, decay_dim, dim, room.decays);
        scale<WHOLE>(tile.keys[j], room.decays, dim, room.keys + j * dim);
    }
    decays_of<WHOLE>(total, nullptr, decay_dim, dim, room.decays);
    const auto some = [&](auto rows_of, int64_t a, int64_t step) {
        rows_of(state + a * state_stride, state_stride, room.keys + a, room.updates, padded(part.width), room.decays + a, dim,
                part.width, next + a * next_stride, next_stride, away);
        return a + step;
    };
    int64_t a = 0;
    while (a + FOLDED <= dim) a = some(fold_rows<FOLDED, COLUMNS>, a, FOLDED);
    while (a < dim) a = some(fold_rows<1, COLUMNS>, a, 1);
    if (away) stored_away();
}

// A part's way through its tiles.
template <bool WHOLE>
void rule(const DeltaNet& net, const Part& part, const Room& room) {
    const int64_t size = net.block_size, stride = padded(part.width), decay_dim = net.decay_dim;
    const int64_t end = net.context_lens[part.span], start = end - (net.row_starts[part.span + 1] - net.row_starts[part.span]);
    const int64_t from = start / size * size;
    const float* state = room.state;
    int64_t state_stride = stride;
    if (from) {
        state = Block(net, net.tables[part.span * net.table_width + from / size - 1]).state(part.head) + part.first;
        state_stride = net.value_dim;
    } else {
        std::fill(room.state, room.state + net.key_dim * stride, 0.0f);
    }
    for (int64_t begin = from; begin < end; begin += TILE) {
        const Tile tile = tile_of(net, part, begin);
        if (tile.old) expect(net, part, tile);
        if (tile.old < tile.rows) meet_state<WHOLE>(net, part, tile, state, state_stride, room);
        if (tile.old) recall<WHOLE>(net, part, tile, room);
        for (int64_t i = tile.old; i < tile.rows; i++) correct<WHOLE>(net, part, tile, i, room);
        if (tile.there && part.first == 0)
            std::memcpy(tile.block.decays(part.head) + (tile.offset + tile.old) * decay_dim, room.sums + tile.old * decay_dim,
                        (tile.rows - tile.old) * decay_dim * sizeof(float));
        if (tile.rows < TILE) break;
        const bool kept = tile.there && tile.old < TILE && (begin + TILE) % size == 0;
        float* next = kept ? tile.block.state(part.head) + part.first : room.state;
        const int64_t next_stride = kept ? net.value_dim : stride;
        fold<WHOLE>(net, part, tile, state, state_stride, next, next_stride, kept && begin + TILE >= end, room);
        state = next, state_stride = next_stride;
    }
}

// -- results ------------------------------------------------------------------------------------------------------

template <bool WHOLE, class T>
void finish(const DeltaNet& net, int64_t row, int64_t head) {
    const int64_t size = net.value_dim, width = net.channels + net.heads * size;
    const float* x = net.results + (row * net.heads + head) * size;
    const T* gate = (const T*)net.x + row * width + net.channels + head * size;
    T* out = (T*)net.out + (row * net.heads + head) * size;
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x16 v = some<WHOLE>(x + i, size - i);
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + net.eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        f32x16 v = some<WHOLE>(x + i, left) * scale * some<WHOLE>(net.norm + i, left);
        const f32x16 through = some<WHOLE>(gate + i, left);
        put<WHOLE>(out + i, v * (net.sigmoid ? sigmoid(through) : silu(through)), left);
    }
}

// Columns of a head that one item works on: all of them, where there are items enough.
int64_t columns_of_item(const DeltaNet& net) {
    int64_t width = padded(net.value_dim);
    while (width > 2 * LANES && net.spans * net.heads * (padded(net.value_dim) / width) < 2 * threads()) width = padded(width / 2);
    return width;
}

template <bool WHOLE, class T>
void compute(const DeltaNet& net) {
    const int64_t width = columns_of_item(net), parts = (net.value_dim + width - 1) / width;
    parallel(net.tokens * net.units(), {16}, threads(), [&](int64_t from, int64_t to, int) {
        Unit<T> units[2];  // the one at hand, and the next
        units[from % 2].find(net, from);
        for (int64_t item = from; item < to; item++) {
            Unit<T>&unit = units[item % 2], &next = units[(item + 1) % 2];
            if (item + 1 < to) next.find(net, item + 1), next.expect(net);
            mix<WHOLE>(net, unit);
            if (unit.unit == 0) rate(net, unit.row);
        }
    });
    const auto part_of = [&](int64_t item) {
        const int64_t first = item % parts * width, head = item / parts;
        return Part{head / net.heads, head % net.heads, first, std::min(width, net.value_dim - first)};
    };
    parallel(net.spans * net.heads * parts, {}, threads(), [&](int64_t from, int64_t to, int thread) {
        const Room room(net.scratch + thread * net.scratch_bytes, net.key_dim, padded(net.value_dim));
        for (int64_t item = from; item < to; item++) {
            const Part part = part_of(item);
            rule<WHOLE>(net, part, room);
            if (parts > 1) continue;
            for (int64_t row = net.row_starts[part.span]; row < net.row_starts[part.span + 1]; row++) finish<WHOLE, T>(net, row, part.head);
        }
    });
    if (parts == 1) return;
    parallel_each(net.tokens * net.heads, {64}, [&](int64_t item) { finish<WHOLE, T>(net, item / net.heads, item % net.heads); });
}

template <class T>
void delta_net(const DeltaNet& net) {
    net.key_dim % LANES || net.value_dim % LANES ? compute<false, T>(net) : compute<true, T>(net);
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs.
QUIRE_API int64_t quire_delta_net_scratch_bytes(int64_t key_dim, int64_t value_dim) {
    return (Room::bytes(key_dim, padded(value_dim)) + 63) / 64 * 64;
}

QUIRE_API void quire_delta_net(const DeltaNet* net) {
    if (net->dtype == F32) delta_net<float>(*net);
    if (net->dtype == BF16) delta_net<bf16>(*net);
    if (net->dtype == F16) delta_net<f16>(*net);
}
