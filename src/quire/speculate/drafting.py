"""Drafts computed by a second, smaller model: a draft model, an EAGLE head, or DeepSeek's MTP layer.

Such a model has its own KV for the same tokens, so it must process every token before it can predict the next one.
It is given what the target computed (`follow`), and catches up: at once for requests that need drafts, and for the
others when enough tokens are waiting (`CHUNK`), so that they cost little, and cached blocks contain its KV too.

A draft model's row at position p takes the token there, and predicts the next. A head's row at p takes the target's
hidden state of that position and the token *after* it, and predicts the one after that: it *leads* by one token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.step import RequestInfo
from quire.errors import ConfigError
from quire.models.model import Model
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.ops.kv_cache import on_device
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Computed, DraftingModel, Drafts, Row, Wanted
from quire.speculate.tree import GrowingTree, TreeShape

CHUNK = 16
"""Rows that a request may lag before it catches up although it needs no drafts. Those that lag half as far join it."""


NOTHING = torch.empty(0, 0)
"""A draft model's input besides tokens."""


class DraftModel:
    """A whole model that drafts, from tokens only.

    Args:
        model: loaded with `one_kv_group`: its KV is in the blocks of one of the target's groups.
        vocab_size: the target's. Extra rows in either vocabulary are padding.
    """

    def __init__(self, model: Model, vocab_size: int) -> None:
        shapes = {dataclasses.replace(shape, layers=1) for shape in model.kv_shapes() if isinstance(shape, KVShape)}
        if len(shapes) > 1:
            raise ConfigError(
                "speculative_config: the draft model's layers have keys and values of unlike shapes, which cannot "
                "lie in the blocks of one group; choose another model"
            )
        self._model = model
        self._more = vocab_size - model.vocab_size  # extra rows of the target
        self.kv_shape = model.kv_shape()

    def fuse(self, features: Tensor) -> Tensor:
        """See `DraftingModel`; not used."""
        return features

    def forward(self, hidden: Tensor, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """See `DraftingModel`."""
        if self._more > 0:  # the target may sample from its padding
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
        end: number of tokens that the target has computed.
        followed: the drafting model's rows before this position are valid.
        tokens: input of its rows from there on, as far as known.
        fed: drafts that a draft model has processed at positions from `followed` on.
    """

    end: int = 0
    followed: int = 0
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)

    def known(self, lead: int) -> int:
        """Position of the first token that is not the input of any row, computed or waiting."""
        return self.followed + lead + len(self.tokens)


class DraftingProposer:
    """Drafts with a model: a chain of tokens, or a tree.

    After a cached prefix, the prefix's blocks contain the KV stored by the request that computed it.

    Args:
        model: the drafting model.
        lead: 0 for a draft model, 1 for a head; see the module's docstring.
        tree: shape of a tree; None for a chain.
        needs_distributions: whether drafts come with the distributions they were drawn from.

    Raises:
        ValueError: a tree with distributions.
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
        """See `Proposer`. Drafts are worse after the cached prefix of a request that was not followed."""
        self._requests[info.request] = _Request()

    def end(self, request: int) -> None:
        """See `Proposer`; unknown requests are ignored."""
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
                if hidden is not None and context.passes is not None:
                    hidden = hidden.clone()  # which `context.rows` may overwrite: see `Graphs`
                parts = [part for i in full for part in self._parts(computed[i], waiting[i], hidden)]
                self._catch_up([computed[i].request for i in full], parts, context)
        finally:  # even after a failure the next step continues from here
            if hidden is not None:
                self._keep(computed, hidden)

    def _take(self, computed: Computed) -> int:
        """Append a request's new tokens; returns the number of its rows that were already waiting."""
        state = self._requests[computed.request]
        if computed.start != state.end:  # preempted, or admitted after a cached prefix
            state.followed = state.end = computed.start
            state.tokens, state.fed = [], []
        waiting = state.end - state.followed
        tokens = computed.tokens[state.known(self._lead) - computed.start :]
        right = _common(tokens, state.fed)  # accepted drafts: their rows are computed
        state.followed += right
        state.tokens += tokens[right:]
        state.fed = []
        state.end += len(computed.tokens)
        return waiting

    def _parts(self, computed: Computed, waiting: int, hidden: Tensor | None) -> list[Tensor]:
        """A head's input for all rows whose tokens are known: waiting ones, and those just computed."""
        if hidden is None:  # a draft model
            return []
        new = _pick(hidden, computed.rows[: len(self._requests[computed.request].tokens) - waiting])
        return [self._waiting.first({computed.request: waiting}), new] if waiting else [new]

    def _keep(self, computed: Sequence[Computed], hidden: Tensor) -> None:
        """Store the input of future rows: the token of a head's last row is never known yet."""
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
        """See `Proposer`. A request gets no drafts unless all its tokens were followed."""
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
            out = _first(out, len(asked))
            made = self._lines(asked, out, context) if tree is None else self._trees(tree, asked, out, context)
            found = {each.request: drafts for each, drafts in zip(asked, made, strict=True)}
        return [found.get(each.request) or Drafts([]) for each in wanted]

    def _has_all_before(self, wanted: Wanted) -> bool:
        state, last = self._requests[wanted.request], wanted.position - 1
        return state.end == last and state.known(self._lead) == last

    def _catch_up(self, requests: Sequence[int], hidden: Sequence[Tensor], context: DraftContext) -> Tensor:
        """Compute all rows of some requests whose tokens are known. A failure is not retried.

        Args:
            hidden: a head's input for them, in parts; empty for a draft model.

        Returns the output of each request's last row, [at least requests, hidden].
        """
        states = [self._requests[request] for request in requests]
        starts, tokens = [state.followed for state in states], [state.tokens for state in states]
        for state in states:
            state.followed += len(state.tokens)
            state.tokens = []
        fed = torch.cat(list(hidden)) if hidden else None
        if context.passes is not None:
            return context.rows(NOTHING if fed is None else fed, requests, starts, tokens)
        out = self._forward(fed, context.batch(requests, starts, tokens), context.kv)
        return _pick(out, [end - 1 for end in itertools.accumulate(map(len, tokens))])

    def _forward(self, hidden: Tensor | None, batch: RaggedBatch, kv: KVCache) -> Tensor:
        """The model's `forward`; a batch may have padding after the rows of `hidden`."""
        if hidden is None:
            return self._model.forward(NOTHING, batch, kv)
        padding = len(batch.token_ids) - len(hidden)
        return self._model.forward(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden, batch, kv)

    def _lines(self, asked: Sequence[Wanted], out: Tensor, context: DraftContext) -> list[Drafts]:
        """Chains of drafts, from `out` [requests, hidden] of the last known rows."""
        lines = self._recorded_lines(asked, out, context)
        drawn_from: list[Tensor] = []  # per draft: [requests that want it, vocabulary]
        if lines is None:
            lines = self._drawn_lines(asked, out, context, drawn_from)
        if not self._lead:  # a head computes these rows again, from the target's hidden states
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

    def _recorded_lines(self, asked: Sequence[Wanted], out: Tensor, context: DraftContext) -> list[list[int]] | None:
        """Chains of drafts that nobody waits for before the last one; None if they must be drawn one by one."""
        if context.passes is None or self._needs_distributions:
            return None
        requests, counts = [each.request for each in asked], [each.count for each in asked]
        drawn = context.chains(out, requests, counts, [each.position for each in asked])
        if drawn is None:
            return None
        return [_before_none(line[:count]) for line, count in zip(drawn.tolist(), counts, strict=True)]

    def _drawn_lines(
        self, asked: Sequence[Wanted], out: Tensor, context: DraftContext, drawn_from: list[Tensor]
    ) -> list[list[int]]:
        """The same, one draft after the other; `drawn_from` gets the distributions, if they are needed."""
        line = context.line(asked, self._lead)
        while True:
            logits = self._model.logits(out)
            if self._needs_distributions:
                drawn_from.append(context.distributions(logits.clone(), line.rows))
            going = line.draw(logits)
            if not going:
                return line.drafts()
            if context.passes is not None:
                out = line.recorded(_first(out, going))
            else:
                out = _first(self._forward(_first(out, going), line.batch(), context.kv), going)

    def _trees(self, shape: TreeShape, asked: Sequence[Wanted], out: Tensor, context: DraftContext) -> list[Drafts]:
        """Trees of drafts; those of all requests grow together, a layer at a time."""
        trees = [GrowingTree(each.count, shape) for each in asked]
        expanded = [(i, 0) for i in range(len(asked))]  # tree and node of each row of `out`
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
                # A head's root is the row before the last known token, which is its input.
                branches = [
                    trees[i].branch(asked[i].request, asked[i].position - 1 - self._lead, nodes) for i, nodes in grown
                ]
                above = _pick(out, [row_of[i, trees[i].parent(node)] for i, node in expanded])
                if context.passes is not None:
                    out = context.nodes(above, branches)[: len(expanded)]
                else:
                    out = self._forward(above, context.tree_batch(branches), context.kv)[: len(expanded)]
        return [tree.drafts() for tree in trees]


class _Waiting:
    """A head's input for rows that are not computed yet: `CHUNK` of each request, or a few more."""

    def __init__(self) -> None:
        self._rows = torch.empty(0, 0)  # [places, hidden]
        self._used = 0
        self._places: dict[int, list[int]] = {}  # by request

    def first(self, counts: Mapping[int, int]) -> Tensor:
        """[rows, hidden], the first `counts` rows of each request."""
        return _pick(self._rows, [place for request, n in counts.items() for place in self._places[request][:n]])

    def keep(self, counts: Mapping[int, int], hidden: Tensor) -> None:
        """Append `counts` new rows to each request; hidden [rows, hidden] has them request by request."""
        if self._used + len(hidden) > len(self._rows):
            self._make_room(hidden)
        first, self._used = self._used, self._used + len(hidden)
        self._rows[first : self._used] = hidden
        for request, count in counts.items():
            self._places.setdefault(request, []).extend(range(first, first + count))
            first += count

    def drop(self, request: int, left: int = 0) -> None:
        """Drop a request's first rows, so that `left` remain."""
        places = self._places.get(request)
        if places:
            del places[: len(places) - left]
        if not left:
            self._places.pop(request, None)

    def _make_room(self, new: Tensor) -> None:
        """Make room for the new rows: move the waiting ones to the front of a buffer with room for as many again."""
        held = [place for places in self._places.values() for place in places]
        rows = new.new_empty(2 * (len(held) + len(new)) + 8 * CHUNK, new.shape[1])
        if held:
            rows[: len(held)] = _pick(self._rows, held)
        self._rows, self._used = rows, 0
        for places in self._places.values():
            places[:] = range(self._used, self._used + len(places))
            self._used += len(places)


def _before_none(line: list[int]) -> list[int]:
    """The drafts up to one where all tokens were masked."""
    return line[: line.index(-1)] if -1 in line else line


def _first(x: Tensor, count: int) -> Tensor:
    return x if len(x) == count else x[:count]


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of x; a view if they are consecutive."""
    first, count = rows[0] if rows else 0, len(rows)
    if list(rows) == list(range(first, first + count)):
        return x[first : first + count]
    return x.index_select(0, on_device(rows, x.device))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
