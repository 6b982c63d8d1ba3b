// Which experts each token goes to: `route` of ops/experts.py, operation by operation. Only `exp`, and the order in
// which a softmax is summed, are this library's own: scores agree with the reference's to the last bits.
#include <algorithm>
#include <limits>
#include <vector>

#include "experts.h"
#include "team.h"

namespace quire {
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float TINY_SUM = 1e-20f;  // TINY of ops/experts.py
constexpr int64_t SERIAL = 16384;   // scores up to which a call stays on one thread

// The order in which the largest are taken: a NaN comes first, as in torch.
bool above(float a, float b) { return a > b || (a != a && b == b); }

// Marks the `count` largest of n >= count scores; of equal ones the first.
void mark_largest(const float* scores, int64_t n, int64_t count, uint8_t* marked) {
    std::fill_n(marked, n, 0);
    for (int64_t c = 0; c < count; c++) {
        int64_t best = std::find(marked, marked + n, 0) - marked;
        for (int64_t i = best + 1; i < n; i++)
            if (!marked[i] && above(scores[i], scores[best])) best = i;
        marked[best] = 1;
    }
}

// What one row needs; a thread's own.
struct Row {
    const Routing& how;
    std::vector<float> scores, chosen_by, of_groups;  // scores: whole vectors
    std::vector<uint8_t> marked, kept;

    explicit Row(const Routing& how)
        : how(how),
          scores((how.experts + LANES - 1) / LANES * LANES),
          chosen_by(how.experts),
          of_groups(how.groups),
          marked(how.experts),
          kept(how.groups) {}

    void score(const float* logits) {
        std::copy_n(logits, how.experts, scores.begin());
        std::fill(scores.begin() + how.experts, scores.end(), NEVER);
        f32x16 top = splat(NEVER), total = {};
        for (float* p = scores.data(); p != scores.data() + scores.size(); p += LANES) top = max(load(p), top);
        const float largest = how.sigmoid ? 0.0f : max_of(top);
        for (float* p = scores.data(); p != scores.data() + scores.size(); p += LANES) {
            const f32x16 e = exp(how.sigmoid ? -load(p) : load(p) - largest);
            total += e;
            store(p, how.sigmoid ? 1.0f / (1.0f + e) : e);
        }
        const float all = sum(total);
        for (int64_t i = 0; i < how.experts && !how.sigmoid; i++) scores[i] /= all;
    }

    // Leaves the experts of all but the best groups no chance.
    void keep_best_groups() {
        const int64_t size = how.experts / how.groups;
        for (int64_t g = 0; g < how.groups; g++) {
            float best = NEVER, second = NEVER;
            for (int64_t i = g * size; i < (g + 1) * size; i++) {
                const float score = chosen_by[i];
                second = above(score, best) ? best : above(score, second) ? score : second;
                best = above(score, best) ? score : best;
            }
            of_groups[g] = how.two_best ? best + second : best;
        }
        mark_largest(of_groups.data(), how.groups, how.top_groups, kept.data());
        for (int64_t i = 0; i < how.experts; i++)
            if (!kept[i / size]) chosen_by[i] = NEVER;
    }

    void choose(const float* logits, int64_t* ids, float* weights) {
        score(logits);
        for (int64_t i = 0; i < how.experts; i++) chosen_by[i] = how.bias ? scores[i] + how.bias[i] : scores[i];
        if (how.top_groups < how.groups) keep_best_groups();
        mark_largest(chosen_by.data(), how.experts, how.top_k, marked.data());
        float total = 0.0f;
        for (int64_t i = 0, k = 0; i < how.experts; i++) {
            if (!marked[i]) continue;
            ids[k] = i, weights[k++] = scores[i];
            total += scores[i];
        }
        for (int64_t k = 0; k < how.top_k; k++)
            weights[k] = (how.normalize ? weights[k] / (total + TINY_SUM) : weights[k]) * how.scale;
    }
};

}  // namespace
}  // namespace quire

using namespace quire;

// ids, weights [tokens, top_k] of logits [tokens, experts].
QUIRE_API void quire_route(const Routing* routing, const float* logits, int64_t tokens, int64_t* ids, float* weights) {
    const Routing& how = *routing;
    parallel(tokens, {SERIAL / how.experts}, threads(), [&](int64_t first, int64_t last, int) {
        Row row(how);
        for (int64_t t = first; t < last; t++)
            row.choose(logits + t * how.experts, ids + t * how.top_k, weights + t * how.top_k);
    });
}
