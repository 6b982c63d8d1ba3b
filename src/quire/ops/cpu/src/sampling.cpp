// Sampling: a token a row of logits, and the log-probabilities of given tokens. ops/sampling.py defines what they are.
//
// A row is one thread's, from its first logit to its token, so its bits depend on nothing else.
#include "logits_row.h"
#include "team.h"

namespace quire {
namespace {

using f64x8 = double __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));
template <class T>
struct Halves {
    T part[2];
};

// How to sample a row: see `Filters` in ops/sampling.py.
struct Draw {
    float temperature, log_min_p;
    int64_t top_k;
    double top_p;
    uint64_t key;
};

// -- noise ------------------------------------------------------------------------------------------------------

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;
constexpr float LARGEST_NOISE = 36.75f;  // a little above that of all ones, 36.7368

// SplitMix64 but for its last step, `z ^ z >> 31`, which leaves the highest 31 bits as they are.
template <class T>
INLINE T nearly_mixed(T z) {
    z = (z ^ (z >> 30)) * MIX_1;
    return (z ^ (z >> 27)) * MIX_2;
}

// Standard Gumbel noise of a token; the half keeps u away from 0 and from 1.
double gumbel(uint64_t key, int64_t id) {
    uint64_t z = nearly_mixed(key + (uint64_t)id * GAMMA);
    z ^= z >> 31;
    return -std::log(-std::log(((double)(z >> 12) + 0.5) * 0x1p-52));
}

// Per lane, the least `nearly_mixed` whose noise may reach -gap, so that a token's noise is computed only then.
// Noise of at least t means u >= exp(-exp(-t)) >= 1 - exp(-t); the 1.0001 and the 2 cover all rounding.
void least_bits(f32x16 gap, uint64_t* least) {
    f32x16 odds = exp(gap) * (0x1p31f * 1.0001f) + 2.0f, most = splat(0x1.fffffep30f);
    const i32x16 rest = 0x7fffffff - converted<i32x16>(select(less(odds, most), odds, most));
    uint32_t high[LANES];
    std::memcpy(high, &rest, sizeof high);
    for (int lane = 0; lane < LANES; lane++) least[lane] = (uint64_t)high[lane] << 33;
}

// Finds the token of the highest score, scaled logit plus noise, among those ahead of `end` and not below min-p.
class Race {
public:
    Race(const Row& row, const Draw& draw, Token end) : row_(row), draw_(draw), end_(end) {
        winner = row.best;
        goal_ = gumbel(draw.key, winner.id);  // its scaled logit is 0
        for (int64_t g = 0; g < row.groups; g++) run_group(g);
    }
    Token winner;

private:
    const Row& row_;
    const Draw& draw_;
    const Token end_;
    double goal_;

    void run_group(int64_t g) {
        const f32x16 top = row_.maxima(g), scaled = (top - row_.best.logit) / draw_.temperature;
        const f32x16 gap = scaled - (float)goal_;
        const i32x16 open = less_equal(splat(end_.logit), top) & less_equal(splat(draw_.log_min_p), scaled) &
                            less_equal(splat(-LARGEST_NOISE), gap);
        if (!any(open)) return;
        uint64_t least[LANES];
        least_bits(select(open, gap, splat(-INFINITE)), least);
        const uint64_t first = draw_.key + (uint64_t)(g * GROUP) * GAMMA;
        for (uint32_t hits = places_of_hits(first, least); hits; hits &= hits - 1) {
            const int place = __builtin_ctz(hits) * LANES;
            for (int lane = 0; lane < LANES; lane++)
                if (nearly_mixed(first + (place + lane) * GAMMA) >= least[lane])
                    consider(g, place + lane);
        }
    }

    // Bit i: some of the 16 tokens from place 16 * i on reach their lane's least bits. Kept apart, so that nothing else
    // claims the vector registers.
    __attribute__((noinline)) static uint32_t places_of_hits(uint64_t first, const uint64_t* least_bits) {
        constexpr int PART = WIDTH / 8, PARTS = LANES / PART;
        typedef uint64_t Part __attribute__((vector_size(WIDTH)));
        Part z[PARTS], least[PARTS];
        std::memcpy(least, least_bits, sizeof least);
        for (int n = 0; n < PARTS; n++)
            for (int lane = 0; lane < PART; lane++) z[n][lane] = first + (n * PART + lane) * GAMMA;
        uint32_t hits = 0;
        for (int i = 0; i < GROUP / LANES; i++) {
            Part hit = {};
            for (int n = 0; n < PARTS; n++) hit |= (Part)(nearly_mixed(z[n]) >= least[n]);
            for (int n = 0; n < PARTS; n++) z[n] += LANES * GAMMA;
            hits |= (uint32_t)any_bit(hit) << i;
        }
        return hits;
    }

    void consider(int64_t g, int64_t place) {
        const Token token{row_.group(g)[place], (int32_t)(g * GROUP + place)};
        const float scaled = (token.logit - row_.best.logit) / draw_.temperature;
        if (token.id >= row_.vocab || !ahead(token, end_) || !(scaled >= draw_.log_min_p)) return;
        const double score = scaled + gumbel(draw_.key, token.id);
        if (score > goal_ || (score == goal_ && token.id < winner.id)) {
            goal_ = score;
            winner = token;
        }
    }
};

// -- mass -------------------------------------------------------------------------------------------------------

// Sums of 16 numbers at a time in fp64, always in the same order.
struct Sum {
    f64x8 part[2] = {};
    void add(f32x16 v) {
        auto halves = bits_of<Halves<f32x8>>(v);
        for (int h = 0; h < 2; h++) part[h] += __builtin_convertvector(halves.part[h], f64x8);
    }
    double total() const {
        double sum = 0;
        for (int lane = 0; lane < 8; lane++) sum += part[0][lane] + part[1][lane];
        return sum;
    }
};

struct Mass {
    double ahead, total;
};

// 2^x for x <= 0, to 1e-7; below -126 it is 2^-126. (A polynomial fitted to the smallest relative error.)
INLINE f32x16 exp2_of_negative(f32x16 x) {
    f32x16 clamped = max(x, splat(-126.0f));
    f32x16 shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
    f32x16 r = clamped - (shifted - 12582912.0f);
    f32x16 p = splat(1.3276466634e-3f);
    p = fma(p, r, splat(9.6755409613e-3f));
    p = fma(p, r, splat(5.5507134616e-2f));
    p = fma(p, r, splat(2.4022120237e-1f));
    p = fma(p, r, splat(6.9314694404e-1f));
    p = fma(p, r, splat(1.0000001192f));
    return bits_of<f32x16>(bits_of<i32x16>(p) + (bits_of<i32x16>(shifted) << 23));
}

// The mass of tokens, exp of their scaled logits, those below min-p left out: of the tokens ahead of one, and of all.
// The latter is 0 where it is not `wanted`, which spares most of the work.
template <bool min_p>
Mass mass(const Row& row, float temperature, float log_min_p, Token token, bool wanted) {
    const Cuts cuts(token);
    const float factor = std::min(1.44269504f / temperature, std::numeric_limits<float>::max());
    Sum ahead, total;
    for (int64_t g = 0; g < row.groups; g++) {
        const bool some_ahead = row.reaches(g, token.logit);
        if (!some_ahead && !wanted) continue;
        const float *p = row.group(g), *cut = cuts.of(g);
        f32x16 group_ahead = {}, group_total = {};
        for (int i = 0; i < GROUP; i += LANES) {
            const f32x16 v = load(p + i), below = v - row.best.logit;
            f32x16 weight = exp2_of_negative(below * factor);
            if (min_p) weight = select(less_equal(splat(log_min_p), below / temperature), weight, splat(0.0f));
            group_total += weight;
            group_ahead += select(less_equal(load(cut + i), v), weight, splat(0.0f));
        }
        ahead.add(group_ahead);
        total.add(group_total);
    }
    return {ahead.total(), wanted ? total.total() : 0};
}

// -- a token ----------------------------------------------------------------------------------------------------

// Top-k: all that counts are the k best tokens, in order.
int64_t sample_top(const Row& row, const Draw& draw) {
    const auto& tokens = row.top(std::max<int64_t>(draw.top_k, 1), false);
    auto scaled = [&](Token token) { return (token.logit - row.best.logit) / draw.temperature; };
    double total = 0, before = 0, best = -INFINITE;
    for (const Token& token : tokens)
        if (scaled(token) >= draw.log_min_p) total += std::exp((double)scaled(token));
    int64_t winner = row.best.id;
    for (const Token& token : tokens) {
        if (!(scaled(token) >= draw.log_min_p && before < draw.top_p * total)) break;
        before += std::exp((double)scaled(token));
        const double score = scaled(token) + gumbel(draw.key, token.id);
        if (score > best || (score == best && token.id < winner)) {
            best = score;
            winner = token.id;
        }
    }
    return winner;
}

// Top-p needs no order: the winner of all tokens is right if it is within top-p. If it is not, nor is what ranks behind
// it, and the race is run again among those ahead; each time some half of the mass left is dropped.
int64_t sample(const Row& row, const Draw& draw) {
    if (!(draw.temperature > 0)) return row.best.id;
    if (draw.top_k < row.vocab) return sample_top(row, draw);
    Token end = BEHIND_ALL;
    double total = 0;
    for (;;) {
        const Token winner = Race(row, draw, end).winner;
        if (winner.id == row.best.id || draw.top_p == INFINITE) return winner.id;
        const auto of = draw.log_min_p == -INFINITE ? mass<false> : mass<true>;
        const Mass found = of(row, draw.temperature, draw.log_min_p, winner, total == 0);
        if (total == 0) total = found.total;
        if (found.ahead < draw.top_p * total) return winner.id;
        end = winner;
    }
}

// -- log-probabilities ------------------------------------------------------------------------------------------

int64_t rank(const Row& row, Token token) {
    const Cuts cuts(token);
    int64_t rank = 1;
    for (int64_t g = 0; g < row.groups; g++) {
        if (!row.reaches(g, token.logit)) continue;
        const float *p = row.group(g), *cut = cuts.of(g);
        i32x16 count = {};
        for (int i = 0; i < GROUP; i += LANES) count -= less_equal(load(cut + i), load(p + i));
        for (int lane = 0; lane < LANES; lane++) rank += count[lane];
    }
    // -infinity reaches only cuts of -infinity: padding counted there lies behind the vocabulary, and behind the token
    return rank;
}

// values, ids: [1 + count], the token's, then those of the best; values are NaN where the row is not finite.
void score(const Row& row, int64_t id, int64_t count, double* values, int64_t* ids, int64_t* place) {
    const Token token{row.group(id / GROUP)[id % GROUP], (int32_t)id};
    std::fill(values, values + 1 + count, (double)NAN);
    std::fill(ids, ids + 1 + count, id);
    *place = 1;
    if (!row.finite) return;
    const double log_sum = std::log(mass<false>(row, 1.0f, -INFINITE, token, true).total);
    auto log_probability = [&](Token of) { return (double)(of.logit - row.best.logit) - log_sum; };
    values[0] = log_probability(token);
    *place = rank(row, token);
    if (count == 0) return;
    for (const Token& best : row.top(count, true)) {
        *++values = log_probability(best);
        *++ids = best.id;
    }
}

// -- edits ------------------------------------------------------------------------------------------------------

// A list of entries for each of some rows: those of list i are `starts[i]` to `starts[i + 1]`.
struct Lists {
    const int64_t *starts, *ids;
    const float* values;
};

struct Penalties {
    const float *repetition, *frequency, *presence;
};

void penalize(float* row, const Lists& seen, const Penalties& by, int64_t i) {
    for (int64_t at = seen.starts[i]; at < seen.starts[i + 1]; at++) {
        const float count = seen.values[at];
        float& logit = row[seen.ids[at]];
        float value = logit > 0 ? logit / by.repetition[i] : logit * by.repetition[i];
        value -= by.frequency[i] * count;
        logit = count > 0 ? value - by.presence[i] : value;
    }
}

// -- hidden states ----------------------------------------------------------------------------------------------

constexpr int64_t FINITE_NUMBERS = 16384;  // that a thread looks at, at least

// x * 0 is 0 where x is finite, and NaN where it is not; NaN stays through the sum.
template <class T>
void finite_rows(const T* x, int64_t rows, int64_t size, bool* finite) {
    parallel_each(rows, {FINITE_NUMBERS / size}, [=](int64_t row) {
        const T* p = x + row * size;
        f32x16 zeros = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) zeros += load(p + i) * 0.0f;
        if (i < size) zeros += load_some(p + i, size - i) * 0.0f;
        finite[row] = !any(~equal(zeros, splat(0.0f)));
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// logits: [rows, vocab]. tokens: [rows], -1 for a row that is not finite. The other arrays are [rows].
QUIRE_API void quire_sample(
    const float* logits, int64_t rows, int64_t vocab, const float* temperature, const float* log_min_p,
    const int64_t* top_k, const double* top_p, const int64_t* keys, int64_t* tokens) {
    std::vector<Scratch> scratch(threads());
    parallel(rows, ONE_BY_ONE, threads(), [&](int64_t i, int64_t, int thread) {
        const Row row(logits + i * vocab, vocab, scratch[thread]);
        const Draw draw{temperature[i], log_min_p[i], top_k[i], top_p[i], (uint64_t)keys[i]};
        tokens[i] = row.finite ? sample(row, draw) : -1;
    });
}

// Of some of the rows of logits [.., vocab]: values and best [n, 1 + count], ranks [n].
QUIRE_API void quire_token_logprobs(
    const float* logits, int64_t vocab, const int64_t* rows, const int64_t* ids, int64_t n, int64_t count,
    double* values, int64_t* best, int64_t* ranks) {
    std::vector<Scratch> scratch(threads());
    parallel(n, ONE_BY_ONE, threads(), [&](int64_t i, int64_t, int thread) {
        const Row row(logits + rows[i] * vocab, vocab, scratch[thread]);
        score(row, ids[i], count, values + i * (1 + count), best + i * (1 + count), ranks + i);
    });
}

// Changes n different rows of logits [.., vocab] in place: penalties, bias, then bans. finite: [n], whether each row
// was so before.
QUIRE_API void quire_edit_logits(
    float* logits, int64_t vocab, const int64_t* rows, int64_t n, const Penalties* penalties, const Lists* seen,
    const Lists* bias, const Lists* banned, bool* finite) {
    std::vector<Scratch> scratch(threads());
    parallel(n, ONE_BY_ONE, threads(), [&](int64_t i, int64_t, int thread) {
        float* row = logits + rows[i] * vocab;
        finite[i] = Row(row, vocab, scratch[thread]).finite;
        penalize(row, *seen, *penalties, i);
        for (int64_t at = bias->starts[i]; at < bias->starts[i + 1]; at++) row[bias->ids[at]] += bias->values[at];
        for (int64_t at = banned->starts[i]; at < banned->starts[i + 1]; at++) row[banned->ids[at]] = -INFINITE;
    });
}

// Masks, in n rows of logits [.., vocab], each token whose bit in `masks` [n, words] is not set.
QUIRE_API void quire_mask_by_bits(
    float* logits, int64_t vocab, const int64_t* rows, int64_t n, const uint32_t* masks, int64_t words) {
    parallel(n, ONE_BY_ONE, threads(), [&](int64_t i, int64_t, int) {
        float* row = logits + rows[i] * vocab;
        for (int64_t at = 0; at < vocab; at += 32) {
            const uint32_t allowed = masks[i * words + at / 32];
            if (allowed == ~0u) continue;
            const int64_t end = std::min<int64_t>(32, vocab - at);
            for (int64_t bit = 0; bit < end; bit++) {
                if (!(allowed >> bit & 1)) row[at + bit] = -INFINITE;
            }
        }
    });
}

// finite: [rows], whether all of a row of x [rows, size] is finite.
QUIRE_API void quire_finite_rows(int32_t dtype, const void* x, int64_t rows, int64_t size, bool* finite) {
    if (dtype == F32) finite_rows((const float*)x, rows, size, finite);
    if (dtype == BF16) finite_rows((const bf16*)x, rows, size, finite);
    if (dtype == F16) finite_rows((const f16*)x, rows, size, finite);
}
