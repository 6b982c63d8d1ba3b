"""Plans the memory: how many KV blocks fit, and whether the options can work at all."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.errors import ConfigError, MemoryPlanError, PoolTooSmallError
from quire.layers.latent import RESTORED_BYTES, may_expand
from quire.models.model import Model
from quire.ops import sparse
from quire.ops.kv_cache import KVShape
from quire.ops.memory import Scratch
from quire.runner.kv_pools import GroupPlan, Pools, longest_held
from quire.runner.proposer import Speculation

LOGIT_SLICE_BYTES = 64 * 2**20
"""Prompt logits are computed in slices of about this size."""

FREE_SHARE = 0.5
"""Share of the free memory that KV takes on a CPU, where other programs need memory, too."""


class Measured(msgspec.Struct, tag=True, frozen=True):
    """A rank's free memory, once all ranks have loaded.

    Attributes:
        free: bytes that it may use.
        activations: the measured size of the largest step's intermediate results; None if it must be estimated.
    """

    free: int
    activations: int | None = None

    def and_of(self, others: Sequence[Measured]) -> Measured:
        """The least free memory, and the largest activations, of all ranks."""
        found = [self, *others]
        counted = [each.activations for each in found if each.activations is not None]
        return Measured(min(each.free for each in found), max(counted) if counted else None)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The use of the memory. Sizes are in bytes.

    Attributes:
        weights: packed weights, including a draft model's, and on a GPU the tables of embeddings.
        quantization: a description of their quantization, for people; None if there is none.
        activations: the largest step's intermediate results.
        groups: the pool of each KV group, the one that keeps most first.
        draft_kv_bytes_per_token: the part of the first group's bytes per token that belongs to a draft model.
        kv_saving: see `Model`.
        block_size: tokens per block.
        max_model_len: longest context in tokens.
        logit_rows: most rows whose logits are computed at once for prompt log-probabilities.
        notes: messages about values that were chosen or lowered.
        ranks: number of processes that share the model; sizes are those of each.
        shared: memory shared by the ranks, for collectives.
        max_num_seqs: most requests that run at once; 0: as configured.
    """

    weights: int
    activations: int
    groups: tuple[GroupPlan, ...]
    block_size: int
    max_model_len: int
    logit_rows: int
    notes: tuple[str, ...] = ()
    quantization: str | None = None
    kv_saving: float | None = None
    draft_kv_bytes_per_token: int = 0
    ranks: int = 1
    shared: int = 0
    max_num_seqs: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers that keep KV per token, including a draft model's."""
        return sum(group.bytes_per_token for group in self.groups if not group.recurrent)

    @property
    def num_blocks(self) -> int:
        """Size of the first group's pool, including the null block."""
        return self.groups[0].num_blocks

    @property
    def num_usable(self) -> int:
        """Number of blocks in all pools, without the null blocks."""
        return sum(group.num_usable for group in self.groups)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit into the first group's pool."""
        return self.groups[0].num_usable * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.block_size * sum(group.num_blocks * group.bytes_per_token for group in self.groups)

    @property
    def full_length_requests(self) -> float:
        """Number of requests of the longest context that fit at once."""
        return min(group.longest_requests for group in self.groups)

    def lacking(self, requests: int, tokens: int) -> GroupPlan | None:
        """A group whose pool is too small for this many requests of this many tokens; None if there is none."""
        blocks = -(-tokens // self.block_size)
        return next((group for group in self.groups if group.needed(requests, blocks) > group.num_usable), None)

    def table(self) -> list[tuple[str, str]]:
        """Rows to print: names and sizes."""
        a_token = f"{format_size(self.kv_bytes_per_token)} a token"
        if self.draft_kv_bytes_per_token:
            a_token += f", {format_size(self.draft_kv_bytes_per_token)} of it for drafts"
        if self.kv_saving is not None:
            a_token += f"; {self.kv_saving:.{0 if self.kv_saving >= 10 else 1}f} times less than full keys and values"
        of_each = f"{self.ranks}; sizes are those of each, beside {format_size(self.shared)} that they share"
        return [
            *([("ranks", of_each)] if self.ranks > 1 else []),
            ("weights", ", ".join(filter(None, (format_size(self.weights), self.quantization)))),
            ("activations, largest step", format_size(self.activations)),
            ("KV cache", f"{format_size(self.kv_bytes)} ({a_token})"),
            *(self._row_of(group) for group in self.groups),
            ("longest context", f"{self.max_model_len:,} tokens"),
            ("full-length requests", f"{self.full_length_requests:,.1f} at once"),
        ]

    def _row_of(self, group: GroupPlan) -> tuple[str, str]:
        blocks = f"{group.num_usable:,} of {self.block_size} tokens: {group.num_usable * self.block_size:,} tokens"
        if len(self.groups) == 1:
            return "KV blocks", blocks
        keeps = "all positions" if group.window is None else f"window of {group.window:,}"
        layers = f"{group.num_layers} of {sum(each.num_layers for each in self.groups)} layers"
        if group.recurrent:
            size = format_size(group.bytes_per_token * self.block_size)
            return (
                "recurrent states",
                f"{group.num_usable:,} of {size}; {layers}, at most {group.peak_blocks} a request, the rest is cache",
            )
        each = f"{format_size(group.bytes_per_token)} a token, at most {group.peak_blocks:,} blocks a request"
        return f"KV blocks, {keeps}", f"{blocks}; {layers}, {each}"


def plan_memory(
    config: EngineConfig,
    model: Model,
    free_bytes: int,
    activations: int | None = None,
    share: float = FREE_SHARE,
    speculation: Speculation | None = None,
) -> MemoryPlan:
    """Divide the memory.

    Args:
        config: options; `num_kv_blocks` and `kv_cache_memory` take precedence if they are set.
        model: already loaded, so `free_bytes` does not include its weights.
        free_bytes: memory that is available now.
        activations: measured size of the largest step's intermediate results without drafts; None: it is estimated.
        share: the share of the memory besides activations that is used for KV.
        speculation: the proposer, with its own weights and KV.

    Raises:
        PoolTooSmallError: the pool is too small for one request of the configured `max_model_len`.
        MemoryPlanError: the configured sizes exceed the free memory, or not even one small request fits.
        ConfigError: `max_model_len` exceeds the model's, or a step cannot hold a whole prompt although chunked prefill
            is off.
    """
    trained, rows = longest_context(config, model), logit_rows(model)
    if activations is None:
        activations = activation_bytes(config, model, rows)
    if speculation is not None:
        activations += _draft_bytes(config, model, rows, speculation)
    room = int(max(0, free_bytes - activations) * share)
    asked = config.max_num_seqs
    requests = Pools(config, model, speculation).requests_within(config.kv_cache_bytes or room)
    config = replace(config, max_num_seqs=requests)
    pools = Pools(config, model, speculation)
    sizes = functools.partial(_pool_sizes, config, pools, room)
    longest = longest_held(pools, sizes, trained)
    num_blocks = sizes(max(longest, 1))
    _check_free(pools, num_blocks, activations, free_bytes, trained)
    if longest == 0:
        raise _nothing_fits(config, pools, num_blocks, free_bytes)
    if longest < trained and config.max_model_len is not None:
        raise _too_long(pools, trained, sizes(trained)[0] - 1, longest, config.block_size)
    _check_whole_prompts(config, longest, requests if model.causal else 0)
    return MemoryPlan(
        weights=model.weight_bytes + model.table_bytes + (speculation.weight_bytes if speculation else 0),
        activations=activations,
        groups=pools.plans(num_blocks, longest),
        block_size=config.block_size,
        max_model_len=longest,
        logit_rows=rows,
        notes=_notes(asked, requests, trained, longest),
        quantization=model.quantization,
        kv_saving=model.kv_saving,
        ranks=model.ranks.size,
        shared=model.shared_bytes,
        draft_kv_bytes_per_token=pools.draft_bytes,
        max_num_seqs=requests,
    )


def _notes(asked: int, requests: int, trained: int, longest: int) -> tuple[str, ...]:
    """Messages about limits that are lower than configured: running requests, and the longest context."""
    notes = []
    if requests < asked:
        notes.append(
            f"max_num_seqs is {requests}, not {asked}: half of the KV memory holds the recurrent states of no more "
            "requests; kv_cache_memory gives it more"
        )
    if longest < trained:
        notes.append(
            f"max_model_len is {longest:,}, not the model's {trained:,}: the KV memory holds no more; "
            "kv_cache_memory gives it more"
        )
    return tuple(notes)


def _pool_sizes(config: EngineConfig, pools: Pools, room: int, tokens: int) -> list[int]:
    """The size of each pool, in blocks, for contexts of this many tokens: as configured, or as useful and available."""
    if config.num_kv_blocks is not None:
        return pools.of_first(config.num_kv_blocks + 1, tokens)
    if config.kv_cache_bytes is not None:
        return pools.within(config.kv_cache_bytes, tokens)
    most_useful = pools.of_first(config.max_num_seqs * -(-tokens // config.block_size) + 1, tokens)
    return min(pools.within(room, tokens), most_useful)


def _nothing_fits(config: EngineConfig, pools: Pools, num_blocks: list[int], free_bytes: int) -> MemoryPlanError:
    memory = config.kv_cache_memory
    source = f"kv_cache_memory={memory}" if memory else f"{format_size(free_bytes)} free"
    return MemoryPlanError(
        f"{source} gives {max(num_blocks[0] - 1, 0)} KV blocks of {config.block_size} tokens "
        f"({format_size(pools.bytes([1] * len(num_blocks)))} each): not one request fits. Set "
        f"kv_cache_memory to at least {format_size(pools.bytes([8] * len(num_blocks)))}"
    )


def _too_long(pools: Pools, max_model_len: int, usable: int, fits: int, block_size: int) -> PoolTooSmallError:
    needed = pools.of_first(pools.peaks(max_model_len)[0] + 1, max_model_len)
    return PoolTooSmallError(
        f"max_model_len={max_model_len} needs {needed[0] - 1} KV blocks of {block_size} tokens, but the pool has "
        f"{usable}; set max_model_len to at most {fits}, or kv_cache_memory to at least "
        f"{format_size(pools.bytes(needed))}"
    )


def logit_rows(model: Model) -> int:
    """Number of rows whose logits are computed at once for prompts."""
    return max(8, LOGIT_SLICE_BYTES // (model.vocab_size * 4))


def activation_bytes(config: EngineConfig, model: Model, logit_rows: int) -> int:
    """Estimate the size of the intermediate results of the largest step without drafts.

    It is not measured on CPUs, where a step of 2,048 tokens through a 0.6B model takes seconds, and memory is no hard
    limit. The estimate has, for each token: the residual and the normed state, the fused q/k/v rows, attention's fp32
    rows, and the fused gate/up rows with their product; what layers with experts need, and latent attention if it
    expands keys and values; and logits in the model's type and three times in fp32 (the sampler copies and sorts).
    """
    layer, tokens, itemsize = model.config.layer, config.max_num_batched_tokens, model.dtype.itemsize
    layers = [model.config.layer_at(index) for index in range(model.config.num_layers)]
    heads = max((each.num_heads + 2 * each.num_kv_heads) * each.head_dim for each in layers)
    per_token = (4 * layer.hidden_size + 2 * heads + 3 * model.config.per_layer_width) * itemsize
    per_token += 3 * 4 * max(each.num_heads * each.head_dim for each in layers)
    apart = layer.qk_norm in ("whole", "turned") or any(each.kv_source is not None for each in layers)
    if (net := model.config.recurrent) is not None:
        room = 4 * layer.hidden_size * itemsize + net.row * (itemsize + 4) + 4 * net.width
        per_token = max(per_token, room)
    if apart:  # separate norms: copies, in fp32 for rotations in plain torch
        per_token += 4 * 4 * heads
    restored = RESTORED_BYTES if layer.expands and may_expand(model.kernels) else 0
    if layer.index is not None:
        restored = sparse.SCORE_BYTES + 2 * sparse.GATHERED_BYTES + 2 * 8 * layer.index.top * tokens
    body = Scratch.room(tokens * per_token + _mlp_bytes(model, tokens))  # most of it is a persistent buffer
    shapes = [each for each in model.kv_shapes(config.kv_cache_dtype) if isinstance(each, KVShape) and each.sides > 1]
    body += max((model.kernels.attention_scratch(each) for each in shapes), default=0)
    return body + restored + _logits(config, model, logit_rows, 0)


def _logits(config: EngineConfig, model: Model, logit_rows: int, drafts: int) -> int:
    """Size of the logits of a step in which each request has this many drafts."""
    rows = max(min(config.max_num_seqs * (1 + drafts), config.max_num_batched_tokens), logit_rows)
    return rows * model.vocab_size * (model.dtype.itemsize + 12)


def _draft_bytes(config: EngineConfig, model: Model, logit_rows: int, speculation: Speculation) -> int:
    """Additional memory for drafts in a step: the proposer's state, the hidden states that it reads, and logits."""
    features = len(speculation.aux_layers) * model.config.layer.hidden_size * model.dtype.itemsize
    most = config.speculation.num_speculative_tokens if config.speculation else 0
    logits = _logits(config, model, logit_rows, most) - _logits(config, model, logit_rows, 0)
    return config.max_num_seqs * speculation.bytes_per_request + config.max_num_batched_tokens * features + logits


def _mlp_bytes(model: Model, tokens: int) -> int:
    """The largest workspace of a layer's MLP or experts."""
    config, sparse = model.config, model.expert_layers
    needs = [each.workspace(tokens, config.layer.hidden_size, model.dtype) for each in sparse.values()]
    inner = max(config.layer_at(index).intermediate_size for index in range(config.num_layers))
    dense = tokens * 3 * inner * model.dtype.itemsize
    if config.layer.experts_beside:
        return max(needs) + dense + tokens * 3 * config.layer.hidden_size * model.dtype.itemsize
    return max([*needs, dense] if len(sparse) < model.num_layers else needs)


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that this process could allocate now, in bytes: the system's free memory, limited by its control group.
    If the system does not report it (macOS), half of the total.
    """
    try:
        [line] = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    free, group = int(line.split()[1]) * 1024, Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used + _file_cache(group)))


def _file_cache(group: Path) -> int:
    """Size of cached files, which a control group counts as used, but the system frees when necessary."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split() for line in lines if len(line.split()) == 2)
    return sum(int(sizes.get(name, 0)) for name in ("inactive_file", "active_file"))


def format_size(size: float) -> str:
    """Format a size in bytes with 3 significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    raise ValueError("unreachable")


def _check_free(pools: Pools, num_blocks: list[int], activations: int, free_bytes: int, longest: int) -> None:
    """Check that everything fits into the free memory; otherwise the system would kill the process later."""
    kv_bytes = pools.bytes(num_blocks)
    if kv_bytes + activations > free_bytes:
        room = max(0, free_bytes - activations)
        raise MemoryPlanError(
            f"the KV cache of {format_size(kv_bytes)} and {format_size(activations)} of activations do not fit into "
            f"{format_size(free_bytes)} of free memory; set kv_cache_memory to at most {format_size(room)} "
            f"(num_kv_blocks to at most {max(pools.within(room, longest)[0] - 1, 0)}), or lower max_num_batched_tokens"
        )


def longest_context(config: EngineConfig, model: Model) -> int:
    """The configured `max_model_len`, or the model's.

    Raises:
        ConfigError: the configured one exceeds the model's.
    """
    asked, trained = config.max_model_len, model.max_position_embeddings
    if asked is not None and asked > trained:
        raise ConfigError(
            f"max_model_len={asked} is more than the {trained} positions the model was made for "
            "(max_position_embeddings); lower it"
        )
    return asked or trained


def _check_whole_prompts(config: EngineConfig, longest: int, decodes: int) -> None:
    needed = longest + decodes
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < needed:
        raise ConfigError(
            f"without chunked prefill a step must hold a whole prompt beside {decodes} decodes: max_num_batched_tokens="
            f"{config.max_num_batched_tokens} is below max_model_len={longest} + {decodes}; raise it to {needed}, "
            "lower max_model_len, or leave enable_chunked_prefill on (with a model that embeds alone, it is off)"
        )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return None
