"""Drafts that a second, smaller model computes: a whole one, an EAGLE head, or DeepSeek's layer after the last.

Such a model has KV of its own for the same tokens, so it must have seen every token before it can guess the next one.
What the target computes it is told (`follow`), and it catches up: for the requests that are to be drafted at once, and
for the others as soon as there is enough of it (`CHUNK`), so that they cost little, and cached blocks hold its KV too.

A draft model's row at position p takes the token there, and predicts the next. A head's row at p takes what the target
made of that position and the token *after* it, and predicts the one after that: it *leads* by one token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.step import RequestInfo
from quire.errors import ConfigError
from quire.models.model import Model
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.runner.draft_context import DraftContext
from quire.runner.proposer import Computed, Drafts, Row, Wanted
from quire.speculate.tree import GrowingTree, TreeShape

CHUNK = 16
"""Rows that a request may lag behind before it catches up without being drafted. Those that lag half as far join it."""


NOTHING = torch.empty(0, 0)
"""What a draft model is fed beside tokens."""


class DraftingModel(Protocol):
    """What drafts are computed with; EAGLE's heads and `Model.mtp` are such, and `DraftModel` makes a whole model so.

    Attributes:
        kv_shape: of a token's KV.
    """

    kv_shape: KVShape

    def fuse(self, features: Tensor) -> Tensor:
        """From the target's features [rows, width] to what a row is fed as `hidden`."""
        ...

    def forward(self, hidden: Tensor, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """One step: [tokens, hidden], which `logits` takes, and which a drafted row after it is fed as `hidden`."""
        ...

    def logits(self, out: Tensor) -> Tensor:
        """From rows of what `forward` made to [rows, vocabulary of the target] fp32."""
        ...


class DraftModel:
    """A whole model that drafts: it needs the tokens alone.

    Args:
        model: loaded with `one_kv_group`: its KV lies in the blocks of one of the target's groups.
        vocab_size: the target's. Rows that one of both vocabularies has more than the other are padding.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        shapes = {dataclasses.replace(shape, layers=1) for shape in model.kv_shapes() if isinstance(shape, KVShape)}
        if len(shapes) > 1:
            raise ConfigError(
                "speculative_config: the draft model's layers have keys and values of unlike shapes, which cannot "
                "lie in the blocks of one group; choose another model"
            )
        self._model = model
        self._more = vocab_size - model.vocab_size  # rows that the target has more
        self.kv_shape = model.kv_shape()

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftingModel`; nothing asks for it."""
        return features

    def forward(self, hidden: Tensor, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """See `DraftingModel`."""
        if self._more > 0:  # a target may sample its padding
            batch = dataclasses.replace(batch, token_ids=batch.token_ids.clamp(max=self._model.vocab_size - 1))
        return self._model.forward([batch], [kv])

    def logits(self, out: Tensor) -> Tensor:
        """See `DraftingModel`."""
        logits = self._model.logits(out)
        return F.pad(logits, (0, self._more), value=float("-inf")) if self._more else logits


@dataclass(slots=True)
class _Request:
    """How far a request has been followed.

    Attributes:
        end: tokens that the target has computed.
        followed: the drafting model's rows before this position are right.
        tokens: what its rows from there on take, as far as that is known.
        fed: drafts that a draft model was fed at positions from `followed` on.
    """

    end: int = 0
    followed: int = 0
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)

    def known(self, lead: int) -> int:
        """Position of the first token that no row has taken, or waits with."""
        return self.followed + lead + len(self.tokens)


class DraftingProposer:
    """Drafts with a model: one token after the other, or a tree.

    Where a request begins after a cached prefix, that prefix's blocks hold what another request stored there when it
    computed it.

    Args:
        model: what drafts.
        lead: 0 for a draft model, 1 for a head; see the head of this file.
        tree: how drafts branch; None: each continues the one before.
        needs_distributions: whether drafts come with what they were drawn from.

    Raises:
        ValueError: a tree where distributions are needed.
    """

    def __init__(
        self, model: DraftingModel, lead: int, tree: TreeShape | None = None, needs_distributions: bool = False
    ) -> None:
        if tree is not None and needs_distributions:
            raise ValueError("a tree's drafts have no distributions; draft without a tree")
        self._needs_distributions = needs_distributions
        self._model, self._lead, self._tree = model, lead, tree
        self._requests: dict[int, _Request] = {}
        self._waiting = _Waiting()

    def start(self, info: RequestInfo) -> None:
        """See `Proposer`. Drafts after the cached prefix of one that was not followed are worse."""
        self._requests[info.request] = _Request()

    def end(self, request: int) -> None:
        """See `Proposer`; one that is not known is ignored."""
        self._requests.pop(request, None)
        self._waiting.drop(request)

    # -- following -----------------------------------------------------------------------------------------

    def follow(self, computed: Sequence[Computed], features: Tensor, context: DraftContext) -> None:
        """See `Proposer`."""
        hidden = self._model.fuse(features) if self._lead and computed else None
        waiting = [self._take(each) for each in computed]
        lags = [len(self._requests[each.request].tokens) for each in computed]
        full = [i for i, lag in enumerate(lags) if lag >= CHUNK // 2] if max(lags, default=0) >= CHUNK else []
        try:
            if full:
                parts = [part for i in full for part in self._parts(computed[i], waiting[i], hidden)]
                self._catch_up([computed[i].request for i in full], parts, context)
        finally:  # whatever may have failed, the next step goes on from here
            if hidden is not None:
                self._keep(computed, hidden)

    def _take(self, computed: Computed) -> int:
        """Takes in a request's new tokens; returns how many rows of its features were waiting before."""
        state = self._requests[computed.request]
        if computed.start != state.end:  # preempted, or admitted after a cached prefix
            state.followed = state.end = computed.start
            state.tokens, state.fed = [], []
        waiting = state.end - state.followed
        tokens = computed.tokens[state.known(self._lead) - computed.start :]
        right = _common(tokens, state.fed)  # accepted drafts: their rows are there
        state.followed += right
        state.tokens += tokens[right:]
        state.fed = []
        state.end += len(computed.tokens)
        return waiting

    def _parts(self, computed: Computed, waiting: int, hidden: Tensor | None) -> list[Tensor]:
        """What a head is fed for all rows whose tokens are known: those that waited, and those just computed."""
        if hidden is None:  # a draft model
            return []
        new = _pick(hidden, computed.rows[: len(self._requests[computed.request].tokens) - waiting])
        return [self._waiting.first({computed.request: waiting}), new] if waiting else [new]

    def _keep(self, computed: Sequence[Computed], hidden: Tensor) -> None:
        """What rows to come are fed waits for them: of a head's last one the token is never known."""
        rows: list[int] = []
        counts = {}
        for each in computed:
            state = self._requests[each.request]
            new = each.rows[max(state.followed, each.start) - each.start :]
            self._waiting.drop(each.request, state.end - state.followed - len(new))
            counts[each.request] = len(new)
            rows += new
        self._waiting.keep(counts, hidden if len(rows) == len(hidden) else _pick(hidden, rows))

    # -- drafting ------------------------------------------------------------------------------------------

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        """See `Proposer`. A request whose tokens it has not seen all has no drafts."""
        asked = [each for each in wanted if each.count > 0 and self._has_all_before(each)]
        asked.sort(key=lambda each: -each.count)
        found: dict[int, Drafts] = {}
        if asked:
            counts = {}
            for each in asked:
                tokens = self._requests[each.request].tokens
                tokens.append(each.token)
                counts[each.request] = len(tokens)
            hidden = [self._waiting.first(counts)] if self._lead else []
            out = self._catch_up(list(counts), hidden, context)
            tree = self._tree
            made = self._lines(asked, out, context) if tree is None else self._trees(tree, asked, out, context)
            found = {each.request: drafts for each, drafts in zip(asked, made, strict=True)}
        return [found.get(each.request) or Drafts([]) for each in wanted]

    def _has_all_before(self, wanted: Wanted) -> bool:
        state, last = self._requests[wanted.request], wanted.position - 1
        return state.end == last and state.known(self._lead) == last

    def _catch_up(self, requests: Sequence[int], hidden: Sequence[Tensor], context: DraftContext) -> Tensor:
        """Computes all rows of some requests whose tokens are known. If that fails, it is not tried again.

        Args:
            hidden: what a head is fed for them, in parts; none for a draft model.

        Returns what the model made of each request's last row, [requests, hidden].
        """
        states = [self._requests[request] for request in requests]
        starts, tokens = [state.followed for state in states], [state.tokens for state in states]
        for state in states:
            state.followed += len(state.tokens)
            state.tokens = []
        batch = context.batch(requests, starts, tokens)
        out = self._forward(torch.cat(list(hidden)) if hidden else None, batch, context.kv)
        return _pick(out, [end - 1 for end in itertools.accumulate(map(len, tokens))])

    def _forward(self, hidden: Tensor | None, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """The model's; a batch may have rows of padding after those of `hidden`."""
        if hidden is None:
            return self._model.forward(NOTHING, batch, kv)
        padding = len(batch.token_ids) - len(hidden)
        return self._model.forward(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden, batch, kv)

    def _lines(self, asked: Sequence[Wanted], out: Tensor, context: DraftContext) -> list[Drafts]:
        """Drafts one after the other, from `out` [requests, hidden] of their last known rows."""
        line = context.line(asked, self._lead)
        drawn_from: list[Tensor] = []  # a draft each: [requests that want it, vocabulary]
        while True:
            logits = self._model.logits(out)
            if self._needs_distributions:
                drawn_from.append(context.distributions(logits.clone(), line.rows))
            going = line.draw(logits)
            if not going:
                break
            out = _first(self._forward(_first(out, going), line.batch(), context.kv), going)
        lines = line.drafts()
        if not self._lead:  # a head computes these rows again, from what the target makes of them
            for each, tokens in zip(asked, lines, strict=True):
                self._requests[each.request].fed = tokens[: each.count - 1]
        if not self._needs_distributions:
            return [Drafts(tokens) for tokens in lines]
        return [
            Drafts(tokens, distributions=torch.stack([rows[i] for rows in drawn_from[: len(tokens)]]))
            if tokens
            else Drafts([])
            for i, tokens in enumerate(lines)
        ]

    def _trees(self, shape: TreeShape, asked: Sequence[Wanted], out: Tensor, context: DraftContext) -> list[Drafts]:
        """Drafts that branch; the trees of all requests grow together, a layer at a time."""
        trees = [GrowingTree(each.count, shape) for each in asked]
        expanded = [(i, 0) for i in range(len(asked))]  # which tree, and which node of it, each row of `out` is
        while expanded:
            rows = []
            for i, node in expanded:
                ahead = trees[i].tokens(node)
                rows.append(Row(asked[i].request, asked[i].position + len(ahead), ahead))
            tokens, confidences = context.candidates(self._model.logits(out), rows, shape.width)
            for (i, node), *candidates in zip(expanded, tokens.tolist(), confidences.tolist(), strict=True):
                trees[i].add(node, *candidates)
            grown = [(i, nodes) for i, tree in enumerate(trees) if (nodes := tree.grow())]
            row_of = {node: row for row, node in enumerate(expanded)}
            expanded = [(i, node) for i, nodes in grown for node in nodes]
            if expanded:
                # A head's root is the row before the last known token, which it takes.
                batch = context.tree_batch(
                    [trees[i].branch(asked[i].request, asked[i].position - 1 - self._lead, nodes) for i, nodes in grown]
                )
                parents = [row_of[i, trees[i].parent(node)] for i, node in expanded]
                out = self._forward(_pick(out, parents), batch, context.kv)[: len(expanded)]
        return [tree.drafts() for tree in trees]


class _Waiting:
    """What heads are fed for rows that are not computed yet: of each request `CHUNK` of them, or a few more."""

    def __init__(self) -> None:
        self._rows = torch.empty(0, 0)  # [places, hidden]
        self._used = 0
        self._places: dict[int, list[int]] = {}  # by request

    def first(self, counts: Mapping[int, int]) -> Tensor:
        """[rows, hidden], so many of the first ones of each request."""
        return _pick(self._rows, [place for request, n in counts.items() for place in self._places[request][:n]])

    def keep(self, counts: Mapping[int, int], hidden: Tensor) -> None:
        """So many new rows of each request, one request's after another's: hidden [rows, hidden]."""
        if self._used + len(hidden) > len(self._rows):
            self._make_room(hidden)
        first, self._used = self._used, self._used + len(hidden)
        self._rows[first : self._used] = hidden
        for request, count in counts.items():
            self._places.setdefault(request, []).extend(range(first, first + count))
            first += count

    def drop(self, request: int, left: int = 0) -> None:
        """A request's first rows: so many are left."""
        places = self._places.get(request)
        if places:
            del places[: len(places) - left]
        if not left:
            self._places.pop(request, None)

    def _make_room(self, new: Tensor) -> None:
        """For rows like the new ones: those that wait move to the front, where there is room for as many again."""
        held = [place for places in self._places.values() for place in places]
        rows = new.new_empty(2 * (len(held) + len(new)) + 8 * CHUNK, new.shape[1])
        if held:
            rows[: len(held)] = _pick(self._rows, held)
        self._rows, self._used = rows, 0
        for places in self._places.values():
            places[:] = range(self._used, self._used + len(places))
            self._used += len(places)


def _first(x: Tensor, count: int) -> Tensor:
    return x if len(x) == count else x[:count]


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of x; where they follow one another, as a view."""
    first, count = rows[0] if rows else 0, len(rows)
    if list(rows) == list(range(first, first + count)):
        return x[first : first + count]
    return x.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x.device))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of their common head."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
