"""Drafting with a model: what it has seen is what the target computed, however and whenever it was told of it."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.models.registry import load_model
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.ops.ragged import Trees
from quire.ops.sampling import Filters, Purpose, noise_key, sample
from quire.runner.draft_context import Line
from quire.runner.drafts import Branch, Computed, DraftingModel, Drafts, Row, Wanted
from quire.speculate.drafting import CHUNK, DraftingProposer, DraftModel
from quire.speculate.methods import make_speculation
from quire.speculate.tree import TreeShape
from quire.speculative_config import SpeculativeConfig
from tests.oracle import VOCAB, Driver, greedy, load_reference, random_prompt, reference_greedy, save_checkpoint
from tests.test_models_deepseek import save_with_mtp

BLOCK_SIZE = 16
NOTHING_LEFT = 7
"""The fake context draws -1 where a request's row is at a position divisible by this, if asked to."""


# A head whose drafts depend on everything that its rows see: each token, what it was fed, and their order


def digest(seen: Sequence[tuple[int, int]]) -> int:
    return zlib.crc32(repr(list(seen)).encode()) % 2**20


def fused(feature: int) -> int:
    return feature % 1000 + 1


def logits_of(state: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(state)) * 3


class HashHead:
    """A drafting model without arithmetic. It keeps by slot what each row took, and hashes what a row sees.

    Args:
        lead: with 0 it looks at tokens alone.
    """

    kv_shape = KVShape(1, 1, 2, torch.float64)

    def __init__(self, lead: int = 1) -> None:
        self._lead = lead
        self._stored: dict[int, tuple[int, int]] = {}  # by slot
        self.fails = False

    def fuse(self, features: Tensor) -> Tensor:
        return torch.tensor([[fused(int(feature))] for feature in features[:, 0]], dtype=torch.float64)

    def forward(self, hidden: Tensor, batch: RaggedBatch, kv: KVCache) -> Tensor:
        size, tokens, slots = batch.block_size, batch.token_ids.tolist(), batch.slots.tolist()
        if self.fails:
            raise RuntimeError("out of memory")
        if self._lead:
            assert len(hidden) == len(tokens)
        for row in range(batch.row_starts[-1]):
            self._stored[slots[row]] = tokens[row], int(hidden[row, 0]) if self._lead else 0
        out = torch.full((len(tokens), 1), -1.0, dtype=torch.float64)
        for span, table in enumerate(batch.block_tables.tolist()):
            first, last = batch.row_starts[span], batch.row_starts[span + 1] - 1
            for row in [last] if batch.trees is None else range(first, last + 1):  # nothing else is looked at
                places = seen_places(batch, span, row)
                assert max(places) < batch.context_lens[span]
                seen = [self._stored.get(table[place // size] * size + place % size, (-1, -1)) for place in places]
                out[row] = digest(seen)
        return out

    def logits(self, out: Tensor) -> Tensor:
        return torch.stack([logits_of(int(state)) for state in out[:, 0]])


def seen_places(batch: RaggedBatch, span: int, row: int) -> list[int]:
    """The positions whose storage a row sees, in order."""
    position = int(batch.positions[row])
    trees = batch.trees
    if trees is None:
        return list(range(position + 1))
    base = int(trees.bases[span])
    return [place if place < base else base + int(trees.paths[row, place - base]) for place in range(position + 1)]


def expected_line(known: Sequence[int], features: Sequence[int], count: int, lead: int = 1) -> list[int]:
    """What the head must draft behind the known tokens; the target has computed all of them but the last."""
    seen = [(token, fused(features[i]) if lead else 0) for i, token in enumerate(known[lead:])]
    line: list[int] = []
    while len(line) < count:
        state = digest(seen)
        line.append(int(logits_of(state).argmax()))
        seen.append((line[-1], state if lead else 0))
    return line


# A runner in small


class Context:
    """What a proposer may use: requests have tables of blocks that lie anywhere, a temperature and a seed."""

    vocab_size = VOCAB
    kv: KVCache
    passes = None

    def __init__(self, padding: int = 0) -> None:
        self.tables: dict[int, list[int]] = {}
        self.params: dict[int, tuple[float, int]] = {}  # temperature and seed
        self.batches: list[list[int]] = []  # rows of each span of each batch
        self.branches: list[Branch] = []
        self.asked: list[Row] = []  # whatever was drawn
        self.ends_lines = False
        self._padding = padding

    def batch(self, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> RaggedBatch:
        positions = [range(start, start + len(part)) for start, part in zip(starts, tokens, strict=True)]
        ends = [each.stop for each in positions]
        return self._made(requests, tokens, positions, positions, ends)

    def tree_batch(self, branches: Sequence[Branch]) -> RaggedBatch:
        self.branches += branches
        for branch in branches:
            assert all(path[0] == 0 and path[-1] == slot for path, slot in zip(branch.paths, branch.slots, strict=True))
            first, count = branch.slots[0], len(branch.slots)
            assert list(branch.slots) == list(range(first, first + count))  # as the device stores the rows of a span
        paths = [path for branch in branches for path in branch.paths]
        width = max(map(len, paths))
        positions = [[branch.base + len(path) - 1 for path in branch.paths] for branch in branches]
        stored = [[branch.base + slot for slot in branch.slots] for branch in branches]
        ends = [branch.base + 1 + max(max(path) for path in branch.paths) for branch in branches]
        tokens = [branch.tokens for branch in branches]
        batch = self._made([branch.request for branch in branches], tokens, positions, stored, ends)
        padded = [[*path, *[0] * (width - len(path))] for path in paths]
        batch.trees = Trees(torch.tensor([branch.base for branch in branches]), torch.tensor(padded))
        return batch

    def _made(
        self,
        requests: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        stored: Sequence[Sequence[int]],
        ends: Sequence[int],
    ) -> RaggedBatch:
        assert len(set(requests)) == len(requests) and all(len(part) > 0 for part in tokens)
        self.batches.append([len(part) for part in tokens])
        size, tables = BLOCK_SIZE, [self.tables[request] for request in requests]
        slots = [
            table[place // size] * size + place % size
            for table, part in zip(tables, stored, strict=True)
            for place in part
        ]
        nothing = [0] * self._padding
        blocks = [table[: -(-end // size)] for table, end in zip(tables, ends, strict=True)]
        width = max(map(len, blocks))
        return RaggedBatch(
            token_ids=torch.tensor([token for part in tokens for token in part] + nothing),
            positions=torch.tensor([position for part in positions for position in part] + nothing),
            slots=torch.tensor(slots + nothing),
            row_starts=np.cumsum([0, *map(len, tokens)]).tolist(),
            context_lens=list(ends),
            block_tables=torch.tensor([part + [0] * (width - len(part)) for part in blocks]),
            block_size=size,
        )

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        self.asked += rows
        drawn = draw(logits, [self.params[row.request] for row in rows], [row.position for row in rows])
        logits.fill_(float("nan"))  # it may
        if self.ends_lines:
            return [-1 if row.position % NOTHING_LEFT == 0 else token for row, token in zip(rows, drawn, strict=True)]
        return drawn

    def line(self, wanted: Sequence[Wanted], lead: int) -> Line:
        return Line(self, wanted, lead)

    def rows_ahead(self, wanted: Sequence[Wanted], lead: int) -> Any:
        def batch(index: int, tokens: Tensor) -> RaggedBatch:
            going = wanted[: len(tokens)]
            starts = [want.position + index - lead for want in going]
            return self.batch([want.request for want in going], starts, [[token] for token in tokens.tolist()])

        return batch

    def distributions(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        temperatures = [self.params[row.request][0] for row in rows]
        made = (logits / torch.tensor(temperatures)[:, None]).softmax(-1)
        logits.fill_(float("nan"))
        return made

    def candidates(self, logits: Tensor, rows: Sequence[Row], width: int) -> tuple[Tensor, Tensor]:
        self.asked += rows
        confidences, tokens = logits.log_softmax(-1).topk(width)
        return tokens, confidences


def draw(logits: Tensor, params: Sequence[tuple[float, int]], positions: Sequence[int]) -> list[int]:
    """A token a row, with the noise of its seed and position."""
    keys = [noise_key(seed, 0, Purpose.SAMPLE, at) for (_, seed), at in zip(params, positions, strict=True)]
    count = len(params)
    temperatures = torch.tensor([temperature for temperature, _ in params])
    nothing = torch.full((count,), -torch.inf), torch.full((count,), VOCAB), torch.full((count,), torch.inf).double()
    return sample(logits.float(), Filters(temperatures, *nothing, torch.tensor(keys))).tolist()


class Stand:
    """Requests whose texts are known: it tells a proposer of their parts, and asks it for drafts.

    Args:
        model: what drafts.
        features: of a request's text, one a token; None: the proposer gets none.
    """

    def __init__(
        self,
        model: DraftingModel,
        lead: int,
        features: Callable[[Sequence[int]], Tensor] | None = None,
        padding: int = 0,
        **options: Any,
    ) -> None:
        self.proposer = DraftingProposer(model, lead, **options)
        self.context = Context(padding)
        kv = KVCache(400, 1, 1, 2, BLOCK_SIZE, torch.float32, draft_kv=model.kv_shape).draft_kv
        assert kv is not None
        self.context.kv = kv
        self.texts: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}
        self._features = features
        self._next_block = 1

    def admit(
        self, request: int, text: Sequence[int], temperature: float = 0.0, seed: int = 0, shared: Sequence[int] = ()
    ) -> None:
        """A request with room for its text and 64 tokens, its first blocks shared with another's."""
        self.texts[request], self.done[request] = list(text), len(shared) * BLOCK_SIZE
        self.place(request, shared)
        self.context.params[request] = temperature, seed
        self.proposer.start(RequestInfo(request, SamplingParams(), 0, list(text)))

    def place(self, request: int, shared: Sequence[int] = ()) -> None:
        """New blocks."""
        count = -(-(len(self.texts[request]) + 64) // BLOCK_SIZE) - len(shared)
        new = range(self._next_block, self._next_block + count)
        self._next_block += count
        self.context.tables[request] = [*shared, *reversed(new)]

    def compute(self, *ends: tuple[int, int]) -> None:
        """A step in which the target computes requests' texts up to some position each."""
        computed, features, row = [], [torch.zeros(1, 1)], 1  # the first row is somebody else's
        for request, end in ends:
            text, start = self.texts[request], self.done[request]
            count = end - start
            rows = range(row, row + count)
            next_token = text[end] if end < len(text) else None
            computed.append(Computed(request, start, text[start:end], next_token, rows))
            if self._features is not None:
                features.append(self._features(text)[start:end])
            row, self.done[request] = row + count, end
        with torch.inference_mode():
            told = None if self._features is None else torch.cat([part.to(features[-1]) for part in fit(features)])
            self.proposer.follow(computed, told, self.context)

    def propose(self, *wanted: tuple[int, int]) -> list[Drafts]:
        """Drafts behind the token that the target has not computed yet: (request, count) each."""
        asked = [
            Wanted(request, self.done[request] + 1, self.texts[request][self.done[request]], count)
            for request, count in wanted
        ]
        with torch.inference_mode():
            return self.proposer.propose(asked, self.context)

    def line(self, request: int, count: int) -> list[int]:
        """The drafts of one request."""
        [drafts] = self.propose((request, count))
        assert drafts.parents is None
        return drafts.tokens


def fit(features: list[Tensor]) -> list[Tensor]:
    """The row that is nobody's, as wide as the others."""
    return [features[0].expand(-1, features[-1].shape[1]), *features[1:]]


def feature_of(text: Sequence[int]) -> list[int]:
    """What the target of a `HashHead` makes of each token: it depends on all before it."""
    states = itertools.accumulate(text, lambda state, token: zlib.crc32(b"%d" % token, state), initial=0)
    return [state % 2**20 for state in states][1:]


def hash_features(text: Sequence[int]) -> Tensor:
    return torch.tensor([[float(feature)] for feature in feature_of(text)], dtype=torch.float64)


def hash_stand(lead: int = 1, **options: Any) -> Stand:
    return Stand(HashHead(lead), lead, hash_features if lead else None, **options)


def expect(stand: Stand, request: int, count: int, lead: int = 1) -> list[int]:
    """What a `HashHead` must draft now."""
    known = stand.texts[request][: stand.done[request] + 1]
    return expected_line(known, feature_of(known), count, lead)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("drafting"), "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that is not the target."""
    return load_model(save_checkpoint(tmp_path_factory.mktemp("other"), "llama", seed=8, num_hidden_layers=2))


# A draft model


def test_a_draft_model_that_is_the_target_drafts_its_greedy_tokens(folder: Path) -> None:
    prompts = [random_prompt(37, seed=1), random_prompt(5, seed=2)]
    reference = load_reference(folder)
    texts = [[*prompt, *reference_greedy(reference, prompt, 24)] for prompt in prompts]
    stand = Stand(DraftModel(load_model(folder), VOCAB), 0)
    for request, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        stand.admit(request, text)
        stand.compute((request, len(prompt)))
    for _ in range(4):
        drafts = stand.propose((0, 4), (1, 3))
        for request, count in ((0, 4), (1, 3)):
            first = stand.done[request] + 1
            assert drafts[request].tokens == texts[request][first : first + count]
        stand.compute((0, stand.done[0] + 5), (1, stand.done[1] + 4))  # all accepted


def test_with_the_same_noise_a_draft_model_that_is_the_target_draws_its_samples(folder: Path) -> None:
    model, params = load_model(folder), [(1.0, 5), (0.7, 5), (1.5, 6)]
    stand = Stand(DraftModel(model, VOCAB), 0)
    for request, (temperature, seed) in enumerate(params):
        text, sequence = random_prompt(20 + request, seed=request), Driver(model, 64)
        logits = sequence.feed(text)[-1:]
        for _ in range(8):
            text = [*text, *draw(logits, [(temperature, seed)], [len(text)])]
            logits = sequence.feed(text[-1:])
        stand.admit(request, text, temperature, seed)
        stand.compute((request, 20 + request))
    drafts = stand.propose((0, 7), (1, 7), (2, 7))
    assert [each.tokens for each in drafts] == [stand.texts[request][-7:] for request in range(3)]
    assert [row for row in stand.context.asked if row.request == 1][2] == Row(1, 24, tuple(stand.texts[1][22:24]))


@pytest.mark.parametrize("target_size", [VOCAB - 32, VOCAB, VOCAB + 32])
def test_a_draft_models_logits_are_as_wide_as_its_targets(other: Any, target_size: int) -> None:
    """Those of tokens that both have are its own, and it drafts no other."""
    hidden = torch.randn(3, other.config.layer.hidden_size, dtype=other.dtype)
    own, wide = other.logits(hidden), DraftModel(other, target_size).logits(hidden)
    shared = min(VOCAB, target_size)
    assert wide.shape == (3, target_size) and wide.is_contiguous()
    assert torch.equal(wide[:, :shared], own[:, :shared]) and (wide[:, shared:] == -torch.inf).all()


@pytest.mark.parametrize("chunk", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 200])
def test_a_draft_model_drafts_the_same_however_the_prompt_was_computed(other: Any, chunk: int) -> None:
    text = random_prompt(150, seed=4)
    stand = Stand(DraftModel(other, VOCAB), 0)
    stand.admit(0, text)
    for end in [*range(chunk, 140, chunk), 140]:
        stand.compute((0, end))
    assert stand.line(0, 5) == greedy(other, text[:141], 5)


def test_rejected_drafts_leave_no_trace(other: Any) -> None:
    text = random_prompt(60, seed=5)
    stand = Stand(DraftModel(other, VOCAB), 0)
    stand.admit(0, text)
    stand.compute((0, 30))
    for _ in range(5):
        assert stand.line(0, 4) == greedy(other, text[: stand.done[0] + 1], 4)
        stand.compute((0, stand.done[0] + 1))  # the text is not what is drafted
    stand.compute((0, stand.done[0] + 1))  # a step without drafts
    assert stand.line(0, 4) == greedy(other, text[: stand.done[0] + 1], 4)


def test_rows_of_accepted_drafts_are_not_computed_again_by_a_draft_model(other: Any) -> None:
    prompt = random_prompt(12, seed=6)
    right = greedy(other, prompt, 20)
    text = [*prompt, *right[:9], (right[9] + 1) % VOCAB, *random_prompt(20, seed=7)]
    stand = Stand(DraftModel(other, VOCAB), 0)
    stand.admit(0, text)
    stand.compute((0, 12))
    assert stand.line(0, 4) == right[1:5]
    assert stand.context.batches == [[13], [1], [1], [1]]  # the prompt and the last token, and three drafts
    stand.compute((0, 17))  # all four accepted, of which the last was never fed
    assert stand.line(0, 4) == right[6:10]
    assert stand.context.batches[4:] == [[2], [1], [1], [1]]
    stand.compute((0, 21))  # three accepted, and all of them were fed
    assert stand.line(0, 2) == greedy(other, text[:22], 2)
    assert stand.context.batches[8:] == [[1], [1]]


def test_a_request_that_is_never_drafted_costs_a_forward_pass_every_so_many_tokens() -> None:
    for lead in (0, 1):
        stand = hash_stand(lead)
        stand.admit(0, random_prompt(300))
        for end in range(1, 3 * CHUNK + lead + 2):
            stand.compute((0, end))
        assert stand.context.batches == [[CHUNK]] * 3
        assert stand.line(0, 3) == expect(stand, 0, 3, lead)
        assert stand.context.batches[3:] == [[2], [1], [1]]


# Heads


@pytest.mark.parametrize("chunk", [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 200])
def test_a_head_sees_the_features_of_each_position_and_the_token_behind_it(chunk: int) -> None:
    stand = hash_stand()
    stand.admit(0, random_prompt(220, seed=1))
    for end in [*range(chunk, 200, chunk), 200]:
        stand.compute((0, end))
    assert stand.line(0, 5) == expect(stand, 0, 5)


@pytest.mark.quick("0-1", "1-0", "2-0", "3-0")
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_depend_on_the_text_alone_whatever_happened_before(seed: int, lead: int) -> None:
    chosen = np.random.default_rng(seed)
    stand = hash_stand(lead, padding=seed % 2 * 3)
    for request in range(12):
        stand.admit(request, random_prompt(400, seed=100 * seed + request))
    for _ in range(25):
        going = [request for request in range(12) if stand.done[request] < 300 and chosen.random() < 0.7]
        for request in going:
            if chosen.random() < 0.05:  # preempted
                stand.done[request] = 0
                stand.place(request)
        wanted = [(r, int(chosen.integers(0, 6))) for r in going if stand.done[r] and chosen.random() < 0.5]
        for (request, count), drafts in zip(wanted, stand.propose(*wanted), strict=True):
            line = expect(stand, request, count, lead)
            assert drafts.tokens == line
            kept = int(chosen.integers(0, count + 1))  # so many are accepted, as the text has them from now on
            first = stand.done[request] + 1
            stand.texts[request][first : first + kept] = line[:kept]
            stand.done[request], before = stand.done[request] + 1 + kept, stand.done[request]
            ends = (request, stand.done[request])
            stand.done[request] = before
            stand.compute(ends)
        rest = [request for request in going if request not in dict(wanted)]
        stand.compute(*((request, stand.done[request] + int(chosen.choice([1, 3, 70]))) for request in rest))
        if chosen.random() < 0.2:  # one ends, and another comes
            stand.proposer.end(3)
            stand.admit(3, random_prompt(400, seed=int(chosen.integers(1000))))


@pytest.mark.parametrize("lead", [0, 1])
def test_a_failure_makes_nothing_but_the_drafts_of_its_requests_worse(lead: int) -> None:
    head = HashHead(lead)
    stand = Stand(head, lead, hash_features if lead else None)
    for request in range(2):
        stand.admit(request, random_prompt(400, seed=request))
        stand.compute((request, 40))
    for step in range(3):
        head.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            stand.compute((0, stand.done[0] + CHUNK + 1), (1, stand.done[1] + 1))
        with pytest.raises(RuntimeError, match="out of memory"):
            stand.propose((0, 3))
        head.fails = False
        stand.compute((0, stand.done[0] + 1), (1, stand.done[1] + 1))
        assert len(stand.line(0, 3)) == 3
        assert (stand.line(0, 3), stand.done[1]) == ([], 42 + 2 * step)
    assert stand.line(1, 3) == expect(stand, 1, 3, lead)
    stand.done[0] = 0  # preempted
    stand.compute((0, 100))
    assert stand.line(0, 3) == expect(stand, 0, 3, lead)


@pytest.mark.parametrize("lead", [0, 1])
def test_behind_a_cached_head_a_request_uses_what_lies_in_its_blocks(lead: int) -> None:
    stand = hash_stand(lead)
    text = random_prompt(200, seed=2)
    stand.admit(0, text)
    stand.compute((0, 150))
    stand.line(0, 1)
    shared = stand.context.tables[0][: 96 // BLOCK_SIZE]
    stand.admit(1, [*text[:97], *random_prompt(60, seed=3)], shared=shared)
    stand.context.batches.clear()
    stand.compute((1, 106))
    assert stand.line(1, 4) == expect(stand, 1, 4, lead)
    assert stand.context.batches[0] == [11 - lead]  # positions from 96 on


def test_a_preempted_request_that_goes_on_where_it_was_keeps_what_waits_for_it() -> None:
    stand = hash_stand()
    stand.admit(0, random_prompt(100, seed=2))
    stand.compute((0, 40))
    stand.proposer.start(RequestInfo(1, SamplingParams(), 0, [1]))
    stand.compute((0, 41))
    assert stand.line(0, 4) == expect(stand, 0, 4)


def test_features_are_not_kept_alive() -> None:
    stand = hash_stand()
    stand.admit(0, random_prompt(100, seed=2))
    features = hash_features(stand.texts[0][:90])
    alive = weakref.ref(features)
    stand.proposer.follow([Computed(0, 0, stand.texts[0][:90], None, range(90))], features, stand.context)
    del features
    assert alive() is None


def test_what_waits_for_ended_requests_takes_no_memory() -> None:
    stand, rooms = hash_stand(), set()
    for request in range(40 * CHUNK):
        stand.admit(request, random_prompt(50, seed=request))
        stand.compute((request, 20))
        assert stand.line(request, 2) == expect(stand, request, 2)
        stand.proposer.end(request)
        stand.proposer.end(request)
        rooms.add(len(stand.proposer._waiting._rows))
    assert len(rooms) == 1


def test_deepseeks_layer_behind_the_last_drafts_from_a_cache_of_its_own(tmp_path: Path) -> None:
    folder, _, _ = save_with_mtp(tmp_path)
    model = load_model(folder, mtp=True)
    assert model.mtp is not None
    text = random_prompt(60, seed=3)
    whole = Driver(model, 64)
    whole.caches = [KVCache(8, 4, 1, model.head_dim, BLOCK_SIZE, torch.float32, sides=1)]
    hidden: dict[str, Tensor] = {}

    def features(text: Sequence[int]) -> Tensor:
        if "target" not in hidden:
            context = Context()
            context.tables[0] = [1, 2, 3, 4, 5]
            hidden["target"] = model.forward([context.batch([0], [0], [text])], model.new_caches([8], BLOCK_SIZE))
        return hidden["target"]

    stand = Stand(model.mtp, 1, features)
    stand.admit(0, text)
    for end in (20, 21, 50):
        stand.compute((0, end))
    known = text[:51]
    with torch.inference_mode():
        fed, tokens, line = features(text)[:50], known[1:], []
        for _ in range(4):  # everything anew for each draft, as the model's own fourth layer
            context = Context()
            context.tables[0] = [7, 6, 5, 4]
            kv = KVCache(8, 4, 1, model.head_dim, BLOCK_SIZE, torch.float32, sides=1)
            out = model.mtp.forward(fed, context.batch([0], [0], [tokens]), kv)
            line.append(int(model.mtp.logits(out[-1:]).argmax()))
            fed, tokens = torch.cat([fed, out[-1:]]), [*tokens, line[-1]]
    assert stand.line(0, 4) == line


def test_a_model_without_a_layer_behind_the_last_is_refused(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "deepseek_v3"))
    config = EngineConfig(model=str(tmp_path), speculative_config={"method": "mtp"})
    with pytest.raises(ValueError, match="mtp=True"):
        make_speculation(SpeculativeConfig(method="mtp", num_speculative_tokens=1), model, tmp_path, config)


# What is asked for


@pytest.mark.parametrize("lead", [0, 1])
def test_requests_want_different_numbers_of_drafts(lead: int) -> None:
    stand = hash_stand(lead)
    counts = {0: 3, 1: 0, 2: 1, 3: 6}
    for request in counts:
        stand.admit(request, random_prompt(50, seed=request))
        stand.compute((request, 5 + request))
    stand.context.batches.clear()
    drafts = stand.propose(*counts.items())
    assert [each.tokens for each in drafts] == [expect(stand, *item, lead) for item in counts.items()]
    first = [5 + request + 1 - lead for request in (3, 0, 2)]  # those that want the most go on as the first rows
    assert stand.context.batches == [first, [1, 1], [1, 1], [1], [1], [1]]


def test_a_line_ends_where_no_token_is_left() -> None:
    stand = hash_stand()
    stand.context.ends_lines = True
    for request, length in ((0, 21), (1, 17), (2, 20)):
        stand.admit(request, random_prompt(50, seed=request))
        stand.compute((request, length))
    drafts = stand.propose((0, 9), (1, 9), (2, 9))  # from positions 22, 18 and 21 on
    assert [each.tokens for each in drafts] == [expect(stand, 0, 6), expect(stand, 1, 3), []]


def test_a_request_that_was_not_followed_has_no_drafts() -> None:
    stand = hash_stand()
    stand.admit(0, random_prompt(50))
    stand.done[0] = 20  # nobody has said so
    assert stand.propose((0, 3)) == [Drafts([])]
    stand.done[0] = 0
    assert stand.propose((0, 3)) == [Drafts([])]  # a head needs features
    assert stand.context.batches == []
    stand.compute((0, 20))
    assert stand.line(0, 3) == expect(stand, 0, 3)
    assert stand.line(0, 3) == []  # it was not told of the step
    stand.done[0] = 21
    assert stand.line(0, 3) == []
    stand.done[0] = 20
    stand.compute((0, 21))
    assert stand.line(0, 3) == expect(stand, 0, 3)


def test_a_draft_model_needs_only_one_token() -> None:
    stand = hash_stand(0)
    stand.admit(0, [5, 6, 7])
    assert stand.line(0, 3) == expected_line([5], [], 3, 0)


def test_distributions_are_what_drafts_were_drawn_from() -> None:
    stand = hash_stand(0, needs_distributions=True)
    stand.context.ends_lines = True
    for request, length in ((0, 22), (1, 25), (2, 27)):
        stand.admit(request, random_prompt(50, seed=request), temperature=0.5 + request, seed=1)
        stand.compute((request, length))
    drafts = stand.propose((0, 2), (1, 4), (2, 3))
    assert [len(each.tokens) for each in drafts] == [2, 2, 0]  # position 28 has none
    assert drafts[2].distributions is None
    for request, each in enumerate(drafts[:2]):
        known, expected = stand.texts[request][: stand.done[request] + 1], []
        for position, token in enumerate(each.tokens, len(known)):
            logits = logits_of(digest([(known_token, 0) for known_token in known]))[None]
            expected.append((logits[0] / (0.5 + request)).softmax(-1))
            assert draw(logits, [(0.5 + request, 1)], [position]) == [token]
            known = [*known, token]
        torch.testing.assert_close(each.distributions, torch.stack(expected))


def test_a_tree_that_needs_distributions_is_refused() -> None:
    with pytest.raises(ValueError, match="draft without a tree"):
        DraftingProposer(HashHead(), 1, TreeShape(2, 2), needs_distributions=True)
