// The gated delta net, over rows and states in blocks: see `ops/states.py`, which has the formulas and the layout.
//
// Three loops: rows are convolved and normalized, a head of a row at a time; heads of spans go through the rule, tile by
// tile; heads of rows are normed and gated. Every sum runs in one order, over a tile at an absolute position, in lanes
// that do not meet: no bit depends on how many rows come at once, on the columns that are worked on together, or on the
// number of threads. Lanes of a tile that no row has been written to may hold anything, and are never added.
#include <algorithm>
#include <cmath>

#include "simd.h"
#include "team.h"

namespace quire {

constexpr int64_t TILE = 16;  // `TILE` of states.py
static_assert(TILE == LANES);

struct DeltaNet {  // as in recurrent.py
    uint8_t* blocks;  // of a layer, in the first block
    int64_t block_bytes, states, keys, updates, decays, inputs;  // from one block to the next; where the parts begin
    int64_t block_size, key_heads, heads, key_dim, value_dim, taps, channels;
    int64_t dtype, spans, tokens, table_width;
    const int64_t *row_starts, *context_lens, *tables;
    const void* x;  // [tokens, channels + heads * value_dim]
    const float *ab;  // [tokens, 2 * heads]
    const float *conv, *decay, *shift, *norm;  // conv: [taps, channels]
    float *mixed, *rates, *results;  // [tokens, channels], [tokens, 2 * heads], [tokens, heads * value_dim]
    uint8_t* scratch;  // of each thread
    int64_t scratch_bytes;
    void* out;  // [tokens, heads * value_dim]
    float eps;
};

namespace {

constexpr float L2_EPS = 1e-6f;

#if defined(__AVX512F__)
constexpr int ALONE = 8, TOGETHER = 4, COLUMNS = 2;  // vectors of a single row; rows at a time, and vectors of theirs
constexpr int FOLDED = 8, BEFORE = 4;  // rows of a state at a time; vectors of what rows before one say
#else
constexpr int ALONE = 2, TOGETHER = 2, COLUMNS = 1, FOLDED = 4, BEFORE = 2;
#endif

// Parts of a block that there is.
struct Block {
    const DeltaNet& net;
    uint8_t* first;
    Block(const DeltaNet& net, int64_t block) : net(net), first(net.blocks + block * net.block_bytes) {}
    float* state(int64_t head) const { return (float*)(first + net.states) + head * net.key_dim * net.value_dim; }
    float* keys(int64_t key_head) const {  // [key_dim, block_size]
        return (float*)(first + net.keys) + key_head * net.key_dim * net.block_size;
    }
    float* updates(int64_t head) const {  // [block_size, value_dim]
        return (float*)(first + net.updates) + head * net.block_size * net.value_dim;
    }
    float* decays(int64_t head) const { return (float*)(first + net.decays) + head * net.block_size; }
    template <class T>
    T* inputs(int64_t offset) const {
        return (T*)(first + net.inputs) + offset * net.channels;
    }
};

INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// -- rows ---------------------------------------------------------------------------------------------------------

// Convolves one head's channels of a row, and brings queries and keys to length 1. Inputs and keys are stored.
template <class T>
void mix(const DeltaNet& net, int64_t span, int64_t row, int64_t unit) {
    const int64_t begin = net.row_starts[span], end = net.row_starts[span + 1], size = net.block_size;
    const int64_t position = net.context_lens[span] - (end - row), width = net.channels + net.heads * net.value_dim;
    const int64_t* table = net.tables + span * net.table_width;
    const bool is_key = unit < 2 * net.key_heads;
    const int64_t dim = is_key ? net.key_dim : net.value_dim;
    const int64_t first = is_key ? unit * dim : 2 * net.key_heads * net.key_dim + (unit - 2 * net.key_heads) * dim;
    const T* x = (const T*)net.x;
    const T* seen[16];  // by tap; null: before the beginning
    for (int64_t tap = 0; tap < net.taps; tap++) {
        const int64_t back = net.taps - 1 - tap, at = position - back;
        if (row - back >= begin)
            seen[tap] = x + (row - back) * width + first;
        else
            seen[tap] = at < 0 ? nullptr : Block(net, table[at / size]).inputs<T>(at % size) + first;
    }
    float* out = net.mixed + row * net.channels + first;
    f32x16 squares = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        f32x16 total = {};
        for (int64_t tap = 0; tap < net.taps; tap++)
            if (seen[tap])
                total = fma(load_some(seen[tap] + i, dim - i), load_some(net.conv + tap * net.channels + first + i, dim - i), total);
        total = silu(total);
        squares = fma(total, total, squares);
        store_some(out + i, total, dim - i);
    }
    if (is_key) {
        float scale = 1.0f / std::sqrt(sum(squares) + L2_EPS);
        if (unit < net.key_heads) scale *= 1.0f / std::sqrt((float)dim);
        for (int64_t i = 0; i < dim; i += LANES) store_some(out + i, load_some(out + i, dim - i) * scale, dim - i);
    }
    if (const int64_t number = table[position / size]) {
        const Block block(net, number);
        std::memcpy(block.inputs<T>(position % size) + first, x + row * width + first, dim * sizeof(T));
        if (is_key && unit >= net.key_heads)
            for (int64_t a = 0; a < dim; a++) block.keys(unit - net.key_heads)[a * size + position % size] = out[a];
    }
}

// Of each head of a row, how its state decays, and how far it is corrected.
void rate(const DeltaNet& net, int64_t row) {
    const float* ab = net.ab + row * 2 * net.heads;
    float* out = net.rates + row * 2 * net.heads;
    for (int64_t head = 0; head < net.heads; head += LANES) {
        const int64_t left = net.heads - head;
        f32x16 a = load_some(ab + head, left) + load_some(net.shift + head, left);
        f32x16 small = exp(-select(less(a, splat(0.0f)), -a, a)), softplus = max(a, splat(0.0f));
        for (int lane = 0; lane < LANES; lane++) softplus[lane] += (float)std::log1p((double)small[lane]);
        store_some(out + head, load_some(net.decay + head, left) * softplus, left);
        f32x16 b = load_some(ab + net.heads + head, left);
        store_some(out + net.heads + head, 1.0f / (1.0f + exp(-b)), left);
    }
}

// -- the rule -----------------------------------------------------------------------------------------------------

// What a thread needs for one head: see `Tile`.
struct Room {
    float *keys, *weighted, *by_keys, *by_queries, *of_keys, *of_queries, *updates, *state;
    Room(uint8_t* from, int64_t key_dim, int64_t width) {
        float* next = (float*)from;
        const auto take = [&](int64_t count) {
            float* part = next;
            next += count;
            return part;
        };
        keys = take(key_dim * TILE), weighted = take(key_dim * TILE);
        by_keys = take(TILE * TILE), by_queries = take(TILE * TILE);
        of_keys = take(TILE * width), of_queries = take(TILE * width), updates = take(TILE * width);
        state = take(key_dim * width);
    }
    static int64_t bytes(int64_t key_dim, int64_t width) {
        return 4 * (2 * key_dim * TILE + 2 * TILE * TILE + 3 * TILE * width + key_dim * width);
    }
};

INLINE int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// 16 numbers, of which `left` are there where they are not all.
template <bool WHOLE>
INLINE f32x16 some(const float* p, int64_t left) {
    if constexpr (WHOLE) return load(p);
    return left > 0 ? load_some(p, left) : f32x16{};
}

// The sums over `dim` of rows' keys and queries with `columns` columns: outK[r][c] = sum_a k[r][a] * m[a][c].
template <int R, int V, bool WHOLE>
void products(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q, int64_t columns,
                     float* out_k, float* out_q, int64_t out_stride) {
    f32x16 of_k[R][V] = {}, of_q[R][V] = {};
    for (int64_t a = 0; a < dim; a++) {
        f32x16 row[V];
        for (int v = 0; v < V; v++) row[v] = some<WHOLE>(m + a * stride + v * LANES, columns - v * LANES);
        for (int r = 0; r < R; r++) {
            const f32x16 ka = splat(k[r][a]), qa = splat(q[r][a]);
            for (int v = 0; v < V; v++) of_k[r][v] = fma(ka, row[v], of_k[r][v]), of_q[r][v] = fma(qa, row[v], of_q[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V && v * LANES < columns; v++) {
            store(out_k + r * out_stride + v * LANES, of_k[r][v]);
            store(out_q + r * out_stride + v * LANES, of_q[r][v]);
        }
}

template <int R, int V>
void products_of_rows(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q,
                             int64_t columns, float* out_k, float* out_q, int64_t out_stride) {
    for (int64_t c = 0; c < columns; c += V * LANES) {
        const auto part = columns - c >= V * LANES ? products<R, V, true> : products<R, V, false>;
        part(m + c, stride, dim, k, q, columns - c, out_k + c, out_q + c, out_stride);
    }
}

// The same of any number of rows and columns. What is added, and in which order, is the same for each.
void all_products(const float* m, int64_t stride, int64_t dim, const float* const* k, const float* const* q, int64_t rows,
                  int64_t columns, float* out_k, float* out_q, int64_t out_stride) {
    const auto some = columns <= LANES ? products_of_rows<TOGETHER, 1> : products_of_rows<TOGETHER, COLUMNS>;
    const auto one = columns <= LANES ? products_of_rows<1, 1> : products_of_rows<1, ALONE>;
    int64_t r = 0;
    for (; r + TOGETHER <= rows; r += TOGETHER)
        some(m, stride, dim, k + r, q + r, columns, out_k + r * out_stride, out_q + r * out_stride, out_stride);
    for (; r < rows; r++)
        one(m, stride, dim, k + r, q + r, columns, out_k + r * out_stride, out_q + r * out_stride, out_stride);
}

// R rows of a state, decayed, and what the rows of a tile add: next[a][c] = decay * state[a][c] + sum_j w[a][j] * u[j][c].
template <int R, int V, bool WHOLE>
void fold_part(const float* state, int64_t stride, const float* weights, const float* updates, int64_t updates_stride,
                      float decay, int64_t columns, float* next, int64_t next_stride) {
    f32x16 total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            total[r][v] = decay * some<WHOLE>(state + r * stride + v * LANES, columns - v * LANES);
    for (int64_t j = 0; j < TILE; j++)
        for (int v = 0; v < V; v++) {
            const f32x16 u = some<WHOLE>(updates + j * updates_stride + v * LANES, columns - v * LANES);
            for (int r = 0; r < R; r++) total[r][v] = fma(splat(weights[r * TILE + j]), u, total[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float* to = next + r * next_stride + v * LANES;
            if (WHOLE)
                store(to, total[r][v]);
            else if (columns > v * LANES)
                store_some(to, total[r][v], columns - v * LANES);
        }
}

template <int R, int V>
void fold_rows(const float* state, int64_t stride, const float* weights, const float* updates, int64_t updates_stride,
               float decay, int64_t columns, float* next, int64_t next_stride) {
    for (int64_t c = 0; c < columns; c += V * LANES) {
        const auto part = columns - c >= V * LANES ? fold_part<R, V, true> : fold_part<R, V, false>;
        part(state + c, stride, weights, updates + c, updates_stride, decay, columns - c, next + c, next_stride);
    }
}

// What the rows before one in its tile say to its key (`seen` their weights) and to its query (`read`), for V vectors.
template <int V>
INLINE void before(const float* updates, int64_t stride, int64_t rows, const float* seen, const float* read, f32x16* known,
                   f32x16* result) {
    for (int v = 0; v < V; v++) known[v] = result[v] = f32x16{};
    for (int64_t j = 0; j < rows; j++) {
        const f32x16 s = splat(seen[j]), r = splat(read[j]);
        for (int v = 0; v < V; v++) {
            const f32x16 u = load(updates + j * stride + v * LANES);
            known[v] = fma(s, u, known[v]), result[v] = fma(r, u, result[v]);
        }
    }
}

// One head's columns `first` .. `first + width - 1` of one span.
void rule(const DeltaNet& net, int64_t span, int64_t head, int64_t first, int64_t width, const Room& room) {
    const int64_t begin = net.row_starts[span], count = net.row_starts[span + 1] - begin, size = net.block_size;
    const int64_t dim = net.key_dim, stride = padded(width), values = net.value_dim;
    const int64_t end = net.context_lens[span], start = end - count, each = net.heads / net.key_heads, key_head = head / each;
    const int64_t* table = net.tables + span * net.table_width;
    const int64_t from = start / size * size;
    const float* state = room.state;
    int64_t state_stride = stride;
    if (from) {
        state = Block(net, table[from / size - 1]).state(head) + first;
        state_stride = values;
    } else {
        std::fill(room.state, room.state + dim * stride, 0.0f);
    }
    for (int64_t tile = from; tile < end; tile += TILE) {
        const int64_t old = std::clamp<int64_t>(start - tile, 0, TILE), rows = std::min(end - tile, TILE), offset = tile % size;
        const int64_t there = table[tile / size];
        const Block block(net, there);
        f32x16 sums = {};
        if (old) {
            for (int64_t a = 0; a < dim; a++) store(room.keys + a * TILE, load(block.keys(key_head) + a * size + offset));
            for (int64_t j = 0; j < old; j++)
                for (int64_t c = 0; c < width; c += LANES)
                    store(room.updates + j * stride + c, load_some(block.updates(head) + (offset + j) * values + first + c, width - c));
            sums = load_some(block.decays(head) + offset, old);
        }
        const float *k[TILE], *q[TILE];
        for (int64_t i = old; i < rows; i++) {
            const int64_t row = begin + tile + i - start;
            q[i] = net.mixed + row * net.channels + key_head * dim;
            k[i] = q[i] + net.key_heads * dim;
            for (int64_t a = 0; a < dim; a++) room.keys[a * TILE + i] = k[i][a];
            sums[i] = net.rates[row * 2 * net.heads + head] + (i ? sums[i - 1] : 0.0f);
        }
        if (old < rows) {
            all_products(room.keys, TILE, dim, k + old, q + old, rows - old, TILE, room.by_keys + old * TILE,
                         room.by_queries + old * TILE, TILE);
            all_products(state, state_stride, dim, k + old, q + old, rows - old, width, room.of_keys + old * stride,
                         room.of_queries + old * stride, stride);
        }
        for (int64_t i = old; i < rows; i++) {
            const int64_t row = begin + tile + i - start;
            const f32x16 since = exp(splat(sums[i]) - sums);
            const float decay = exp(splat(sums[i]))[0], beta = net.rates[(row * 2 + 1) * net.heads + head];
            float seen[TILE], read[TILE];
            store(seen, load(room.by_keys + i * TILE) * since);
            store(read, load(room.by_queries + i * TILE) * since);
            const float* v = net.mixed + row * net.channels + 2 * net.key_heads * dim + head * values + first;
            float* out = net.results + (row * net.heads + head) * values + first;
            f32x16 knowns[BEFORE], results[BEFORE];
            for (int64_t c = 0; c < width; c += LANES) {
                const int64_t place = c / LANES % BEFORE;
                if (place == 0) {
                    const auto* rows_before = room.updates + c;
                    if (stride - c >= BEFORE * LANES)
                        before<BEFORE>(rows_before, stride, i, seen, read, knowns, results);
                    else
                        for (int64_t v = 0; c + v * LANES < width; v++)
                            before<1>(rows_before + v * LANES, stride, i, seen, read, knowns + v, results + v);
                }
                const f32x16 known = knowns[place];
                f32x16 result = results[place];
                f32x16 update = load_some(v + c, width - c) - decay * load(room.of_keys + i * stride + c) - known;
                update = update * beta;
                store(room.updates + i * stride + c, update);
                result = fma(splat(read[i]), update, result);
                result = fma(splat(decay), load(room.of_queries + i * stride + c), result);
                store_some(out + c, result, width - c);
                if (there) store_some(block.updates(head) + (offset + i) * values + first + c, update, width - c);
            }
        }
        if (there && old < rows) {
            for (int64_t i = old; i < rows && first == 0; i++) block.decays(head)[offset + i] = sums[i];
        }
        if (rows < TILE) break;
        const f32x16 left = exp(splat(sums[TILE - 1]) - sums);
        const float decay = exp(splat(sums[TILE - 1]))[0];
        float* next = room.state;
        int64_t next_stride = stride;
        if (there && old < TILE && (tile + TILE) % size == 0) next = block.state(head) + first, next_stride = values;
        for (int64_t a = 0; a < dim; a++) store(room.weighted + a * TILE, load(room.keys + a * TILE) * left);
        const auto fold = [&](auto rows_of, int64_t a, int64_t step) {
            rows_of(state + a * state_stride, state_stride, room.weighted + a * TILE, room.updates, stride, decay, width,
                    next + a * next_stride, next_stride);
            return a + step;
        };
        int64_t a = 0;
        while (a + FOLDED <= dim) a = fold(fold_rows<FOLDED, COLUMNS>, a, FOLDED);
        while (a < dim) a = fold(fold_rows<1, COLUMNS>, a, 1);
        state = next, state_stride = next_stride;
    }
}

// -- results ------------------------------------------------------------------------------------------------------

template <class T>
void finish(const DeltaNet& net, int64_t row, int64_t head) {
    const int64_t size = net.value_dim, width = net.channels + net.heads * size;
    const float* x = net.results + (row * net.heads + head) * size;
    const T* gate = (const T*)net.x + row * width + net.channels + head * size;
    T* out = (T*)net.out + (row * net.heads + head) * size;
    f32x16 squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x16 v = load_some(x + i, size - i);
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + net.eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        f32x16 v = load_some(x + i, left) * scale * load_some(net.norm + i, left);
        store_some(out + i, v * silu(load_some(gate + i, left)), left);
    }
}

// Columns of a head that one item works on: all of them, where there are items enough.
int64_t columns_of_item(const DeltaNet& net) {
    int64_t width = padded(net.value_dim);
    while (width > 2 * LANES && net.spans * net.heads * (padded(net.value_dim) / width) < 2 * threads()) width = padded(width / 2);
    return width;
}

template <class T>
void delta_net(const DeltaNet& net) {
    const int64_t units = 2 * net.key_heads + net.heads, width = columns_of_item(net);
    const int64_t parts = (net.value_dim + width - 1) / width;
    const auto span_of = [&](int64_t row) {
        return std::upper_bound(net.row_starts, net.row_starts + net.spans + 1, row) - net.row_starts - 1;
    };
    parallel_each(net.tokens * units, {64}, [&](int64_t item) {
        const int64_t row = item / units;
        mix<T>(net, span_of(row), row, item % units);
        if (item % units == 0) rate(net, row);
    });
    parallel(net.spans * net.heads * parts, ONE_BY_ONE, threads(), [&](int64_t from, int64_t to, int thread) {
        const Room room(net.scratch + thread * net.scratch_bytes, net.key_dim, padded(net.value_dim));
        for (int64_t item = from; item < to; item++) {
            const int64_t first = item % parts * width, head = item / parts % net.heads;
            rule(net, item / parts / net.heads, head, first, std::min(width, net.value_dim - first), room);
        }
    });
    parallel_each(net.tokens * net.heads, {64}, [&](int64_t item) { finish<T>(net, item / net.heads, item % net.heads); });
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
