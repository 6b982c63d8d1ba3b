// A key tile of the cache, packed as attention multiplies it.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_numbers.h"
#include "kv_store.h"

namespace quire {

// Keys a tile. Changing it changes bits.
constexpr int64_t KEY_TILE = 128;
constexpr int64_t GROUPS = KEY_TILE / LANES;  // of 16 keys

// A span's base where its rows continue one another.
constexpr int64_t NO_TREE = std::numeric_limits<int64_t>::max();

// The rows of a step that follow paths of their own: see `Trees` in ragged.py.
struct Trees {
    const int64_t* bases;      // [spans]; null: there are none
    const int64_t* positions;  // [tokens]
    const int64_t* paths;      // [tokens, width]
    int64_t width;

    int64_t base(int64_t span) const { return bases ? bases[span] : NO_TREE; }
    const int64_t* path(int64_t row) const { return bases ? paths + row * width : nullptr; }
};

// Keys and values of a tile, in lanes of `L`.
template <class L>
struct Packed {
    using lane = typename L::lane;
    int64_t depth;  // lanes of a row of keys
    int64_t dims;   // numbers of a row of values, padded
    int64_t panel;  // lanes of 16 keys; a line more than they take, so that panels do not share the cache's sets
    lane* keys;     // for each 16 keys: [depth, 16]
    lane* values;   // for each 16 columns: [keys / NUMBERS, 16], and a line more
    static constexpr int64_t COLUMNS = (KEY_TILE / L::NUMBERS + 1) * LANES;  // lanes of 16 columns
    float *key_scales, *value_scales;  // of a quantized cache, [keys]
    char* apart;                       // 16 rows of the cache: see `TileSource::group`
};

// Where a tile's keys and values lie. Keys outside first .. end - 1 are taken as zeros: no one has written them, or
// a window has passed them and another request may have them now. From `base` on, position base + i is where others
// have position base + path[i].
struct TileSource {
    const KvCache& kv;
    const int64_t* table;  // the span's blocks
    int64_t layer, head;
    int64_t start;  // of the tile: a position
    int64_t first, end;
    int64_t base = NO_TREE;
    const int64_t* path = nullptr;

    char* plane(int64_t position, int64_t which) const {
        return kv.plane(table[kv.block_of(position)], layer, head, which);
    }
    bool there(int64_t position) const { return position >= first && position < end; }

    // Where the path has a position.
    int64_t place(int64_t position) const { return position < base ? position : base + path[position - base]; }

    // 16 rows of a plane from `position` on, which is a multiple of 16: one behind the other, in the cache, or in `apart`
    // where not all of them are there and in order.
    const char* group(int64_t position, int64_t which, char* apart) const {
        const int64_t size = kv.row_bytes();
        if (whole(position)) return plane(position, which) + kv.row_of(position) * size;
        const char* of[LANES];
        rows(position, which, nullptr, of);
        for (int64_t i = 0; i < LANES; i++)
            of[i] ? std::memcpy(apart + i * size, of[i], size) : std::memset(apart + i * size, 0, size);
        return apart;
    }

    bool whole(int64_t position) const {
        return position >= first && position + LANES <= end && position + LANES <= base;
    }

    // Such a group's rows one by one; `zeros` stands for those that are not there.
    void rows(int64_t position, int64_t which, const char* zeros, const char** rows) const {
        if (position + LANES > base) return rows_of_path(position, which, zeros, rows);
        // Where none of them is there, the table may have ended.
        const char* at = position < end ? plane(position, which) + kv.row_of(position) * kv.row_bytes() : zeros;
        for (int64_t i = 0; i < LANES; i++) rows[i] = there(position + i) ? at + i * kv.row_bytes() : zeros;
    }

    void rows_of_path(int64_t position, int64_t which, const char* zeros, const char** rows) const {
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t at = there(position + i) ? place(position + i) : -1;
            rows[i] = at < 0 ? zeros : plane(at, which) + kv.row_of(at) * kv.row_bytes();
        }
    }

    // The same 16 rows' scales.
    void scales(int64_t position, int64_t which, float* to) const {
        if (!whole(position)) return scales_of_path(position, which, to);
        std::memcpy(to, kv.scales(plane(position, which)) + kv.row_of(position), LANES * sizeof(float));
    }

    void scales_of_path(int64_t position, int64_t which, float* to) const {
        for (int64_t i = 0; i < LANES; i++) {
            const int64_t at = there(position + i) ? place(position + i) : -1;
            to[i] = at < 0 ? 0.0f : kv.scales(plane(at, which))[kv.row_of(at)];
        }
    }
};

// Groups of 16 keys of a tile: those that some rows can see.
struct Groups {
    int64_t first, end;
};

// Where keys and values lie that are needed soon, 16 rows after 16 rows in the order of the work: of each part the key
// tiles, of a tile the heads, of a head the keys and then the values. Whoever works on 16 rows asks for those that
// `next` names, little by little: a core has room for few lines on their way, and more would hold up the work. They come
// to the second-level cache, which has more of that room than the first: on Zen 4 a core reads half as fast again. (Scores
// in tile registers ask for them in the first, see attention_tiles.h: not measured.)
class Ahead {
  public:
    // Positions first .. end - 1 of a span, which some heads see.
    struct Part {
        const int64_t* table;
        int64_t first, end, head, heads;
    };
    static constexpr int64_t MOST = 8;  // parts
    static constexpr int64_t LEAD = 16384;  // bytes

    Ahead(const KvCache& kv, int64_t layer) : kv_(kv), layer_(layer) {}

    static void ask(const char* line) { __builtin_prefetch(line, 0, 2); }

    void add(const Part& part) {
        if (part.heads && part.first < part.end) parts_[count_++] = part;
    }

    // Asks for the first rows at once.
    void begin() {
        if (!count_) return;
        begin_tile(parts_[0].first / KEY_TILE * KEY_TILE);
        const int64_t bytes = LANES * kv_.row_bytes();
        for (int64_t ahead = 0; ahead < LEAD; ahead += bytes) {
            const char* at = next();
            for (int64_t line = 0; line < bytes; line += 64) ask(at + line);
        }
    }

    // Behind the last ones: some rows that are there.
    const char* next() {
        if (part_ == count_) return kv_.data;
        char* plane = kv_.plane(parts_[part_].table[kv_.block_of(position_)], layer_, head_, which_);
        const int64_t row = kv_.row_of(position_);
        if (kv_.quantized() && which_ == KEYS) {  // those of the values, too: the softmax reads them before the first value
            __builtin_prefetch(kv_.scales(plane) + row);
            __builtin_prefetch(kv_.scales(plane + kv_.plane_bytes()) + row);
        }
        advance();
        return plane + row * kv_.row_bytes();
    }

  private:
    void begin_tile(int64_t start) {
        const Part& part = parts_[part_];
        tile_ = start, first_ = position_ = std::max(part.first / LANES * LANES, start);
        end_ = std::min(part.end, start + KEY_TILE), head_ = part.head, which_ = KEYS;
    }

    void advance() {
        if ((position_ += LANES) < end_) return;
        position_ = first_;
        which_ = VALUES - which_;
        if (which_ == VALUES || ++head_ < parts_[part_].head + parts_[part_].heads) return;
        if (tile_ + KEY_TILE < parts_[part_].end) return begin_tile(tile_ + KEY_TILE);
        if (++part_ < count_) begin_tile(parts_[part_].first / KEY_TILE * KEY_TILE);
    }

    const KvCache& kv_;
    const int64_t layer_;
    Part parts_[MOST];
    int64_t count_ = 0, part_ = 0, tile_ = 0, first_ = 0, end_ = 0, head_ = 0, position_ = 0, which_ = KEYS;
};

// `size` numbers of a row of the cache as lanes; what the last vector has more of them is 0.
template <class L>
void write_out(const KvCache& kv, const char* row, int64_t size, typename L::lane* to) {
    constexpr int64_t WIDTH = LANES * L::NUMBERS;
    with_numbers<L>(kv.format, [&](auto number) {
        for (int64_t i = 0; i < size; i += WIDTH) {
            const typename L::vector v = L::of_row((const decltype(number)*)row + i, int(std::min(size - i, WIDTH)));
            std::memcpy(to + i / L::NUMBERS, &v, sizeof v);
        }
    });
}

// A query row [size] in `depth` lanes, the last ones filled up with zeros.
template <class L, class T>
INLINE void pack_query(const T* row, int64_t size, int64_t depth, typename L::lane* to) {
    constexpr int64_t WIDTH = LANES * L::NUMBERS;
    for (int64_t i = 0, lane = 0; i < size; i += WIDTH, lane += LANES) {
        const typename L::vector v = L::of_row(row + i, int(std::min(size - i, WIDTH)));
        std::memcpy(to + lane, &v, std::min<int64_t>(depth - lane, LANES) * sizeof(typename L::lane));
    }
}

// The same of numbers of a `DType`, or a `KvFormat`, from number `at` on.
template <class L>
void pack_query(int64_t format, const void* rows, int64_t at, int64_t size, int64_t depth, typename L::lane* to) {
    with_numbers<L>(format, [&](auto of) { pack_query<L>((const decltype(of)*)rows + at, size, depth, to); });
}

// Groups first .. end - 1 of 16 keys each, and the scales of keys and values: keys side by side, the head dimensions
// below one another.
template <class L, class S>
void pack_keys_of(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    constexpr int64_t SQUARE = L::template SQUARE<S>, EACH = L::template EACH<S>;
    const int64_t size = source.kv.head_dim, stride = source.kv.row_bytes();
    for (int64_t group = first; group < end; group++) {
        const char* next = ahead.next();
        const int64_t position = source.start + group * LANES;
        const char* rows = source.group(position, KEYS, to.apart);
        if constexpr (is_code<S>) {
            source.scales(position, KEYS, to.key_scales + group * LANES);
            source.scales(position, VALUES, to.value_scales + group * LANES);
        }
        typename L::lane* at = to.keys + group * to.panel;
        for (int64_t i = 0; i < size; i += SQUARE) {
            const int64_t n = std::min(size - i, SQUARE);
            for (int64_t line = i * LANES * sizeof(S); line < int64_t((i + n) * LANES * sizeof(S)); line += 64)
                Ahead::ask(next + line);
            typename L::vector square[LANES];
            L::template of_square<S>(rows + i * sizeof(S), stride, int(n), square);
            const int64_t left = to.panel / LANES - 1 - i / L::NUMBERS;  // lanes, a multiple of 16
            for (int64_t d = 0; d < std::min<int64_t>(LANES, left / EACH); d++) {
                typename L::vector lanes[EACH];
                L::template of_stored<S>(square[d], lanes);
                std::memcpy(at + (i / L::NUMBERS + d * EACH) * LANES, lanes, sizeof lanes);
            }
        }
    }
}

template <class L>
void pack_keys(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    with_numbers<L>(source.kv.format, [&](auto of) { pack_keys_of<L, decltype(of)>(source, ahead, first, end, to); });
}

// Groups first .. end - 1 of 16 values each: head dimensions side by side, the values below one another.
template <class L, class S>
void pack_values_of(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    constexpr int64_t COLUMNS = LANES * L::NUMBERS;
    const int64_t size = source.kv.head_dim, stride = source.kv.row_bytes();
    for (int64_t group = first; group < end; group++) {
        const char* next = ahead.next();
        const char* rows = source.group(source.start + group * LANES, VALUES, to.apart);
        for (int64_t key = 0; key < LANES; key += L::NUMBERS) {
            for (int64_t line = key * stride; line < (key + L::NUMBERS) * stride; line += 64)
                Ahead::ask(next + line);
            typename L::lane* at = to.values + (group * LANES + key) / L::NUMBERS * LANES;
            for (int64_t i = 0; i < size; i += COLUMNS) {
                typename L::vector columns[L::NUMBERS];
                L::template of_columns<S>(rows + key * stride + i * sizeof(S), stride, int(std::min(size - i, COLUMNS)),
                                          columns);
                for (int64_t p = 0; p < L::NUMBERS; p++)
                    std::memcpy(at + (i / LANES + p) * Packed<L>::COLUMNS, &columns[p], sizeof columns[p]);
            }
        }
    }
}

template <class L>
void pack_values(const TileSource& source, Ahead& ahead, int64_t first, int64_t end, const Packed<L>& to) {
    with_numbers<L>(source.kv.format, [&](auto of) { pack_values_of<L, decltype(of)>(source, ahead, first, end, to); });
}

}  // namespace quire
