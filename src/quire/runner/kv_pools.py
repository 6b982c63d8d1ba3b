"""How the memory for KV is divided among the KV groups of a model, and what the pools then hold."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.config import EngineConfig
from quire.core.kv_group import peak_blocks
from quire.models.model import Model
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
        step_blocks: so many of these a step's tokens add, and they go when a window has passed them. Since a step's
            tokens are bounded, all requests together hold no more beyond what each keeps.
    """

    window: int | None
    num_layers: int
    bytes_per_token: int
    num_blocks: int
    peak_blocks: int
    step_blocks: int

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


def retentions(model: Model, speculation: Speculation | None) -> list[int | None]:
    """By group, how many of the last positions its blocks keep; None: all. What drafts may see all, and lies in the
    blocks of the first group."""
    windows = [group.window for group in model.groups]
    return [None, *windows[1:]] if speculation is not None and speculation.kv_shape else windows


class Pools:
    """The pools of an engine: how large each is, where the first one's size is given or the memory for all.

    A short request keeps as many blocks of each group, a long one fewer of those with windows (`kept`). No division
    suits both: the one of `shares` takes the same part from either of what pools made for it alone would give. What a
    step adds until its windows have passed it has room beside that, once. No pool but the first is larger than
    `max_num_seqs` requests can use, and as much again for what the prefix cache keeps of them: the rest is the first's.

    Args:
        config: block size, and what bounds a chunk.
    """

    def __init__(self, config: EngineConfig, model: Model, speculation: Speculation | None) -> None:
        self.windows = retentions(model, speculation)
        self.draft_bytes = speculation.kv_shape.bytes_per_token if speculation and speculation.kv_shape else 0
        shapes = model.kv_shapes(config.kv_cache_dtype)
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
        return [peak_blocks(window, tokens, chunk, self.block_size) for window in self.windows]

    def shares(self, tokens: int) -> list[Fraction]:
        """Blocks of each pool to those of the first one, where the longest context has so many tokens.

        With a group's bytes B a token, p what it keeps to what the first group does, and the smallest share r, short
        requests get r * sum(B) / sum(share * B) of what pools in equal shares would give them, and longest ones
        sum(p * B) / sum(share * B) of what pools in shares p would. Both are the same for r = sum(p * B) / sum(B); a
        group of which the longest need more has so much more.
        """
        kept = self.kept(tokens)
        parts = [Fraction(own, kept[0]) for own in kept]
        weighted = sum(part * size for part, size in zip(parts, self.token_bytes, strict=True))
        least = Fraction(weighted) / sum(self.token_bytes)
        return [max(part, least) for part in parts]

    def of_first(self, num_blocks: int, tokens: int) -> list[int]:
        """Blocks of each pool, null blocks included, where the first one has `num_blocks`."""
        sizes = [max(num_blocks - 1, -1)]
        for share, kept, peak in list(zip(self.shares(tokens), self.kept(tokens), self.peaks(tokens), strict=True))[1:]:
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
        columns = self.windows, self._layers, self.token_bytes, num_blocks, peaks, steps
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
