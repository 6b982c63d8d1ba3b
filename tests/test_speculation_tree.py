"""Trees of drafts: they grow as EAGLE-2 says, in the slots that there are, for all requests of a step at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quire.models.registry import load_model
from quire.ops import Kernels
from quire.runner.drafts import Branch, Drafts
from quire.speculate.drafting import DraftModel
from quire.speculate.tree import GrowingTree, TreeShape
from tests.oracle import VOCAB, Driver, random_prompt, save_checkpoint
from tests.test_speculation_drafting import Stand, digest, expected_line, feature_of, fused, hash_stand, logits_of

Line = tuple[int, ...]
Confidences = Callable[[Line], list[tuple[int, float]]]
"""Candidates behind some drafts, the best first: token and log-confidence."""


def table(seed: int, width: int, steps: int = 0) -> Confidences:
    """Confidences drawn at random, the same for the same drafts; with `steps`, of so few values that many are equal."""

    def look_up(line: Line) -> list[tuple[int, float]]:
        chosen = random.Random(f"{seed} {line}")
        values = [chosen.randint(1, steps) / steps if steps else chosen.random() for _ in range(width)]
        tokens = chosen.sample(range(50), width)
        return list(zip(tokens, sorted((math.log(value) for value in values), reverse=True), strict=True))

    return look_up


def grow(count: int, shape: TreeShape, confidences: Confidences) -> tuple[Drafts, list[Branch]]:
    """A tree, and what was computed for it."""
    tree, branches, expanded = GrowingTree(count, shape), [], [0]
    while expanded:
        for node in expanded:
            candidates = confidences(tuple(tree.tokens(node)))
            tree.add(node, [token for token, _ in candidates], [value for _, value in candidates])
        expanded = tree.grow()
        if expanded:
            branches.append(tree.branch(7, 100, expanded))
    return tree.drafts(), branches


def plain(count: int, shape: TreeShape, confidences: Confidences) -> dict[Line, float]:
    """EAGLE-2 as its paper says it: the best of each layer are expanded, then the best of all are taken."""
    nodes: dict[Line, float] = {}
    layer: dict[Line, float] = {(): 0.0}
    for _ in range(shape.depth):
        best = sorted(layer, key=lambda line: -layer[line])[: shape.width]
        layer = {(*line, token): layer[line] + value for line in best for token, value in confidences(line)}
        nodes |= layer
    best = sorted(nodes, key=lambda line: -nodes[line])[:count]
    return {line: nodes[line] for line in best}


def exhaustive(count: int, depth: int, confidences: Confidences) -> dict[Line, float]:
    """The best of all nodes that there could be."""
    nodes: dict[Line, float] = {}
    layer: dict[Line, float] = {(): 0.0}
    for _ in range(depth):
        layer = {(*line, token): above + value for line, above in layer.items() for token, value in confidences(line)}
        nodes |= layer
    return {line: nodes[line] for line in sorted(nodes, key=lambda line: -nodes[line])[:count]}


def lines(drafts: Drafts) -> list[Line]:
    """The tokens from the root to each draft."""
    made: list[Line] = [()]
    parents = drafts.parents if drafts.parents is not None else range(len(drafts.tokens))
    for row, (token, parent) in enumerate(zip(drafts.tokens, parents, strict=True), 1):
        assert 0 <= parent < row
        made.append((*made[parent], token))
    return made[1:]


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_grows_as_the_paper_says(seed: int) -> None:
    chosen = random.Random(seed)
    shape = TreeShape(chosen.randint(1, 5), chosen.randint(1, 6))
    count = chosen.randint(shape.width * (shape.depth - 1) + 1, 40)  # every layer has slots of its own
    drafts, _ = grow(count, shape, table(seed, shape.width))
    assert set(lines(drafts)) == set(plain(count, shape, table(seed, shape.width)))


@pytest.mark.parametrize("seed", range(12))
def test_a_wide_tree_holds_the_best_nodes_that_there_are(seed: int) -> None:
    count, depth, confidences = random.Random(seed).randint(1, 8), 1 + seed % 4, table(seed, 8)
    drafts, _ = grow(count, TreeShape(8, depth), confidences)
    best = exhaustive(count, depth, confidences)
    if depth <= 2:
        assert set(lines(drafts)) == set(best)
    found = exhaustive(10**6, depth, confidences)
    values = [math.exp(found[line]) for line in lines(drafts)]
    assert len(values) == count
    assert sum(values) >= 0.97 * sum(map(math.exp, best.values()))  # where slots in one piece are short


@pytest.mark.parametrize("seed", range(40))
def test_rows_and_paths_stay_in_bounds_and_no_ancestor_is_overwritten(seed: int) -> None:
    chosen = random.Random(seed)
    shape = TreeShape(chosen.randint(1, 10), chosen.randint(1, 12))
    count = chosen.randint(1, 24)
    drafts, branches = grow(count, shape, table(seed, shape.width, chosen.choice([0, 3])))
    assert len(drafts.tokens) <= count and len(branches) < shape.depth
    assert len(set(lines(drafts))) == len(drafts.tokens)
    stored: dict[int, Line] = {0: ()}
    for layer, branch in enumerate(branches, 1):
        assert (branch.request, branch.base) == (7, 100)
        assert 1 <= len(branch.slots) <= shape.width
        assert list(branch.slots) == list(range(branch.slots[0], branch.slots[0] + len(branch.slots)))
        assert branch.slots[0] >= 1 and branch.slots[-1] <= count
        for token, slot, path in zip(branch.tokens, branch.slots, branch.paths, strict=True):
            assert len(path) == layer + 1 and path[0] == 0 and path[-1] == slot
            stored[slot] = (*stored[path[-2]], token)
        for path in branch.paths:
            assert [stored[slot] for slot in path] == [stored[path[-1]][:i] for i in range(len(path))]


def test_slots_are_used_again_so_that_a_small_tree_may_be_deep() -> None:
    steep: Confidences = lambda line: [(token, math.log(p)) for token, p in ((1, 0.6), (2, 0.3), (3, 0.1))]  # noqa: E731
    drafts, branches = grow(8, TreeShape(4, 5), steep)
    assert sum(len(branch.slots) for branch in branches) > 8
    assert set(lines(drafts)) == set(plain(8, TreeShape(4, 5), steep))
    certain: Confidences = lambda line: [(1, math.log(0.9)), (2, math.log(0.1))]  # noqa: E731
    drafts, branches = grow(8, TreeShape(4, 8), certain)
    assert max(map(len, lines(drafts))) == len(branches) + 1
    assert set(lines(drafts)) == set(plain(8, TreeShape(4, 8), certain))


def test_of_equal_nodes_the_first_ones_are_taken() -> None:
    equal: Confidences = lambda line: [(token, 0.0) for token in (5, 3, 4)]  # noqa: E731
    drafts, _ = grow(5, TreeShape(3, 2), equal)
    assert lines(drafts) == [(5,), (3,), (4,), (5, 5), (5, 3)]
    assert drafts.parents == [0, 0, 0, 1, 1]
    for seed in range(10):
        confidences = table(seed, 4, steps=2)
        assert grow(12, TreeShape(4, 4), confidences) == grow(12, TreeShape(4, 4), confidences)
        assert set(lines(grow(14, TreeShape(4, 4), confidences)[0])) == set(plain(14, TreeShape(4, 4), confidences))


def test_a_node_never_stands_before_the_one_it_continues_even_where_a_confidence_is_rounded_up() -> None:
    rounded: Confidences = lambda line: [(len(line), 1e-7), (9, -0.5)]  # noqa: E731
    for count in range(1, 5):
        assert grow(count, TreeShape(2, 4), rounded)[0] == Drafts(list(range(count)))


def test_what_cannot_be_is_no_candidate() -> None:
    odd: Confidences = lambda line: [(-1, -0.1), (1, -0.5), (2, -math.inf), (3, math.nan)]  # noqa: E731
    drafts, _ = grow(3, TreeShape(4, 3), odd)
    assert drafts == Drafts([1, 1, 1])
    nothing: Confidences = lambda line: [(-1, -0.1)]  # noqa: E731
    assert grow(3, TreeShape(1, 3), nothing) == (Drafts([]), [])


def test_one_node_needs_no_row() -> None:
    drafts, branches = grow(1, TreeShape(4, 6), table(0, 4))
    assert (len(drafts.tokens), drafts.parents, branches) == (1, None, [])


@pytest.mark.parametrize(("shape", "message"), [((0, 3), "width is 0"), ((3, -1), "depth is -1")])
def test_a_tree_without_extent_is_refused(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
        TreeShape(*shape)


# With a model


def hash_confidences(known: Sequence[int], lead: int, width: int) -> Confidences:
    """Candidates of a `HashHead` behind the known tokens, by a computation of each node from nothing."""

    def look_up(line: Line) -> list[tuple[int, float]]:
        features = feature_of(known)
        seen = [(token, fused(features[i]) if lead else 0) for i, token in enumerate(known[lead:])]
        for token in line:
            seen.append((token, digest(seen) if lead else 0))
        values, tokens = logits_of(digest(seen)).log_softmax(-1).topk(width)
        return list(zip(tokens.tolist(), values.tolist(), strict=True))

    return look_up


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("padding", [0, 5])
def test_the_trees_of_all_requests_grow_together(lead: int, padding: int) -> None:
    shape, counts = TreeShape(3, 4), {0: 14, 1: 0, 2: 10, 3: 1}
    stand = hash_stand(lead, tree=shape, padding=padding)
    for request in counts:
        stand.admit(request, random_prompt(90, seed=request))
        stand.compute((request, 30 + 7 * request))
    for _ in range(2):
        stand.context.batches.clear()
        trees = stand.propose(*counts.items())
        assert trees[1] == Drafts([])
        for request in (0, 2, 3):
            known = stand.texts[request][: stand.done[request] + 1]
            confidences = hash_confidences(known, lead, shape.width)
            assert set(lines(trees[request])) == set(plain(counts[request], shape, confidences))
            stand.compute((request, stand.done[request] + 1))
        assert len(stand.context.batches) == shape.depth
        assert all(sum(rows) <= 6 for rows in stand.context.batches[1:])
    for branch in stand.context.branches:
        assert branch.base in [30 + 7 * branch.request - lead + step for step in range(2)]


@pytest.mark.parametrize("lead", [0, 1])
def test_a_tree_one_wide_is_a_line(lead: int) -> None:
    made = []
    for tree in (TreeShape(1, 5), None):
        stand = hash_stand(lead, tree=tree)
        for request in range(2):
            stand.admit(request, random_prompt(60, seed=request))
            stand.compute((request, 40))
        made.append((stand.propose((0, 5), (1, 3)), stand.context.batches, stand.context.asked))
        stand.compute((0, 43), (1, 41))
        known = stand.texts[0][:44]
        assert stand.line(0, 4) == expected_line(known, feature_of(known), 4, lead)
    assert made[0][0] == made[1][0]
    assert made[0][1] == made[1][1]
    assert [row._replace(ahead=list(row.ahead)) for row in made[0][2]] == [
        row._replace(ahead=list(row.ahead)) for row in made[1][2]
    ]


def test_the_rows_of_a_tree_say_what_stands_before_them() -> None:
    stand = hash_stand(1, tree=TreeShape(3, 3))
    stand.admit(0, random_prompt(60))
    stand.compute((0, 40))
    [drafts] = stand.propose((0, 12))
    assert stand.context.asked[0] == (0, 41, [])
    for row in stand.context.asked:
        assert row.position == 41 + len(row.ahead)
        assert not row.ahead or tuple(row.ahead) in lines(drafts)


def test_a_draft_model_grows_the_tree_of_what_it_would_say(tmp_path: Path) -> None:
    model, shape = load_model(save_checkpoint(tmp_path, "qwen3"), kernels=Kernels()), TreeShape(3, 4)
    texts = [random_prompt(60, seed=1), random_prompt(30, seed=2)]
    stand = Stand(DraftModel(model, VOCAB), 0, tree=shape)
    for request, text in enumerate(texts):
        stand.admit(request, text)
        stand.compute((request, len(text) - 1))
    for text, drafts in zip(texts, stand.propose((0, 16), (1, 10)), strict=True):

        def confidences(line: Line, text: Sequence[int] = text) -> list[tuple[int, float]]:
            logits = Driver(model, 80).feed([*text, *line])[-1]
            values, tokens = logits.log_softmax(-1).topk(shape.width)
            return list(zip(tokens.tolist(), values.tolist(), strict=True))

        assert set(lines(drafts)) == set(plain(len(drafts.tokens), shape, confidences))
