// Quantizing weights: what quire.ops.quantize_groups defines, with the same bits.
//
// Products and sums are not fused and have a fixed order, as there, so that every machine makes the same codes and scales of
// a weight. A number that is not finite gives a scale that is not. Sixteen outputs' same group lies in the lanes of vectors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "team.h"

namespace quire {
namespace {

enum Kind : int32_t { EIGHT_BITS, SIX_BITS, FOUR_BITS, WHOLE_ZEROS };

constexpr int MAX_GROUP = 128, STEPS = 21, ROUNDS = 2;
constexpr float TOP = 15.0f, LOW = -32.0f, HIGH = 31.0f;  // the highest code of 4 bits; the codes of 6 bits

INLINE f32x16 min(f32x16 a, f32x16 b) { return by_parts<float, float>(a, b, [](auto x, auto y) { return y < x ? y : x; }); }

// The nearest whole number, ties to even, cut to low .. high (both small).
INLINE f32x16 code_of(f32x16 x, float low, float high) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: leaves no bits behind the point
    return (min(max(x, splat(low)), splat(high)) + SHIFT) - SHIFT;
}

INLINE f32x16 square_root(f32x16 v) {
    float numbers[LANES];
    std::memcpy(numbers, &v, sizeof v);
    for (float& number : numbers) number = std::sqrt(number);
    return load(numbers);
}

INLINE f32x16 size_of(f32x16 v) { return max(v, -v); }
INLINE f32x16 inverse_of(f32x16 v) { return select(equal(v, f32x16{}), f32x16{}, splat(1.0f) / v); }

f32x16 rounded_to(int32_t dtype, f32x16 v) {
    if (dtype == BF16) return rounded(v, (const bf16*)nullptr);
    return dtype == F16 ? rounded(v, (const f16*)nullptr) : v;
}

// What is found of a group. The offsets of `WHOLE_ZEROS` count steps of the scale.
struct Grid {
    f32x16 scale, offset = {};
};

struct Groups {
    int size;
    f32x16 x[MAX_GROUP], weights[MAX_GROUP];

    void weigh(const float* importance) {
        f32x16 square = {};
        for (int i = 0; i < size; i++) square = square + x[i] * x[i];
        const f32x16 inverse = inverse_of(square_root(square / (float)size));
        for (int i = 0; i < size; i++) {
            weights[i] = splat(1.0f) + size_of(x[i]) * inverse;
            if (importance) weights[i] = weights[i] * importance[i];
        }
    }

    Grid eight_bits(int32_t stored) const {
        f32x16 largest = {}, broken = {};
        for (int i = 0; i < size; i++) largest = max(largest, size_of(x[i])), broken = broken + (x[i] - x[i]);
        return {rounded_to(stored, largest / 127.0f) + broken};
    }

    Grid six_bits() const {
        f32x16 high = x[0], low = x[0], broken = weights[0] - weights[0];
        for (int i = 0; i < size; i++) high = max(high, x[i]), low = min(low, x[i]), broken = broken + (x[i] - x[i]);
        const f32x16 extreme = select(less(-low, high), high, low);
        f32x16 best = splat(-std::numeric_limits<float>::infinity()), best_scale = extreme / LOW;
        for (int step = 0; step < STEPS; step++) {
            f32x16 inverse = select(equal(extreme, f32x16{}), f32x16{}, splat((float)(LOW - (step - STEPS / 2) / 10.0)) / extreme);
            for (int round = 0; round < ROUNDS; round++) {
                f32x16 dot = {}, square = {};
                for (int i = 0; i < size; i++) {
                    const f32x16 code = code_of(x[i] * inverse, LOW, HIGH), weighed = weights[i] * code;
                    dot = dot + weighed * x[i], square = square + weighed * code;
                }
                const f32x16 scale = dot / square, gain = dot * scale;
                const i32x16 found = less(f32x16{}, square), better = found & less(best, gain);
                best = select(better, gain, best), best_scale = select(better, scale, best_scale);
                inverse = select(found, inverse_of(scale), f32x16{});
            }
        }
        return {best_scale + broken};
    }

    Grid four_bits() const {
        f32x16 high = {}, low = {}, total = {}, sum_x = {}, broken = {};
        for (int i = 0; i < size; i++) {
            high = max(high, x[i]), low = min(low, x[i]), broken = broken + (x[i] - x[i]);
            total = total + weights[i], sum_x = sum_x + weights[i] * x[i];
        }
        const f32x16 span = high - low;
        f32x16 best = splat(-std::numeric_limits<float>::infinity());
        Grid found{span / TOP, -low};
        for (int step = 0; step < STEPS; step++) {
            f32x16 inverse = select(equal(span, f32x16{}), f32x16{}, splat((float)(TOP + (step - STEPS / 2) / 10.0)) / span);
            f32x16 offset = -low;
            for (int round = 0; round < ROUNDS; round++) {
                f32x16 sum_q = {}, sum_qq = {}, sum_xq = {};
                for (int i = 0; i < size; i++) {
                    const f32x16 code = code_of((x[i] + offset) * inverse, 0.0f, TOP), weighed = weights[i] * code;
                    sum_q = sum_q + weighed, sum_qq = sum_qq + weighed * code, sum_xq = sum_xq + weighed * x[i];
                }
                const f32x16 apart = total * sum_qq - sum_q * sum_q;
                f32x16 scale = (total * sum_xq - sum_x * sum_q) / apart, least = (sum_qq * sum_x - sum_q * sum_xq) / apart;
                const i32x16 both = less(f32x16{}, apart) & less(least, f32x16{});
                scale = select(both, scale, sum_xq / sum_qq), least = select(both, least, f32x16{});
                const f32x16 gain = scale * sum_xq + least * sum_x;
                const i32x16 some = less(f32x16{}, scale), better = some & less(best, gain);
                best = select(better, gain, best);
                found.scale = select(better, scale, found.scale), found.offset = select(better, -least, found.offset);
                inverse = select(some, inverse_of(scale), f32x16{}), offset = -least;
            }
        }
        broken = broken + (total - total);
        return {found.scale + broken, found.offset + broken};
    }

    Grid whole_zeros(int32_t stored) const {
        f32x16 high = {}, low = {};
        for (int i = 0; i < size; i++) high = max(high, x[i]), low = min(low, x[i]);
        const f32x16 span = high - low, highest = splat(std::numeric_limits<float>::infinity());
        f32x16 least = highest;
        Grid found{};
        for (int step = 0; step < STEPS; step++) {
            f32x16 scale = span / (float)(TOP + (step - STEPS / 2) / 10.0);
            const f32x16 zero = code_of(-low * inverse_of(scale), 0.0f, TOP);
            for (int round = 0; round < ROUNDS; round++) scale = projected(scale, zero);
            scale = rounded_to(stored, scale);
            const f32x16 error = error_of(scale, zero);
            const i32x16 better = less(error, least);
            least = select(better, error, least);
            found.scale = select(better, scale, found.scale), found.offset = select(better, zero, found.offset);
        }
        found.scale = select(less(least, highest), found.scale, splat(std::numeric_limits<float>::quiet_NaN()));
        return found;
    }

   private:
    inline __attribute__((always_inline)) f32x16 code(int i, f32x16 inverse, f32x16 zero) const {
        return code_of(x[i] * inverse + zero, 0.0f, TOP) - zero;
    }

    // The scale of least error for the codes that a scale gives; that scale itself where all codes are 0.
    f32x16 projected(f32x16 scale, f32x16 zero) const {
        f32x16 dot = {}, square = {};
        const f32x16 inverse = inverse_of(scale);
        for (int i = 0; i < size; i++) {
            const f32x16 q = code(i, inverse, zero), weighed = weights[i] * q;
            dot = dot + weighed * x[i], square = square + weighed * q;
        }
        const i32x16 found = less(f32x16{}, dot) & less(f32x16{}, square);
        return select(found, dot / select(found, square, splat(1.0f)), scale);
    }

    f32x16 error_of(f32x16 scale, f32x16 zero) const {
        f32x16 total = {};
        const f32x16 inverse = inverse_of(scale);
        for (int i = 0; i < size; i++) {
            const f32x16 off = scale * code(i, inverse, zero) - x[i];
            total = total + weights[i] * (off * off);
        }
        return total;
    }
};

// How a weight is quantized, and where that goes: codes, a byte each, [outputs, inputs], and in fp32 scales and offsets
// [outputs, groups] and those of blocks [outputs, blocks]; null where a kind has none.
struct Job {
    int32_t kind, group, block, stored;  // block: 0 if there are none; stored: type of the scales that are no whole numbers
    int64_t outputs, inputs;
    const float* importance;  // [inputs], or null
    int8_t* codes;
    float *scales, *offsets, *block_scales, *block_offsets;
};

// Numbers of groups into whole ones of their blocks' units; what they are then goes to `exact`.
void in_units(const Job& job, f32x16* numbers, f32x16* units, f32x16* exact) {
    const int64_t each = job.block / job.group, blocks = job.inputs / job.block;
    const float limit = job.kind == SIX_BITS ? 127.0f : 255.0f;
    for (int64_t b = 0; b < blocks; b++) {
        f32x16 largest = {}, broken = {};
        for (int64_t g = b * each; g < (b + 1) * each; g++)
            largest = max(largest, size_of(numbers[g])), broken = broken + (numbers[g] - numbers[g]);
        units[b] = rounded_to(job.stored, largest / limit) + broken;
        const f32x16 inverse = inverse_of(units[b]);
        for (int64_t g = b * each; g < (b + 1) * each; g++) {
            numbers[g] = code_of(numbers[g] * inverse, -limit, limit);
            exact[g] = numbers[g] * units[b];
        }
    }
}

// The lanes of vectors [n], a row each, to the first of rows [n].
void to_rows(const f32x16* from, int64_t n, int64_t rows, float* to) {
    for (int64_t i = 0; i < n; i++) {
        float numbers[LANES];
        std::memcpy(numbers, &from[i], sizeof numbers);
        for (int64_t row = 0; row < rows; row++) to[row * n + i] = numbers[row];
    }
}

// 16 rows, or fewer, from `weight` on.
template <class T>
struct Rows {
    const Job& job;
    const T* weight;
    int64_t first, rows;

    void load_group(int64_t g, Groups& groups) const {
        float* lanes = (float*)groups.x;
        for (int64_t row = 0; row < LANES; row++) {
            const T* from = weight + (first + std::min(row, rows - 1)) * job.inputs + g * job.group;
            for (int k = 0; k < job.group; k += LANES) {
                float numbers[LANES];
                const f32x16 v = load(from + k);
                std::memcpy(numbers, &v, sizeof v);
                for (int i = 0; i < LANES; i++) lanes[(k + i) * LANES + row] = numbers[i];
            }
        }
    }

    Grid best_of(int64_t g, Groups& groups) const {
        if (job.kind == EIGHT_BITS) return groups.eight_bits(job.stored);
        groups.weigh(job.importance ? job.importance + g * job.group : nullptr);
        if (job.kind == SIX_BITS) return groups.six_bits();
        return job.kind == FOUR_BITS ? groups.four_bits() : groups.whole_zeros(job.stored);
    }

    void put_codes(int64_t g, const Groups& groups, f32x16 scale, f32x16 before, f32x16 after, float low, float high) const {
        const f32x16 inverse = inverse_of(scale);
        for (int i = 0; i < job.group; i++) {
            const f32x16 code = code_of((groups.x[i] + before) * inverse + after, low, high);
            float numbers[LANES];
            std::memcpy(numbers, &code, sizeof code);
            int8_t* to = job.codes + first * job.inputs + g * job.group + i;
            for (int64_t row = 0; row < rows; row++) to[row * job.inputs] = (int8_t)numbers[row];
        }
    }

    void quantize() const {
        const int64_t count = job.inputs / job.group, blocks = job.block ? job.inputs / job.block : 0;
        std::vector<f32x16> scales(count), offsets(count), exact(2 * count), units(2 * blocks);
        Groups groups;
        groups.size = job.group;
        for (int64_t g = 0; g < count; g++) {
            load_group(g, groups);
            const Grid grid = best_of(g, groups);
            scales[g] = grid.scale, offsets[g] = grid.offset;
            if (job.kind == EIGHT_BITS) put_codes(g, groups, grid.scale, f32x16{}, f32x16{}, -127.0f, 127.0f);
            if (job.kind == WHOLE_ZEROS) put_codes(g, groups, grid.scale, f32x16{}, grid.offset, 0.0f, TOP);
        }
        if (blocks) {
            in_units(job, scales.data(), units.data(), exact.data());
            if (job.offsets) in_units(job, offsets.data(), &units[blocks], &exact[count]);
            const bool six = job.kind == SIX_BITS;
            for (int64_t g = 0; g < count; g++) {
                load_group(g, groups);
                put_codes(g, groups, exact[g], exact[count + g], f32x16{}, six ? LOW : 0.0f, six ? HIGH : TOP);
            }
            to_rows(units.data(), blocks, rows, job.block_scales + first * blocks);
            if (job.offsets) to_rows(&units[blocks], blocks, rows, job.block_offsets + first * blocks);
        }
        to_rows(scales.data(), count, rows, job.scales + first * count);
        if (job.offsets) to_rows(offsets.data(), count, rows, job.offsets + first * count);
    }
};

template <class T>
void quantize_rows(const Job& job, const T* weight) {
    parallel_each((job.outputs + LANES - 1) / LANES, {}, [&job, weight](int64_t item) {
        const int64_t first = item * LANES;
        Rows<T>{job, weight, first, std::min<int64_t>(LANES, job.outputs - first)}.quantize();
    });
}

}  // namespace

// weight: [outputs, inputs] of `dtype`; group: a multiple of 16, up to 128.
QUIRE_API void quire_quantize_groups(const Job* job, int32_t dtype, const void* weight) {
    if (dtype == F32) quantize_rows(*job, (const float*)weight);
    if (dtype == BF16) quantize_rows(*job, (const bf16*)weight);
    if (dtype == F16) quantize_rows(*job, (const f16*)weight);
}

}  // namespace quire
