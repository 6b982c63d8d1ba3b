// Mixture of experts, and the products that each head has of its own: many small products in one call.
//
// Tokens are sorted by expert, and an expert's rows, in groups of up to GROUP_ROWS, are multiplied as one product
// (linear.h): those of all experts are shared out among the threads together, so that all have work at one token too.
// An expert without rows is not read. A row's bits are those of the products, which do not know of other rows; and a
// token's experts are summed in one order.
//
// Where ranks have slots, each multiplies the turns of its own, and writes the results into memory that all share; then
// each sums all of them. So it makes no difference to any bit which rank has which expert.
#include "experts.h"

#include <algorithm>
#include <vector>

#include "gate.h"
#include "linear.h"
#include "team.h"

using namespace quire;

QUIRE_API int64_t quire_linear_scratch(const Weight*, int64_t rows);

namespace quire {
namespace {

constexpr int64_t GROUP_ROWS = 96;           // whole blocks of rows, and whole tiles, on every instruction set
constexpr int64_t TURNS = 4096;              // of tokens at experts, that are worked on at a time: bounds the workspace
constexpr int64_t PIECE_BYTES = 256 * 1024;  // of a weight that a thread reads in one go
constexpr int64_t PIECES_A_THREAD = 4;       // at least, where there are so many panels
constexpr int64_t SUM_COLUMNS = 1024;
constexpr int64_t SUMMED = 16;               // such columns that a thread adds up at least

int64_t bytes_of(int32_t dtype) { return dtype == F32 ? 4 : 2; }
int64_t groups_of(int64_t rows) { return (rows + GROUP_ROWS - 1) / GROUP_ROWS; }

// Scratch of a product with `rows` rows, in whole lines.
int64_t scratch_bytes(const Weight& w, int64_t rows) { return round_up(quire_linear_scratch(&w, rows), 64); }

// -- who goes where -------------------------------------------------------------------------------------------------

// Rows that one slot's expert multiplies at once.
struct Rows {
    int64_t slot, first, rows;  // slot: among this rank's; first: among all turns
};

// Of each turn, in the order of the tokens, the slot that it goes to: an expert's slots take turns.
std::vector<int64_t> slots_of(const Experts& e, const int64_t* ids, int64_t turns) {
    std::vector<int64_t> found(ids, ids + turns);
    if (!e.slots) return found;
    std::vector<int64_t> seen(e.count, 0);
    for (int64_t& id : found) {
        const int64_t first = e.slots->first[id], replicas = e.slots->first[id + 1] - first;
        id = e.slots->of_experts[first + seen[id]++ % replicas];
    }
    return found;
}

// The turns of tokens at experts, sorted by slot and then by token.
struct Plan {
    std::vector<int64_t> turn_of;   // [tokens, top_k]
    std::vector<int64_t> token_of;  // [turns]
    std::vector<Rows> groups;       // of this rank's slots
    int64_t first = 0, own = 0;     // turns of these

    Plan(const Experts& e, const int64_t* ids, int64_t tokens, int64_t top_k)
        : turn_of(tokens * top_k), token_of(tokens * top_k) {
        const std::vector<int64_t> slots = slots_of(e, ids, tokens * top_k);
        const int64_t count = e.slots ? e.slots->count : e.count, mine = e.slots ? e.slots->begin : 0;
        const int64_t end = e.slots ? mine + e.slots->own : count;
        std::vector<int64_t> begin(count + 1, 0);
        for (const int64_t slot : slots) begin[slot + 1]++;
        for (int64_t slot = 0; slot < count; slot++) {
            const int64_t rows = begin[slot + 1], parts = slot >= mine && slot < end ? groups_of(rows) : 0;
            begin[slot + 1] += begin[slot];
            if (slot == mine) first = begin[slot];
            for (int64_t g = 0; g < parts; g++) {
                const int64_t row = g * rows / parts;
                groups.push_back({slot - mine, begin[slot] + row, (g + 1) * rows / parts - row});
            }
            own += parts ? rows : 0;
        }
        for (int64_t i = 0; i < tokens * top_k; i++) {
            turn_of[i] = begin[slots[i]]++;
            token_of[turn_of[i]] = i / top_k;
        }
    }
};

// Some panels of a product.
struct Piece {
    const Task* task;
    int64_t first, last;
};

// All products' pieces. Those of an expert's groups with the same panels follow one another: the panels are still in a
// cache.
std::vector<Piece> cut(const std::vector<Task>& tasks) {
    std::vector<Piece> pieces;
    if (tasks.empty()) return pieces;
    int64_t all = 0;
    for (const Task& task : tasks) all += all_panels(*task.weight);
    const int64_t fair = all / (PIECES_A_THREAD * threads());
    for (size_t begin = 0, end; begin < tasks.size(); begin = end) {
        for (end = begin; end < tasks.size() && tasks[end].weight == tasks[begin].weight;) end++;
        const Weight& w = *tasks[begin].weight;
        const int64_t count = all_panels(w);
        const int64_t at_once = std::max<int64_t>(1, std::min(fair, PIECE_BYTES / panel_bytes(w)));
        for (int64_t panel = 0; panel < count; panel += at_once)
            for (size_t t = begin; t < end; t++) pieces.push_back({&tasks[t], panel, std::min(panel + at_once, count)});
    }
    return pieces;
}

// All products, after their preparation: prepare_one(task) for the first `count` tasks, by those who then multiply. Who
// multiplies a piece asks for the panels of the next one while it does.
template <class Body>
void multiply_all(const std::vector<Task>& tasks, int64_t count, const Body& prepare_one) {
    const std::vector<Piece> pieces = cut(tasks);
    Before preparation(count, 1);
    parallel(pieces.size(), {}, threads(), [&](int64_t first, int64_t last, int) {
        preparation.finish(prepare_one);
        for (int64_t i = first; i < last; i++) {
            const Piece &piece = pieces[i], &after = pieces[std::min<size_t>(i + 1, pieces.size() - 1)];
            multiply(*piece.task, piece.first, piece.last, any_panel(*after.task->weight, after.first));
        }
    });
}

// -- the workspace --------------------------------------------------------------------------------------------------

// Parts of a workspace for `turns` turns, in bytes from its begin. A turn's row of x is not needed any more when the
// expert's result takes its place.
struct Room {
    int64_t rows, gate_up, active, scratch, bytes;

    Room(const Experts& e, int64_t turns) {
        const int64_t number = bytes_of(e.dtype);
        rows = 0;
        gate_up = rows + round_up(turns * std::max(e.hidden * number, e.out * 4), 64);
        active = gate_up + round_up(turns * inputs_of(e.activation) * e.inner.own * number, 64);
        scratch = active + round_up(turns * e.inner.own * number, 64);
        // A group has at least one row: what is rounded up for its sake counts at every row. In tiles, its rows may be filled
        // up with one for each 16.
        int64_t most = 0;
        for (int64_t i = 0; i < (e.slots ? e.slots->own : e.count); i++)
            most = std::max({most, scratch_bytes(*e.gate_up[i], 1), scratch_bytes(*e.down[i], 1)});
        bytes = scratch + (turns + turns / 16) * most;
    }
};

// A product for each group, from rows of `in` numbers to rows of `out`; or all of them from one row, which then needs to be
// prepared once.
std::vector<Task> tasks_of(const Plan& plan, const Experts& e, const Weight* const* weights, const char* from, char* to,
                           int32_t to_dtype, char* scratch, bool one_row = false) {
    std::vector<Task> tasks;
    for (const Rows& g : plan.groups) {
        const Weight& w = *weights[g.slot];
        const void* x = from + (one_row ? 0 : g.first * w.in * bytes_of(e.dtype));
        void* y = to + g.first * w.width * bytes_of(to_dtype);
        tasks.push_back({&w, x, y, g.rows, w.width, e.dtype, to_dtype, scratch});
        if (!one_row) scratch += scratch_bytes(w, g.rows);
    }
    return tasks;
}

// Whether what is prepared for one of the groups' weights serves all.
bool of_one_kind(const Plan& plan, const Weight* const* weights) {
    return std::all_of(plan.groups.begin(), plan.groups.end(), [&](const Rows& g) {
        return laid_out_alike(*weights[g.slot], *weights[plan.groups[0].slot]);
    });
}

// -- all of it ------------------------------------------------------------------------------------------------------

// out[columns] = the sum of `count` rows of parts, each times its weight, rounded once.
template <class T>
void sum_turns(const float* parts, const int64_t* turns, const float* weights, int64_t count, int64_t size,
               int64_t first, int64_t last, T* out) {
    for (int64_t i = first; i < last; i += LANES) {
        f32x16 total = load_some(parts + turns[0] * size + i, last - i) * weights[0];
        for (int64_t k = 1; k < count; k++) total += load_some(parts + turns[k] * size + i, last - i) * weights[k];
        store_some(out + i, total, last - i);
    }
}

template <class T>
Outcome experts(const Experts& e, const ExpertsStep& s, char* workspace) {
    const Room room(e, s.tokens * s.top_k);
    const Plan plan(e, s.ids, s.tokens, s.top_k);
    char *rows = workspace + room.rows, *scratch = workspace + room.scratch;
    char *gate_up = workspace + room.gate_up, *active = workspace + room.active, *parts = rows;
    const int64_t turns = s.tokens * s.top_k, part_bytes = e.out * sizeof(float);
    if (e.slots)
        if (const Outcome outcome = begin_parts(*e.group, turns * part_bytes, &parts); outcome != DONE) return outcome;
    const bool one_row = s.tokens == 1 && of_one_kind(plan, e.gate_up);
    const auto up = tasks_of(plan, e, e.gate_up, one_row ? (const char*)s.x : rows, gate_up, e.dtype, scratch, one_row);
    const int64_t groups = plan.groups.size(), row = e.hidden * sizeof(T);
    const int64_t columns = (e.out + SUM_COLUMNS - 1) / SUM_COLUMNS;
    multiply_all(up, one_row ? std::min<int64_t>(groups, 1) : groups, [&](int64_t g) {
        const int64_t first = plan.groups[g].first, last = one_row ? first : first + plan.groups[g].rows;
        for (int64_t turn = first; turn < last; turn++)
            std::memcpy(rows + turn * row, (const char*)s.x + plan.token_of[turn] * row, row);
        prepare(up[g]);
    });
    auto activate = [&](int64_t g) {
        const int64_t first = plan.groups[g].first, inner = e.inner.own;
        for (int64_t turn = first; turn < first + plan.groups[g].rows; turn++) {
            const T* gate = (const T*)gate_up + turn * inputs_of(e.activation) * inner;
            T* to = (T*)active + turn * inner;
            with_activation(e.activation, [&](auto which) { gate_part<which>(gate, gate + inner, to, inner); });
        }
    };
    const char* inner = active;
    const bool gathers = e.group && !e.slots;
    if (gathers) {
        parallel_each(groups, ONE_BY_ONE, activate);
        const Outcome outcome = gather(*e.group, active, turns, e.inner, sizeof(T), &inner);
        if (outcome != DONE) return outcome;
    }
    const auto down = tasks_of(plan, e, e.down, inner, parts, F32, scratch);
    multiply_all(down, groups, [&](int64_t g) {
        if (!gathers) activate(g);
        prepare(down[g]);
    });
    if (e.slots) {
        const uint64_t shape = (uint64_t)turns << 32 ^ e.slots->digest;
        const Outcome outcome =
            end_parts(*e.group, shape, plan.first * part_bytes, plan.own * part_bytes, turns * part_bytes);
        if (outcome != DONE) return outcome;
    }
    parallel_each(s.tokens * columns, {SUMMED / s.top_k}, [&](int64_t i) {
        const int64_t token = i / columns, first = i % columns * SUM_COLUMNS;
        sum_turns((const float*)parts, &plan.turn_of[token * s.top_k], s.weights + token * s.top_k, s.top_k, e.out, first,
                  std::min(first + SUM_COLUMNS, e.out), (T*)s.out + token * e.out);
    });
    return DONE;
}

int64_t tokens_at_once(const Experts& e, int64_t tokens, int64_t top_k) {
    const int64_t turns = e.slots ? std::min(TURNS, room_of(*e.group) / (e.out * (int64_t)sizeof(float))) : TURNS;
    return std::min(tokens, std::max<int64_t>(1, turns / top_k));
}

// Whether each token's ids are experts, in ascending order.
bool in_order(const ExpertsStep& s, int64_t experts) {
    for (int64_t i = 0; i < s.tokens * s.top_k; i++) {
        const int64_t least = i % s.top_k ? s.ids[i - 1] + 1 : 0;
        if (s.ids[i] < least || s.ids[i] >= experts) return false;
    }
    return true;
}

// -- products of heads ----------------------------------------------------------------------------------------------

// A thread's part of the workspace: gathered rows, and the product's scratch.
int64_t head_room(const Heads& h) {
    const int64_t rows = std::min(h.tokens, GROUP_ROWS), in = h.products[0]->in;
    int64_t most = 0;
    for (int64_t i = 0; i < h.count; i++) most = std::max(most, scratch_bytes(*h.products[i], rows));
    return round_up(rows * in * bytes_of(h.dtype), 64) + most;
}

// Some tokens of one head.
void multiply_head(const Heads& h, int64_t head, int64_t first, int64_t last, char* workspace) {
    const Weight& w = *h.products[head];
    const int64_t number = bytes_of(h.dtype), bytes = w.in * number;
    for (int64_t token = first; token < last; token++) {
        const char* from = (const char*)h.x + (token * h.token_stride + head * h.head_stride) * number;
        std::memcpy(workspace + (token - first) * bytes, from, bytes);
    }
    const int64_t stride = h.count * h.y_head_stride;
    void* y = (char*)h.y + (first * stride + head * h.y_head_stride) * number;
    const int64_t rows = last - first;
    const Task task{&w, workspace, y, rows, stride, h.dtype, h.dtype, workspace + round_up(rows * bytes, 64)};
    prepare(task);
    multiply(task, 0, all_panels(w), (const char*)w.data);
}

}  // namespace
}  // namespace quire

// Bytes of workspace that a step of so many tokens needs.
QUIRE_API int64_t quire_experts_workspace(const Experts* e, int64_t tokens, int64_t top_k) {
    return Room(*e, tokens_at_once(*e, tokens, top_k) * top_k).bytes;
}

constexpr int32_t NOT_IN_ORDER = -1;  // a token's ids are not experts in ascending order

// See `Experts` in ops/experts.py. Returns an `Outcome`, or NOT_IN_ORDER, and then it has done nothing.
QUIRE_API int32_t quire_experts(const Experts* e, const ExpertsStep* step, char* workspace) {
    const ExpertsStep& s = *step;
    if (!in_order(s, e->count)) return NOT_IN_ORDER;
    const int64_t at_once = tokens_at_once(*e, s.tokens, s.top_k), item = bytes_of(e->dtype);
    for (int64_t first = 0; first < s.tokens; first += at_once) {
        const ExpertsStep part{std::min(at_once, s.tokens - first),  s.top_k,
                               (const char*)s.x + first * e->hidden * item, s.ids + first * s.top_k,
                               s.weights + first * s.top_k, (char*)s.out + first * e->out * item};
        const auto run = e->dtype == F32 ? experts<float> : e->dtype == BF16 ? experts<bf16> : experts<f16>;
        if (const Outcome outcome = run(*e, part, workspace); outcome != DONE) return outcome;
    }
    return 0;
}

// Bytes of workspace that `quire_heads` needs now.
QUIRE_API int64_t quire_heads_workspace(const Heads* h) { return threads() * head_room(*h); }

// See `HeadProducts` in ops/experts.py.
QUIRE_API void quire_heads(const Heads* heads, char* workspace) {
    const Heads& h = *heads;
    const int64_t groups = groups_of(h.tokens), room = head_room(h);
    parallel(h.count * groups, ONE_BY_ONE, threads(), [&](int64_t item, int64_t, int thread) {
        const int64_t head = item / groups, group = item % groups;
        const int64_t first = group * h.tokens / groups, last = (group + 1) * h.tokens / groups;
        multiply_head(h, head, first, last, workspace + thread * room);
    });
}
