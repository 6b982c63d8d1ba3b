// Mamba 2's state-space layer over rows and states in blocks: see `ops/mamba.py`, which has the formulas.
//
// Three loops: rows are convolved; tiles of spans get the products of their queries and keys, which the heads of a group
// share; heads of spans go through the tiles, with the state in front, and are gated. Every sum runs in one order, over a
// tile at an absolute position, in lanes that do not meet: no bit depends on how many rows come at once, or on the number
// of threads. Lanes of a tile that no row has been written to may hold anything, and are never added.
#include <vector>

#include "convolution.h"
#include "state_tiles.h"
#include "team.h"

namespace quire {

struct Mamba {  // as in mamba.py
    Inputs inputs;
    uint8_t* blocks;  // of the layer, in the first block
    int64_t states, keys, updates, decays;  // where the parts begin
    int64_t groups, heads, state_dim, head_dim, dtype, tokens;
    const void* x;  // [tokens, channels + heads * head_dim]: C, B, x and the gate
    const float* dt;  // [tokens, heads]
    const float *conv, *bias, *decay, *shift, *skip;
    float *mixed, *rates, *scores, *packed;  // [tokens, channels], [2, tokens, heads], [tokens, groups, TILE],
    uint8_t* scratch;                        // [tiles, groups, state_dim, TILE]; of each thread
    int64_t scratch_bytes;
    float* out;  // [tokens, heads * head_dim]
};

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 4, COLUMNS = 4, FOLDED = 4;  // rows at a time, and vectors of theirs; rows of a state at a time
#else
constexpr int ROWS = 2, COLUMNS = 2, FOLDED = 2;
#endif
constexpr int64_t AHEAD = 1024;  // numbers of a state that are asked for ahead
constexpr int64_t UNIT = 256;  // channels of a row that one item convolves

// Parts of a block that there is.
struct Block {
    const Mamba& net;
    uint8_t* first;
    Block(const Mamba& net, int64_t block) : net(net), first(net.blocks + block * net.inputs.block_bytes) {}
    float* state(int64_t head) const { return (float*)(first + net.states) + head * net.state_dim * net.head_dim; }
    float* keys(int64_t group) const {  // [block_size, state_dim]
        return (float*)(first + net.keys) + group * net.state_dim * net.inputs.block_size;
    }
    float* updates(int64_t head) const {  // [block_size, head_dim]
        return (float*)(first + net.updates) + head * net.inputs.block_size * net.head_dim;
    }
    float* decays(int64_t head) const { return (float*)(first + net.decays) + head * net.inputs.block_size; }
};

// A tile of a span: `old` rows of it were computed before, and `rows` are there after this step.
struct Tile {
    int64_t span, begin, old, rows, row;  // `begin`: its first position; `row`: the step's row of its first position
};

std::vector<Tile> tiles_of(const Mamba& net) {
    const Inputs& in = net.inputs;
    std::vector<Tile> found;
    for (int64_t span = 0; span < in.spans; span++) {
        const int64_t count = in.row_starts[span + 1] - in.row_starts[span], end = in.context_lens[span], start = end - count;
        for (int64_t tile = start / in.block_size * in.block_size; count && tile < end; tile += TILE)
            found.push_back({span, tile, std::clamp<int64_t>(start - tile, 0, TILE), std::min(end - tile, TILE),
                             in.row_starts[span] + tile - start});
    }
    return found;
}

// -- rows ---------------------------------------------------------------------------------------------------------

// Convolves some channels of a row. Inputs and keys are stored.
template <class T>
void mix(const Mamba& net, int64_t row, int64_t from) {
    const Inputs& in = net.inputs;
    const int64_t width = in.channels + net.heads * net.head_dim, keys = net.groups * net.state_dim;
    const int64_t to = std::min(from + UNIT, in.channels), span = in.span_of(row), position = in.position(span, row);
    const T* x = (const T*)net.x;
    const Taps<T> taps(in, span, row, [&](int64_t of) { return x + of * width; });
    float* out = net.mixed + row * in.channels;
    for (int64_t i = from; i < to; i += LANES) {
        const int64_t left = to - i;
        store_some(out + i, silu(taps.at(in.taps, net.conv, in.channels, load_some(net.bias + i, left), i, left)), left);
    }
    if (const int64_t number = in.block(span, position)) {
        std::memcpy(in.stored<T>(number, position) + from, x + row * width + from, (to - from) * sizeof(T));
        const Block block(net, number);
        for (int64_t i = std::max(from, keys); i < std::min(to, 2 * keys); i++) {
            const int64_t group = (i - keys) / net.state_dim, a = (i - keys) % net.state_dim;
            block.keys(group)[position % in.block_size * net.state_dim + a] = out[i];
        }
    }
}

// Of each head of a row: dt, and how its state decays.
void rate(const Mamba& net, int64_t row) {
    float *dt = net.rates + row * net.heads, *decays = dt + net.tokens * net.heads;
    for (int64_t head = 0; head < net.heads; head += LANES) {
        const int64_t left = net.heads - head;
        const f32x16 a = load_some(net.dt + row * net.heads + head, left) + load_some(net.shift + head, left);
        const f32x16 small = exp(-select(less(a, splat(0.0f)), -a, a));
        float logs[LANES];
        for (int lane = 0; lane < LANES; lane++) logs[lane] = (float)std::log1p((double)small[lane]);
        const f32x16 steps = max(a, splat(0.0f)) + load(logs);
        store_some(dt + head, steps, left);
        store_some(decays + head, load_some(net.decay + head, left) * steps, left);
    }
}

// -- products of a tile, for the heads of a group --------------------------------------------------------------------

// Packs a tile's keys [state_dim, TILE], and multiplies them with its new queries: scores [rows, groups, TILE].
void score(const Mamba& net, const Tile& tile, int64_t group, float* packed) {
    const Inputs& in = net.inputs;
    const int64_t dim = net.state_dim, width = in.channels;
    if (tile.old) {
        const float* stored = Block(net, in.block(tile.span, tile.begin)).keys(group) + tile.begin % in.block_size * dim;
        for (int64_t j = 0; j < tile.old; j++)
            for (int64_t a = 0; a < dim; a++) packed[a * TILE + j] = stored[j * dim + a];
    }
    for (int64_t i = tile.old; i < tile.rows; i++) {
        const float* key = net.mixed + (tile.row + i) * width + (net.groups + group) * dim;
        for (int64_t a = 0; a < dim; a++) packed[a * TILE + i] = key[a];
    }
    for (int64_t i = tile.old; i < tile.rows; i++) {
        const float* query = net.mixed + (tile.row + i) * width + group * dim;
        f32x16 total = {};
        for (int64_t a = 0; a < dim; a++) total = fma(splat(query[a]), load(packed + a * TILE), total);
        store(net.scores + ((tile.row + i) * net.groups + group) * TILE, total);
    }
}

// -- states -------------------------------------------------------------------------------------------------------

// What a state says to R queries, V vectors of it: out[r][c] = sum_a q[r][a] * state[a][c].
template <int R, int V, bool WHOLE>
INLINE void read_part(const float* state, int64_t stride, int64_t dim, const float* query, int64_t query_stride,
                      int64_t columns, float* out, int64_t out_stride) {
    f32x16 total[R][V] = {};
    for (int64_t a = 0; a < dim; a++) {
        f32x16 row[V];
        for (int v = 0; v < V; v++) {
            const float* at = state + a * stride + v * LANES;
            if (R == 1) __builtin_prefetch(at + AHEAD);  // a state is read once, from memory
            row[v] = some<WHOLE>(at, columns - v * LANES);
        }
        for (int r = 0; r < R; r++) {
            const f32x16 q = splat(query[r * query_stride + a]);
            for (int v = 0; v < V; v++) total[r][v] = fma(q, row[v], total[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V && v * LANES < columns; v++) store(out + r * out_stride + v * LANES, total[r][v]);
}

template <int R>
void read_rows(const float* state, int64_t stride, int64_t dim, const float* query, int64_t query_stride, int64_t columns,
               float* out, int64_t out_stride) {
    for (int64_t c = 0; c < columns; c += COLUMNS * LANES) {
        const auto part = columns - c >= COLUMNS * LANES ? read_part<R, COLUMNS, true> : read_part<R, COLUMNS, false>;
        part(state + c, stride, dim, query, query_stride, columns - c, out + c, out_stride);
    }
}

// R rows of a state, decayed, and what a tile adds: next[a][c] = decay * state[a][c] + sum_j key[a][j] * u[j][c].
template <int R, int V, bool WHOLE>
INLINE void fold_part(const float* state, int64_t stride, const float* keys, const float* updates, int64_t updates_stride,
                      float decay, int64_t columns, float* next, int64_t next_stride, bool away) {
    f32x16 total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            total[r][v] = decay * some<WHOLE>(state + r * stride + v * LANES, columns - v * LANES);
    for (int64_t j = 0; j < TILE; j++)
        for (int v = 0; v < V; v++) {
            const f32x16 u = some<true>(updates + j * updates_stride + v * LANES, LANES);
            for (int r = 0; r < R; r++) total[r][v] = fma(splat(keys[r * TILE + j]), u, total[r][v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V && v * LANES < columns; v++) {
            float* to = next + r * next_stride + v * LANES;
            if (WHOLE && away)
                store_away(to, total[r][v]);
            else
                store_some(to, total[r][v], columns - v * LANES);
        }
}

template <int R>
void fold_rows(const float* state, int64_t stride, const float* keys, const float* updates, int64_t updates_stride,
               float decay, int64_t columns, float* next, int64_t next_stride, bool away) {
    int64_t c = 0;
    for (; c + COLUMNS * LANES <= columns; c += COLUMNS * LANES)
        fold_part<R, COLUMNS, true>(state + c, stride, keys, updates + c, updates_stride, decay, columns - c, next + c,
                                    next_stride, away);
    for (; c < columns; c += LANES)
        fold_part<R, 1, false>(state + c, stride, keys, updates + c, updates_stride, decay, std::min<int64_t>(columns - c, LANES),
                               next + c, next_stride, away);
}

// What a thread needs for one head: its state, and of a tile the rows added, and what the state says.
struct Room {
    float *state, *updates, *left, *said;
    Room(uint8_t* from, int64_t dim, int64_t width) {
        state = (float*)from, updates = state + dim * width;
        left = updates + TILE * width, said = left + TILE * width;
    }
    static int64_t bytes(int64_t dim, int64_t width) { return 4 * (dim + 3 * TILE) * width; }
};

// One head of one span, whose tiles these are.
template <class T>
void scan(const Mamba& net, const Tile* tile, const Tile* last, const float* packed, int64_t head, const Room& room) {
    const Inputs& in = net.inputs;
    const int64_t dim = net.state_dim, width = net.head_dim, stride = padded(width), size = in.block_size;
    const int64_t group = head / (net.heads / net.groups), all = net.heads * width, pitch = in.channels + all;
    const float* state = room.state;
    int64_t state_stride = stride;
    if (tile->begin) {
        state = Block(net, in.block(tile->span, tile->begin - 1)).state(head);
        state_stride = width;
    } else {
        std::fill(room.state, room.state + dim * stride, 0.0f);
    }
    for (; tile < last; tile++, packed += net.groups * dim * TILE) {
        const int64_t there = in.block(tile->span, tile->begin), offset = tile->begin % size;
        const Block block(net, there);
        float sums[LANES] = {};
        if (tile->old) store(sums, load_some(block.decays(head) + offset, tile->old));
        const float* updates[TILE];  // of each row of the tile
        for (int64_t j = 0; j < tile->rows; j++) {
            updates[j] = j < tile->old ? block.updates(head) + (offset + j) * width : room.updates + j * stride;
            for (int64_t c = 0; j < tile->old && c < width; c += LANES) __builtin_prefetch(updates[j] + c);
        }
        const float* mixed = net.mixed + tile->row * in.channels;
        for (int64_t i = tile->old; i < tile->rows;) {
            const bool many = tile->rows - i >= ROWS;
            const auto rows_of = many ? read_rows<ROWS> : read_rows<1>;
            rows_of(state, state_stride, dim, mixed + i * in.channels + group * dim, in.channels, width, room.said + i * stride,
                    stride);
            i += many ? ROWS : 1;
        }
        for (int64_t i = tile->old; i < tile->rows; i++) {
            const int64_t row = tile->row + i;
            const float dt = net.rates[row * net.heads + head], step = net.rates[(net.tokens + row) * net.heads + head];
            sums[i] = step + (i ? sums[i - 1] : 0.0f);
            const float* x = mixed + i * in.channels + 2 * net.groups * dim + head * width;
            const T* gate = (const T*)net.x + row * pitch + in.channels + head * width;
            float weights[TILE];
            const f32x16 total = splat(sums[i]);
            store(weights, load(net.scores + (row * net.groups + group) * TILE) * exp(total - load(sums)));
            const f32x16 decay = exp(total);
            for (int64_t c = 0; c < width; c += LANES) {
                const int64_t left = width - c;
                const f32x16 value = load_some(x + c, left), update = value * dt;
                store(room.updates + i * stride + c, update);
                f32x16 y = decay * load(room.said + i * stride + c);
                for (int64_t j = 0; j <= i; j++) y = fma(splat(weights[j]), load_some(updates[j] + c, left), y);
                y = fma(splat(net.skip[head]), value, y);
                store_some(net.out + row * all + head * width + c, y * silu(load_some(gate + c, left)), left);
                if (there) store_some(block.updates(head) + (offset + i) * width + c, update, left);
            }
            if (there) block.decays(head)[offset + i] = sums[i];
        }
        if (tile->rows < TILE) break;
        const bool kept = there && tile->old < TILE && (tile->begin + TILE) % size == 0;
        const bool away = kept && tile + 1 == last;  // the next who reads it is another step
        float* next = kept ? block.state(head) : room.state;
        const int64_t next_stride = kept ? width : stride;
        float left[TILE];
        store(left, exp(splat(sums[TILE - 1]) - load(sums)));
        const float decay = exp(splat(sums[TILE - 1]))[0];
        for (int64_t j = 0; j < TILE; j++)
            for (int64_t c = 0; c < stride; c += LANES)
                store(room.left + j * stride + c, load_some(updates[j] + c, width - c) * left[j]);
        const float* keys = packed + group * dim * TILE;
        int64_t a = 0;
        for (; a + FOLDED <= dim; a += FOLDED)
            fold_rows<FOLDED>(state + a * state_stride, state_stride, keys + a * TILE, room.left, stride, decay, width,
                              next + a * next_stride, next_stride, away);
        for (; a < dim; a++)
            fold_rows<1>(state + a * state_stride, state_stride, keys + a * TILE, room.left, stride, decay, width,
                         next + a * next_stride, next_stride, away);
        if (away) stored_away();
        state = next, state_stride = next_stride;
    }
}

template <class T>
void mamba(const Mamba& net) {
    const Inputs& in = net.inputs;
    const int64_t units = (in.channels + UNIT - 1) / UNIT;
    const std::vector<Tile> tiles = tiles_of(net);
    std::vector<int64_t> first;  // tile of each span that has rows
    for (int64_t i = 0; i < (int64_t)tiles.size(); i++)
        if (i == 0 || tiles[i].span != tiles[i - 1].span) first.push_back(i);
    first.push_back(tiles.size());
    const auto packed = [&](int64_t tile, int64_t group) {
        return net.packed + (tile * net.groups + group) * net.state_dim * TILE;
    };
    parallel_each(net.tokens * units, {8}, [&](int64_t item) {
        mix<T>(net, item / units, item % units * UNIT);
        if (item % units == 0) rate(net, item / units);
    });
    parallel_each((int64_t)tiles.size() * net.groups, {1}, [&](int64_t item) {
        const int64_t group = item % net.groups;
        score(net, tiles[item / net.groups], group, packed(item / net.groups, group));
    });
    const int64_t spans = (int64_t)first.size() - 1;
    parallel(spans * net.heads, ONE_BY_ONE, threads(), [&](int64_t from, int64_t to, int thread) {
        const Room room(net.scratch + thread * net.scratch_bytes, net.state_dim, padded(net.head_dim));
        for (int64_t item = from; item < to; item++) {
            const int64_t span = item / net.heads;
            scan<T>(net, tiles.data() + first[span], tiles.data() + first[span + 1], packed(first[span], 0),
                    item % net.heads, room);
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// Bytes of scratch that each thread needs.
QUIRE_API int64_t quire_mamba_scratch_bytes(int64_t state_dim, int64_t head_dim) {
    return (Room::bytes(state_dim, padded(head_dim)) + 63) / 64 * 64;
}

QUIRE_API void quire_mamba(const Mamba* net) {
    if (net->dtype == F32) mamba<float>(*net);
    if (net->dtype == BF16) mamba<bf16>(*net);
    if (net->dtype == F16) mamba<f16>(*net);
}

// An RMS norm of each of `groups` equal parts of rows: see `elementwise.grouped_norm`.
template <class T>
static void grouped_norm(const float* x, const float* weight, T* out, int64_t rows, int64_t groups, int64_t size, float eps) {
    parallel_each(rows * groups, {16}, [&](int64_t item) {
        const float *from = x + item * size, *by = weight + item % groups * size;
        f32x16 squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const f32x16 v = load_some(from + i, size - i);
            squares = fma(v, v, squares);
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t left = size - i;
            store_some(out + item * size + i, load_some(from + i, left) * scale * load_some(by + i, left), left);
        }
    });
}

QUIRE_API void quire_grouped_norm(const float* x, const float* weight, void* out, int64_t dtype, int64_t rows, int64_t groups,
                                  int64_t size, float eps) {
    if (dtype == F32) grouped_norm(x, weight, (float*)out, rows, groups, size, eps);
    if (dtype == BF16) grouped_norm(x, weight, (bf16*)out, rows, groups, size, eps);
    if (dtype == F16) grouped_norm(x, weight, (f16*)out, rows, groups, size, eps);
}
