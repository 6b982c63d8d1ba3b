// Quantizing weights, in the formats and with the same numbers as quire.ops.quantized.
//
// Products and sums are not fused and have a fixed order, as in the reference, so that every machine makes the same
// codes and scales of a weight. A number that is not finite gives a scale that is not.
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace quire {
namespace {

constexpr int PANEL = 32;
constexpr int64_t DEPTH = 64;       // int8: inputs are padded to a multiple of this
constexpr float TINY = 1e-36f;      // a row whose numbers are all below this counts as zeros
constexpr int MAX_GROUP = 128;
constexpr float LEVELS[] = {-7.0f, -7.7f, -8.4f, -9.2f, -10.2f};  // where a group's largest number may come to lie

INLINE f32x16 min(f32x16 a, f32x16 b) { return by_parts<float, float>(a, b, [](auto x, auto y) { return y < x ? y : x; }); }

// The nearest whole number, ties to even, cut to low .. high (both small).
INLINE f32x16 code_of(f32x16 x, float low, float high) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: leaves no bits behind the point
    return (min(max(x, splat(low)), splat(high)) + SHIFT) - SHIFT;
}

// Whole numbers that fit a byte, four bytes in one number.
struct quads {
    uint32_t of[4];
};
INLINE quads bytes_of(f32x16 codes) {
    return bits_of<quads>(converted<i8x16>(converted<i32x16>(codes)));
}

INLINE float lowest_of(f32x16 v) { return -max_of(-v); }

// The largest and smallest of some numbers; both NaN unless all are finite.
struct Range {
    f32x16 high = splat(-std::numeric_limits<float>::infinity()), low = -high, not_finite = {};

    void add(f32x16 v) {
        high = max(high, v);
        low = min(low, v);
        not_finite = not_finite + (v - v);  // infinity - infinity is NaN
    }
    bool finite() const { return sum(not_finite) == 0.0f; }
};

// -- int8 ---------------------------------------------------------------------------------------------------------

// A row's codes into its places of a panel; returns its scale.
template <class T>
float int8_row(const T* row, int64_t inputs, int8_t* place) {
    Range range;
    for (int64_t i = 0; i < inputs; i += LANES) range.add(load_some(row + i, std::min<int64_t>(LANES, inputs - i)));
    if (!range.finite()) return std::numeric_limits<float>::quiet_NaN();
    float largest = std::fmax(max_of(range.high), -lowest_of(range.low));
    if (largest < TINY) largest = 0.0f;
    const f32x16 inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
    for (int64_t i = 0; i < inputs; i += LANES) {
        f32x16 v = load_some(row + i, std::min<int64_t>(LANES, inputs - i));
        quads codes = bytes_of(code_of(v * inverse, -127.0f, 127.0f));
        for (int quad = 0; quad < 4; quad++) std::memcpy(place + (i / 4 + quad) * PANEL * 4, &codes.of[quad], 4);
    }
    return largest / 127.0f;
}

template <class T>
void int8(const T* weight, int64_t outputs, int64_t inputs, int8_t* packed, float* scales) {
    const int64_t padded = (inputs + DEPTH - 1) / DEPTH * DEPTH, count = (outputs + PANEL - 1) / PANEL;
    parallel_each(count, {}, [=](int64_t panel) {
        int8_t* place = packed + panel * padded * PANEL;
        std::memset(place, 0, padded * PANEL);
        for (int64_t o = 0; o < PANEL; o++) {
            int64_t output = panel * PANEL + o;
            scales[output] = output < outputs ? int8_row(weight + output * inputs, inputs, place + o * 4) : 0.0f;
        }
    });
}

// -- int4 ---------------------------------------------------------------------------------------------------------

// The scale of least squared error over the levels: for the codes that a level gives it follows by projection.
INLINE float best_scale(const f32x16* numbers, int count, float extreme) {
    const float inverse = 1.0f / extreme;
    float best_gain = 0.0f, best = 0.0f;
    for (float level : LEVELS) {
        f32x16 dots = {}, squares = {};
        for (int k = 0; k < count; k++) {
            f32x16 code = code_of(numbers[k] * (level * inverse), -8.0f, 7.0f);
            dots = k ? dots + numbers[k] * code : numbers[k] * code;
            squares = squares + code * code;
        }
        const float dot = sum(dots), scale = dot / sum(squares), gain = dot * scale;
        if (gain > best_gain) best_gain = gain, best = scale;
    }
    return best;
}

// A group's codes into its places of a panel; returns its scale as the bits of an fp16 number.
template <class T>
uint16_t int4_group(const T* weight, int group, uint8_t* place) {
    f32x16 numbers[MAX_GROUP / LANES];
    const int count = group / LANES;
    Range range;
    for (int k = 0; k < count; k++) range.add(numbers[k] = load(weight + k * LANES));
    const float high = max_of(range.high), low = lowest_of(range.low), extreme = high > -low ? high : low;
    if (!range.finite()) return 0x7e00;  // NaN
    const f32x16 scale = splat(extreme == 0.0f ? 0.0f : best_scale(numbers, count, extreme));
    const u16x16 stored = to_f16(scale);
    const float value = from_f16(stored)[0];
    const float inverse = value == 0.0f ? 0.0f : 1.0f / value;
    for (int k = 0; k < count; k++) {
        quads codes = bytes_of(code_of(numbers[k] * inverse, -8.0f, 7.0f) + 8.0f);
        for (int half = 0; half < 2; half++) {
            uint32_t both = codes.of[2 * half] | codes.of[2 * half + 1] << 4;
            std::memcpy(place + (2 * k + half) * PANEL * 4, &both, 4);
        }
    }
    return stored[0];
}

template <class T>
void int4(const T* weight, int64_t outputs, int64_t inputs, int group, uint8_t* packed, uint16_t* scales) {
    const int64_t groups = inputs / group, count = (outputs + PANEL - 1) / PANEL;
    parallel_each(count, {}, [=](int64_t panel) {
        uint8_t* place = packed + panel * inputs / 2 * PANEL;
        uint16_t* scale = scales + panel * groups * PANEL;
        std::memset(place, 0x88, inputs / 2 * PANEL);  // padding: zeros
        std::memset(scale, 0, groups * PANEL * sizeof *scale);
        for (int64_t o = 0; o < PANEL && panel * PANEL + o < outputs; o++) {
            const T* row = weight + (panel * PANEL + o) * inputs;
            for (int64_t g = 0; g < groups; g++)
                scale[g * PANEL + o] = int4_group(row + g * group, group, place + g * group / 8 * PANEL * 4 + o * 4);
        }
    });
}

// -- groups with scales and zeros (see quire.ops.quantize_groups) ---------------------------------------------------

constexpr int STEPS = 21, ROUNDS = 2;
constexpr float TOP = 15.0f;  // the highest code

INLINE f32x16 square_root(f32x16 v) {
    float numbers[LANES];
    std::memcpy(numbers, &v, sizeof v);
    for (float& number : numbers) number = std::sqrt(number);
    return load(numbers);
}

INLINE f32x16 inverse_of(f32x16 scale) { return select(equal(scale, f32x16{}), f32x16{}, splat(1.0f) / scale); }

// The same group of 16 outputs, an output a lane.
struct Groups {
    int size;
    f32x16 x[MAX_GROUP], weights[MAX_GROUP];

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

    f32x16 error(f32x16 scale, f32x16 zero) const {
        f32x16 total = {};
        const f32x16 inverse = inverse_of(scale);
        for (int i = 0; i < size; i++) {
            const f32x16 off = scale * code(i, inverse, zero) - x[i];
            total = total + weights[i] * (off * off);
        }
        return total;
    }
};

f32x16 rounded_to(int32_t dtype, f32x16 v) {
    if (dtype == BF16) return rounded(v, (const bf16*)nullptr);
    return dtype == F16 ? rounded(v, (const f16*)nullptr) : v;
}

void best_grid(Groups& groups, int32_t stored, f32x16& best_scale, f32x16& best_zero) {
    f32x16 high = {}, low = {}, square = {};
    for (int i = 0; i < groups.size; i++) {
        const f32x16 v = groups.x[i];
        high = max(high, v), low = min(low, v), square = square + v * v;
    }
    const f32x16 span = high - low, mean = square_root(square / (float)groups.size);
    for (int i = 0; i < groups.size; i++) groups.weights[i] = mean + max(groups.x[i], -groups.x[i]);
    const f32x16 highest = splat(std::numeric_limits<float>::infinity());
    f32x16 least = highest;
    best_scale = best_zero = f32x16{};
    for (int step = 0; step < STEPS; step++) {
        f32x16 scale = span / (float)(TOP + (step - 10) / 10.0);
        const f32x16 zero = code_of(-low * inverse_of(scale), 0.0f, TOP);
        for (int round = 0; round < ROUNDS; round++) scale = groups.projected(scale, zero);
        scale = rounded_to(stored, scale);
        const f32x16 error = groups.error(scale, zero);
        const i32x16 better = less(error, least);
        least = select(better, error, least);
        best_scale = select(better, scale, best_scale), best_zero = select(better, zero, best_zero);
    }
    best_scale = select(less(least, highest), best_scale, splat(std::numeric_limits<float>::quiet_NaN()));
}

// 16 rows, or fewer, from `weight` on; codes [rows, inputs], scales (in fp32) and zeros [rows, groups].
template <class T>
void four_bits(const T* weight, int64_t rows, int64_t inputs, int group, int32_t stored, uint8_t* codes, float* scales,
               uint8_t* zeros) {
    Groups groups;
    groups.size = group;
    const int64_t count = inputs / group;
    float* lanes = (float*)groups.x;
    for (int64_t g = 0; g < count; g++) {
        for (int64_t row = 0; row < LANES; row++) {
            const T* from = weight + std::min(row, rows - 1) * inputs + g * group;
            for (int k = 0; k < group; k += LANES) {
                float numbers[LANES];
                const f32x16 v = load(from + k);
                std::memcpy(numbers, &v, sizeof v);
                for (int i = 0; i < LANES; i++) lanes[(k + i) * LANES + row] = numbers[i];
            }
        }
        f32x16 scale, zero;
        best_grid(groups, stored, scale, zero);
        float of_scale[LANES], of_zero[LANES];
        std::memcpy(of_scale, &scale, sizeof scale), std::memcpy(of_zero, &zero, sizeof zero);
        for (int64_t row = 0; row < rows; row++) {
            scales[row * count + g] = of_scale[row], zeros[row * count + g] = (uint8_t)of_zero[row];
        }
        const f32x16 inverse = inverse_of(scale);
        for (int i = 0; i < group; i++) {
            const f32x16 code = code_of(groups.x[i] * inverse + zero, 0.0f, TOP);
            float numbers[LANES];
            std::memcpy(numbers, &code, sizeof code);
            for (int64_t row = 0; row < rows; row++) codes[row * inputs + g * group + i] = (uint8_t)numbers[row];
        }
    }
}

template <class T>
void four_bits_of_all(const T* weight, int64_t outputs, int64_t inputs, int group, int32_t stored, uint8_t* codes,
                      float* scales, uint8_t* zeros) {
    parallel_each((outputs + LANES - 1) / LANES, {}, [=](int64_t item) {
        const int64_t first = item * LANES, rows = std::min<int64_t>(LANES, outputs - first), at = first * (inputs / group);
        four_bits(weight + first * inputs, rows, inputs, group, stored, codes + first * inputs, scales + at, zeros + at);
    });
}

}  // namespace

// weight: [outputs, inputs] of `dtype`; packed and scales as quire.ops.quantized describes them.
QUIRE_API void quire_quantize_int8(
    int32_t dtype, const void* weight, int64_t outputs, int64_t inputs, int8_t* packed, float* scales) {
    if (dtype == F32) int8((const float*)weight, outputs, inputs, packed, scales);
    if (dtype == BF16) int8((const bf16*)weight, outputs, inputs, packed, scales);
    if (dtype == F16) int8((const f16*)weight, outputs, inputs, packed, scales);
}

// inputs: a multiple of `group`, which is 32, 64 or 128.
QUIRE_API void quire_quantize_int4(
    int32_t dtype, const void* weight, int64_t outputs, int64_t inputs, int32_t group, uint8_t* packed,
    uint16_t* scales) {
    if (dtype == F32) int4((const float*)weight, outputs, inputs, group, packed, scales);
    if (dtype == BF16) int4((const bf16*)weight, outputs, inputs, group, packed, scales);
    if (dtype == F16) int4((const f16*)weight, outputs, inputs, group, packed, scales);
}

// group: a multiple of 16, up to 128; codes, from 0 to 15, and zeros are bytes; scales, of the type `stored`, are widened.
QUIRE_API void quire_quantize_groups(
    int32_t dtype, const void* weight, int64_t outputs, int64_t inputs, int32_t group, int32_t stored, uint8_t* codes,
    float* scales, uint8_t* zeros) {
    if (dtype == F32) four_bits_of_all((const float*)weight, outputs, inputs, group, stored, codes, scales, zeros);
    if (dtype == BF16) four_bits_of_all((const bf16*)weight, outputs, inputs, group, stored, codes, scales, zeros);
    if (dtype == F16) four_bits_of_all((const f16*)weight, outputs, inputs, group, stored, codes, scales, zeros);
}

}  // namespace quire
