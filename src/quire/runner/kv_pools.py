"""Divides the memory for KV among the KV groups of a model."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.config import EngineConfig
from quire.core.kv_group import Retention, States
from quire.models.model import Model
from quire.ops import KVShape
from quire.ops.recurrent import RecurrentShape
from quire.runner.proposer import Speculation

CACHED = 2
"""Largest size of a windowed group's pool, as a multiple of what running requests use."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The pool of one KV group.

    Attributes:
        window: number of positions that it keeps of a request; None for all.
        num_layers: number of its layers.
        bytes_per_token: size of its KV, including a draft model's in the same blocks.
        num_blocks: size of its pool, including the null block.
        peak_blocks: most blocks that one request of the longest context holds at once.
        recurrent: its blocks hold recurrent states, see `core.kv_group`.
        step_blocks: the part of `peak_blocks` that a step's tokens need until their window has passed. Since a step's
            tokens are limited, all requests together need no more than this in addition to what each keeps.
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
        """Number of blocks without the null block."""
        return self.num_blocks - 1

    def needed(self, requests: int, blocks: int) -> int:
        """Most blocks that this many requests, each of this many blocks of tokens, hold at once."""
        return min(requests * blocks, requests * (self.peak_blocks - self.step_blocks) + self.step_blocks)

    @property
    def longest_requests(self) -> float:
        """Number of requests of the longest context that fit at once."""
        return (self.num_usable - self.step_blocks) / (self.peak_blocks - self.step_blocks)


def retentions(config: EngineConfig, model: Model, speculation: Speculation | None) -> list[Retention]:
    """Each group's retention. A draft model's KV is in the first group's blocks, and may need all positions."""
    spec, size = config.speculation, config.block_size
    shapes = model.kv_shapes(config.kv_cache_dtype, size)
    keys = sum(shape.bytes_per_token for shape in shapes if isinstance(shape, KVShape))
    kept = []
    for group, shape in zip(model.groups, shapes, strict=True):
        if isinstance(shape, RecurrentShape):  # a state is kept after KV of the same size
            uncertain = 1 + spec.num_speculative_tokens if spec else 0
            kept.append(Retention(size + 1, States(-(-shape.bytes_per_token // keys), uncertain)))
        else:
            kept.append(Retention(group.window))
    if speculation is not None and speculation.kv_shape:
        kept[0] = Retention()
    return kept


class Pools:
    """The sizes of an engine's pools, given the first one's size or the memory for all.

    A short request keeps the same number of blocks in every group; a long one keeps fewer in groups with a window
    (`kept`). No division is optimal for both: with that of `shares`, both lose the same fraction compared with pools
    made for them alone. The blocks that a step needs until its windows have passed are added once. Every pool but the
    first is limited to what `max_num_seqs` requests can use, and as much again for the prefix cache; the first one gets
    the rest.

    Recurrent layers have few, large blocks, whatever the length of a request: as many as all requests hold, and one
    more per request for the prefix cache.

    Args:
        config: has the block size, and the limits of a chunk.
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
        """Most blocks of each group that a request of this many tokens holds at once."""
        return self._blocks(tokens, int(min(self._chunk, tokens)))

    def kept(self, tokens: int) -> list[int]:
        """The same while it decodes, with one token per step."""
        return self._blocks(tokens, 1)

    def _blocks(self, tokens: int, chunk: int) -> list[int]:
        return [kept.peak_blocks(tokens, chunk, self.block_size) for kept in self.kept_of]

    def requests_within(self, size: int) -> int:
        """Number of requests, 1 to `max_num_seqs`, whose states take no more than half of `size` bytes."""
        bytes_of_states = sum(own for own, kept in zip(self.token_bytes, self.kept_of, strict=True) if kept.states)
        fitting = bisect_right(
            range(1, self._requests + 1),
            size // 2,
            key=lambda count: self.block_size * bytes_of_states * self._state_blocks(count),
        )
        return max(1, fitting)

    def _state_blocks(self, requests: int) -> int:
        """Number of blocks in a pool of states for this many requests."""
        return max(
            ((kept.states.tail(self.block_size) + 1) * requests + 2 for kept in self.kept_of if kept.states), default=0
        )

    def shares(self, tokens: int) -> list[Fraction]:
        """The size of each pool relative to the first one, in blocks, for a longest context of this many tokens.

        Let B be a group's bytes per token, p its kept blocks relative to the first group's, and r the smallest share.
        Short requests get r * sum(B) / sum(share * B) of what equal shares would give them, and longest requests
        sum(p * B) / sum(share * B) of what shares p would. Both are equal for r = sum(p * B) / sum(B). Groups with a
        larger p get that.
        """
        kept = [0 if kept.states else own for own, kept in zip(self.kept(tokens), self.kept_of, strict=True)]
        parts = [Fraction(own, kept[0]) for own in kept]
        weighted = sum(part * size for part, size in zip(parts, self.token_bytes, strict=True))
        dense = [size for size, kept in zip(self.token_bytes, self.kept_of, strict=True) if not kept.states]
        least = Fraction(weighted) / sum(dense)
        return [max(part, least) for part in parts]

    def of_first(self, num_blocks: int, tokens: int) -> list[int]:
        """Size of each pool, including null blocks, if the first one has `num_blocks`."""
        sizes = [max(num_blocks - 1, -1)]
        columns = self.kept_of, self.shares(tokens), self.kept(tokens), self.peaks(tokens)
        for retention, share, kept, peak in list(zip(*columns, strict=True))[1:]:
            if retention.states is not None:
                sizes.append(min(sizes[0], self._state_blocks(self._requests)))
                continue
            shared = min(math.ceil(share * sizes[0]), CACHED * self._requests * kept)
            sizes.append(min(sizes[-1], shared + peak - kept))  # a group that keeps less needs no more
        return [size + 1 for size in sizes]

    def within(self, size: int, tokens: int) -> list[int]:
        """The largest size of each pool, in blocks, for a total of `size` bytes."""
        counts = range(size // (self.token_bytes[0] * self.block_size) + 1)
        fitting = bisect_right(counts, size, key=lambda count: self.bytes(self.of_first(count, tokens)))
        return self.of_first(fitting - 1, tokens)

    def bytes(self, num_blocks: Sequence[int]) -> int:
        """Size in bytes of pools with these numbers of blocks."""
        return self.block_size * sum(count * own for count, own in zip(num_blocks, self.token_bytes, strict=True))

    def hold(self, num_blocks: Sequence[int], tokens: int) -> bool:
        """Whether these pools have room for a request of this many tokens."""
        return all(count > peak for count, peak in zip(num_blocks, self.peaks(tokens), strict=True))

    def plans(self, num_blocks: Sequence[int], tokens: int) -> tuple[GroupPlan, ...]:
        """The plan of each group, for a longest context of this many tokens."""
        sizes = zip(self._layers, self.token_bytes, num_blocks, strict=True)
        columns = self.kept_of, sizes, self.peaks(tokens), self.kept(tokens)
        return tuple(
            GroupPlan(retention.window, *size, peak, peak - kept, recurrent=retention.states is not None)
            for retention, size, peak, kept in zip(*columns, strict=True)
        )


def longest_held(pools: Pools, sizes: Callable[[int], list[int]], longest: int) -> int:
    """The longest context, at most `longest` tokens and in whole blocks, of which one request fits into the pools.

    Args:
        sizes: returns the sizes of the pools for a given longest context.
    """
    if pools.hold(sizes(longest), longest):
        return longest
    size = pools.block_size
    blocks = range(1, longest // size + 1)
    return size * bisect_left(blocks, True, key=lambda count: not pools.hold(sizes(count * size), count * size))
