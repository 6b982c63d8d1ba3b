// A key tile of the cache, packed as attention multiplies it.
#pragma once

#include <algorithm>

#include "attention_numbers.h"
#include "kv_store.h"

namespace quire {

// Keys a tile. Changing it changes bits.
constexpr int64_t KEY_TILE = 128;
constexpr int64_t GROUPS = KEY_TILE / LANES;  // of 16 keys

template <class S>
constexpr bool is_code = false;
template <>
constexpr bool is_code<int8> = true;
template <>
constexpr bool is_code<fp8> = true;

// Keys and values of a tile, in lanes of `L`.
template <class L>
struct Packed {
    using lane = typename L::lane;
    int64_t depth;  // lanes of a row of keys
    int64_t dims;   // numbers of a row of values, padded
    int64_t panel;  // lanes of 16 keys
    lane* keys;     // for each 16 keys: [depth, 16]
    lane* values;   // for each 16 columns: [keys / NUMBERS, 16]
    float *key_scales, *value_scales;  // of a quantized cache, [keys]
    char* zeros;                       // a row of the cache: all zeros
};

// Where a tile's keys and values lie. Keys outside first .. end - 1 are taken as zeros: no one has written them, or
// a window has passed them and another request may have them now.
struct TileSource {
    const KvCache& kv;
    const int64_t* table;  // the span's blocks
    int64_t layer, head;
    int64_t start;  // of the tile: a position
    int64_t first, end;

    char* plane(int64_t position, int64_t which) const {
        return kv.plane(table[position / kv.block_size], layer, head, which);
    }
    bool there(int64_t position) const { return position >= first && position < end; }

    // 16 rows of a plane from `position` on, which is a multiple of 16.
    void rows(int64_t position, int64_t which, const char* zeros, const char** rows) const {
        const char* at = plane(position, which) + position % kv.block_size * kv.row_bytes();
        for (int64_t i = 0; i < LANES; i++) rows[i] = there(position + i) ? at + i * kv.row_bytes() : zeros;
    }

    // The same 16 rows' scales.
    void scales(int64_t position, int64_t which, float* to) const {
        const float* at = kv.scales(plane(position, which)) + position % kv.block_size;
        for (int64_t i = 0; i < LANES; i++) to[i] = there(position + i) ? at[i] : 0.0f;
    }
};

// Asks for memory before it is needed: walks over an item's groups of 16 rows in the order in which they are packed
// (for each head, for each tile: its keys, then its values), some groups ahead. A few lines at a time, since a core has
// room for few, and more would hold up the work beside which they are to come.
struct Ahead {
    static constexpr int64_t DISTANCE = 4;  // groups
    const KvCache& kv;
    const int64_t* table;
    int64_t layer, head, last_head, first, end;  // positions first .. end - 1
    int64_t position, bytes, which = KEYS;
    const char* at;  // the group that is asked for next; null behind the last

    Ahead(const TileSource& s, int64_t heads)
        : kv(s.kv), table(s.table), layer(s.layer), head(s.head), last_head(s.head + heads - 1),
          first(s.first / LANES * LANES), end(s.end), position(first), bytes(LANES * kv.row_bytes()) {
        place();
        for (int64_t i = 0; i < DISTANCE; i++) fetch(0, 1);
    }

    // Part `index` of `parts` of the group that is next; the last part moves on.
    void fetch(int64_t index, int64_t parts) {
        if (!at) return;
        const int64_t part = bytes / parts;
        for (int64_t i = 0; i < part; i += 64) __builtin_prefetch(at + index * part + i, 0, 2);
        if (index + 1 == parts) step(), place();
    }

    void place() {
        if (head > last_head) {
            at = nullptr;
        } else {
            at = kv.plane(table[position / kv.block_size], layer, head, which);
            at += position % kv.block_size * kv.row_bytes();
        }
    }

    void step() {
        const int64_t tile = position / KEY_TILE * KEY_TILE;
        position += LANES;
        if (position < end && position < tile + KEY_TILE) return;
        if (which == KEYS) {
            which = VALUES;
            position = std::max(tile, first);
        } else {
            which = KEYS;
            position = tile + KEY_TILE;
            if (position >= end) head++, position = first;
        }
    }
};

// A query row [size] in lanes, the last one filled up with zeros.
template <class L, class T>
INLINE void pack_query(const T* row, int64_t size, typename L::lane* to) {
    constexpr int64_t WIDTH = LANES * L::NUMBERS;
    for (int64_t i = 0; i < size; i += WIDTH) {
        const int64_t n = std::min(size - i, WIDTH);
        const typename L::vector v = L::of_row(row + i, int(n));
        std::memcpy(to + i / L::NUMBERS, &v, (n + L::NUMBERS - 1) / L::NUMBERS * sizeof(typename L::lane));
    }
}

// Groups first .. end - 1 of 16 keys each, and the scales of keys and values: keys side by side, the head dimensions
// below one another.
template <class L, class S>
void pack_keys(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    const int64_t size = source.kv.head_dim;
    constexpr int64_t WIDTH = LANES * L::NUMBERS;
    for (int64_t group = first; group < end; group++) {
        const char* rows[LANES];
        const int64_t position = source.start + group * LANES;
        source.rows(position, KEYS, to.zeros, rows);
        if constexpr (is_code<S>) {
            source.scales(position, KEYS, to.key_scales + group * LANES);
            source.scales(position, VALUES, to.value_scales + group * LANES);
        }
        for (int64_t i = 0; i < size; i += WIDTH) {
            ahead.fetch(i / WIDTH, (size + WIDTH - 1) / WIDTH);
            typename L::vector square[LANES];
            const int n = int(std::min(size - i, WIDTH));
            for (int key = 0; key < LANES; key++) square[key] = L::of_row((const S*)rows[key] + i, n);
            transpose(square);
            std::memcpy(to.keys + group * to.panel + i / L::NUMBERS * LANES, square, sizeof square);
        }
    }
}

// Groups first .. end - 1 of 16 values each: head dimensions side by side, the values below one another.
template <class L, class S>
void pack_values(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    const int64_t size = source.kv.head_dim, length = KEY_TILE / L::NUMBERS;
    constexpr int64_t WIDTH = LANES * L::NUMBERS;
    for (int64_t group = first; group < end; group++) {
        const char* rows[LANES];
        source.rows(source.start + group * LANES, VALUES, to.zeros, rows);
        for (int64_t key = 0; key < LANES; key += L::NUMBERS) {
            ahead.fetch(key / L::NUMBERS, LANES / L::NUMBERS);
            typename L::lane* at = to.values + (group * LANES + key) / L::NUMBERS * LANES;
            for (int64_t i = 0; i < size; i += WIDTH) {
                typename L::vector columns[L::NUMBERS];
                L::template of_columns<S>(rows + key, i, int(std::min(size - i, WIDTH)), columns);
                for (int64_t p = 0; p < L::NUMBERS; p++)
                    std::memcpy(at + (i / LANES + p) * length * LANES, &columns[p], sizeof columns[p]);
            }
        }
    }
}

}  // namespace quire
