// One row of logits, and what makes its likeliest tokens quick to find.
//
// A row is read in groups of 256 ids. Lane l of a group is a *chunk*: the ids l, l + 16, l + 32, ... of it. One pass
// takes each chunk's maximum; what looks for tokens above some logit then reads only the groups that hold one.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int64_t GROUP = 16 * LANES;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Token {
    float logit;
    int32_t id;
};

// Rank order: the likelier token, of equal logits the lower id.
inline bool ahead(Token a, Token b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

constexpr Token BEHIND_ALL{-INFINITE, std::numeric_limits<int32_t>::max()};

// Memory of one thread, used for one row after the other.
struct Scratch {
    std::vector<float> maxima, coarse;
    std::vector<Token> tokens;
};

class Row {
public:
    // logits: [vocab], vocab >= 1. Reads all of them once.
    Row(const float* logits, int64_t vocab, Scratch& scratch)
        : vocab(vocab), groups((vocab + GROUP - 1) / GROUP), logits_(logits), scratch_(scratch) {
        const int64_t first = (groups - 1) * GROUP;
        std::fill(tail_, tail_ + GROUP, -INFINITE);
        std::memcpy(tail_, logits + first, (vocab - first) * sizeof(float));
        scan();
    }
    Row(const Row&) = delete;

    const int64_t vocab, groups;
    bool finite;  // no NaN, no +infinity, and not everything masked
    Token best{-INFINITE, 0};

    // The group's 256 logits; -infinity where the vocabulary has ended.
    const float* group(int64_t g) const { return g + 1 < groups ? logits_ + g * GROUP : tail_; }
    f32x16 maxima(int64_t g) const { return load(&scratch_.maxima[g * LANES]); }

    // Whether any of the group's logits is at least this.
    bool reaches(int64_t g, float logit) const { return any(less_equal(splat(logit), maxima(g))); }

    // The `count` best tokens in rank order (all of them, if there are fewer), in the scratch memory. Masked ones, at
    // -infinity, are among them only if `masked`.
    const std::vector<Token>& top(int64_t count, bool masked) const {
        auto& found = scratch_.tokens;
        found.clear();
        collect(std::max(threshold(count), -std::numeric_limits<float>::max()), found);
        if (masked && (int64_t)found.size() < count) {
            found.clear();
            collect(-INFINITE, found);
        }
        count = std::min<int64_t>(count, found.size());
        std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), ahead);
        found.resize(count);
        std::sort(found.begin(), found.end(), ahead);
        return found;
    }

private:
    const float* logits_;
    Scratch& scratch_;
    float tail_[GROUP];

    void scan() {
        scratch_.maxima.resize(groups * LANES);
        f32x16 highest = splat(-INFINITE);
        i32x16 numbers = splat(-1);  // what is not NaN
        for (int64_t g = 0; g < groups; g++) {
            const float* p = group(g);
            f32x16 top = splat(-INFINITE);
            for (int64_t i = 0; i < GROUP; i += LANES) {
                f32x16 v = load(p + i);
                numbers &= equal(v, v);
                top = max(top, v);
            }
            store(&scratch_.maxima[g * LANES], top);
            highest = max(highest, top);
        }
        best.logit = max_of(highest);
        finite = !any(~numbers) && best.logit < INFINITE && best.logit > -INFINITE;
        if (finite) best.id = lowest_id_of(best.logit);
    }

    int32_t lowest_id_of(float logit) const {
        int64_t g = 0;
        while (!any(equal(maxima(g), splat(logit)))) g++;
        const float* p = group(g);
        return g * GROUP + (std::find(p, p + GROUP, logit) - p);
    }

    // A logit that at least `count` tokens reach, and few more: the count-th best of enough maxima.
    float threshold(int64_t count) const {
        auto& coarse = scratch_.coarse;  // the maxima of 16 chunks each where that is enough, else of one
        const int64_t step = count * 8 <= groups ? 16 : 1, sets = (groups + step - 1) / step;
        if (count * 2 > sets * LANES) return -INFINITE;
        coarse.resize(sets * LANES);
        for (int64_t set = 0; set < sets; set++) {
            f32x16 top = maxima(set * step);
            for (int64_t g = set * step + 1; g < std::min(groups, (set + 1) * step); g++) top = max(top, maxima(g));
            store(&coarse[set * LANES], top);
        }
        std::nth_element(coarse.begin(), coarse.begin() + (count - 1), coarse.end(), std::greater<float>());
        return coarse[count - 1];
    }

    void collect(float lowest, std::vector<Token>& found) const {
        for (int64_t g = 0; g < groups; g++) {
            if (!reaches(g, lowest)) continue;
            const float* p = group(g);
            const int64_t count = std::min(GROUP, vocab - g * GROUP);
            for (int64_t i = 0; i < count; i++)
                if (p[i] >= lowest) found.push_back({p[i], (int32_t)(g * GROUP + i)});
        }
    }
};

// Which logits of a group come before one token in rank order: those of at least `of(g)`, place by place.
class Cuts {
public:
    explicit Cuts(Token token) : group_(token.id / GROUP) {
        const int64_t place = token.id % GROUP;
        const float above = std::nextafter(token.logit, INFINITE);
        for (int64_t i = 0; i < GROUP; i++) {
            before_[i] = token.logit;
            within_[i] = i < place ? token.logit : above;
            behind_[i] = above;
        }
    }
    const float* of(int64_t g) const { return g < group_ ? before_ : g == group_ ? within_ : behind_; }

private:
    int64_t group_;
    float before_[GROUP], within_[GROUP], behind_[GROUP];
};

}  // namespace quire
