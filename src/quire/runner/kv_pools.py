"""How the memory for KV is divided among the KV groups of a model, and what the pools then hold."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from quire.config import EngineConfig
from quire.core.kv_group import States, peak_blocks
from quire.models.model import Model
from quire.ops import KVShape
from quire.ops.recurrent import RecurrentShape
from quire.runner.proposer import Speculation

CACHED = 2
"""So many times what running requests use is the most that a window's pool has."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one KV group has.

    Attributes:
        window: how many positions it keeps of a request; None: all.
        num_layers: how many layers keep theirs in it.
        bytes_per_token: of them, and of what drafts where that lies in the same blocks.
        num_blocks: of its pool, the null block included.
        peak_blocks: most that one request of the longest context holds at once.
        recurrent: its blocks hold states, of `window` tokens less one; see `core.kv_group`.
        step_blocks: so many of these a step's tokens add, and they go when a window has passed them. Since a step's
            tokens are bounded, all requests together hold no more beyond what each keeps.
    """

    window: int | None
    num_layers: int
    bytes_per_token: int
    num_blocks: int
    peak_blocks: int
    step_blocks: int
    recurrent: bool = False

    @property
    def num_usable(self) -> int:
        """Blocks without the null block."""
        return self.num_blocks - 1

    def needed(self, requests: int, blocks: int) -> int:
        """Most blocks that so many requests, of so many blocks of tokens each, hold at once."""
        return min(requests * blocks, requests * (self.peak_blocks - self.step_blocks) + self.step_blocks)

    @property
    def longest_requests(self) -> float:
        """So many requests of the longest context fit at once."""
        return (self.num_usable - self.step_blocks) / (self.peak_blocks - self.step_blocks)


class Retention(NamedTuple):
    """What a KV group keeps of a request: see `KVGroup`."""

    window: int | None
    states: States | None = None


def retentions(config: EngineConfig, model: Model, speculation: Speculation | None) -> list[Retention]:
    """Of each group. What drafts may see all positions, and lies in the blocks of the first group."""
    spec, size = config.speculation, config.block_size
    shapes = model.kv_shapes(config.kv_cache_dtype, size)
    keys = sum(shape.bytes_per_token for shape in shapes if isinstance(shape, KVShape))
    kept = []
    for group, shape in zip(model.groups, shapes, strict=True):
        if isinstance(shape, RecurrentShape):  # where as many bytes of keys lie between states
            uncertain = 1 + spec.num_speculative_tokens if spec else 0
            kept.append(Retention(size + 1, States(-(-shape.bytes_per_token // keys), uncertain)))
        else:
            kept.append(Retention(group.window))
    if speculation is not None and speculation.kv_shape:
        kept[0] = Retention(None)
    return kept


class Pools:
    """The pools of an engine: how large each is, where the first one's size is given or the memory for all.

    A short request keeps as many blocks of each group, a long one fewer of those with windows (`kept`). No division
    suits both: the one of `shares` takes the same part from either of what pools made for it alone would give. What a
    step adds until its windows have passed it has room beside that, once. No pool but the first is larger than
    `max_num_seqs` requests can use, and as much again for what the prefix cache keeps of them: the rest is the first's.

    A recurrent layer's blocks are few and large, whatever the length of a request: there are as many as all requests
    hold, and one more of each for the prefix cache.

    Args:
        config: block size, and what bounds a chunk.
    """

    def __init__(self, config: EngineConfig, model: Model, speculation: Speculation | None) -> None:
        self.kept_of = retentions(config, model, speculation)
        self.draft_bytes = speculation.kv_shape.bytes_per_token if speculation and speculation.kv_shape else 0
        shapes = model.kv_shapes(config.kv_cache_dtype, config.block_size)
        self.token_bytes, self._layers = [shape.bytes_per_token for shape in shapes], [shape.layers for shape in shapes]
        self.token_bytes[0] += self.draft_bytes
        self.block_size, self._requests = config.block_size, config.max_num_seqs
        self._chunk = min(config.long_prefill_token_threshold or math.inf, config.max_num_batched_tokens)

    def peaks(self, tokens: int) -> list[int]:
        """Most blocks of each group that a request of so many tokens holds at once."""
        return self._blocks(tokens, int(min(self._chunk, tokens)))

    def kept(self, tokens: int) -> list[int]:
        """Most blocks of each group that such a request holds when its steps are of one token."""
        return self._blocks(tokens, 1)

    def _blocks(self, tokens: int, chunk: int) -> list[int]:
        return [peak_blocks(window, tokens, chunk, self.block_size, states) for window, states in self.kept_of]

    def requests_within(self, size: int) -> int:
        """Of `max_num_seqs`, how many requests' states take no more than half of so many bytes; one at least."""
        bytes_of_states = sum(own for own, kept in zip(self.token_bytes, self.kept_of, strict=True) if kept.states)
        fitting = bisect_right(
            range(1, self._requests + 1),
            size // 2,
            key=lambda count: self.block_size * bytes_of_states * self._state_blocks(count),
        )
        return max(1, fitting)

    def _state_blocks(self, requests: int) -> int:
        """Of a pool of states, for so many requests."""
        return max(
            ((kept.states.tail(self.block_size) + 1) * requests + 2 for kept in self.kept_of if kept.states), default=0
        )

    def shares(self, tokens: int) -> list[Fraction]:
        """Blocks of each pool to those of the first one, where the longest context has so many tokens.

        With a group's bytes B a token, p what it keeps to what the first group does, and the smallest share r, short
        requests get r * sum(B) / sum(share * B) of what pools in equal shares would give them, and longest ones
        sum(p * B) / sum(share * B) of what pools in shares p would. Both are the same for r = sum(p * B) / sum(B); a
        group of which the longest need more has so much more.
        """
        kept = [0 if kept.states else own for own, kept in zip(self.kept(tokens), self.kept_of, strict=True)]
        parts = [Fraction(own, kept[0]) for own in kept]
        weighted = sum(part * size for part, size in zip(parts, self.token_bytes, strict=True))
        dense = [size for size, kept in zip(self.token_bytes, self.kept_of, strict=True) if not kept.states]
        least = Fraction(weighted) / sum(dense)
        return [max(part, least) for part in parts]

    def of_first(self, num_blocks: int, tokens: int) -> list[int]:
        """Blocks of each pool, null blocks included, where the first one has `num_blocks`."""
        sizes = [max(num_blocks - 1, -1)]
        columns = self.kept_of, self.shares(tokens), self.kept(tokens), self.peaks(tokens)
        for (_, states), share, kept, peak in list(zip(*columns, strict=True))[1:]:
            if states is not None:
                sizes.append(min(sizes[0], self._state_blocks(self._requests)))
                continue
            shared = min(math.ceil(share * sizes[0]), CACHED * self._requests * kept)
            sizes.append(min(sizes[-1], shared + peak - kept))  # who keeps less needs no more
        return [size + 1 for size in sizes]

    def within(self, size: int, tokens: int) -> list[int]:
        """The most blocks of each pool that so many bytes hold."""
        counts = range(size // (self.token_bytes[0] * self.block_size) + 1)
        fitting = bisect_right(counts, size, key=lambda count: self.bytes(self.of_first(count, tokens)))
        return self.of_first(fitting - 1, tokens)

    def bytes(self, num_blocks: Sequence[int]) -> int:
        """That pools of such sizes take."""
        return self.block_size * sum(count * own for count, own in zip(num_blocks, self.token_bytes, strict=True))

    def hold(self, num_blocks: Sequence[int], tokens: int) -> bool:
        """Whether pools of such sizes have room for a request of so many tokens."""
        return all(count > peak for count, peak in zip(num_blocks, self.peaks(tokens), strict=True))

    def plans(self, num_blocks: Sequence[int], tokens: int) -> tuple[GroupPlan, ...]:
        """What each group has, where the longest context has so many tokens."""
        peaks, kept = self.peaks(tokens), self.kept(tokens)
        steps = [peak - own for peak, own in zip(peaks, kept, strict=True)]
        windows, recurrent = zip(*((window, states is not None) for window, states in self.kept_of), strict=True)
        columns = windows, self._layers, self.token_bytes, num_blocks, peaks, steps, recurrent
        return tuple(GroupPlan(*row) for row in zip(*columns, strict=True))


def longest_held(pools: Pools, sizes: Callable[[int], list[int]], longest: int) -> int:
    """The longest context, of `longest` tokens at most, of which the pools of these sizes hold one, in whole blocks.

    Args:
        sizes: of the pools, made for a longest context of so many tokens.
    """
    if pools.hold(sizes(longest), longest):
        return longest
    size = pools.block_size
    blocks = range(1, longest // size + 1)
    return size * bisect_left(blocks, True, key=lambda count: not pools.hold(sizes(count * size), count * size))
