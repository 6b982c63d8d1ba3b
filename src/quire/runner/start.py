"""Starts a runner for a loaded model: plans memory, allocates blocks, and compiles kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.core.step import DRAFT, FROM_PREVIOUS, RequestInfo, Span, StepPlan
from quire.errors import ConfigError, MemoryPlanError
from quire.grammar.grammars import Grammars
from quire.kv.layout import Share
from quire.models.model import Model
from quire.ops import KVCache
from quire.runner.device import Device
from quire.runner.device_forward import DeviceForward, Size, all_sizes, decode_sizes, largest_graph, padded_path
from quire.runner.draft_passes import ChainSize, chain_sizes, passes_of, row_sizes
from quire.runner.memory_plan import (
    FREE_SHARE,
    Measured,
    MemoryPlan,
    format_size,
    free_memory,
    logit_rows,
    longest_context,
    plan_memory,
)
from quire.runner.model_runner import ModelRunner
from quire.runner.pipeline_runner import PipelineRunner
from quire.runner.proposer import Speculation
from quire.speculative_config import SpeculativeConfig

if TYPE_CHECKING:  # there may be no tiers
    from quire.kv.host import HostTier

OnLoad = Callable[[str, float], None]
"""Called with (phase, progress from 0 to 1) while an engine starts."""

COMPILING = "compiling kernels"
"""Phase of a start on a GPU, which is short once they are in Triton's cache."""

ALONE = (64, 256, 512, 1024, 2048)
"""Prompt lengths for which some kernel uses other tiles than for decodes or for the longest prompt."""


@dataclass(frozen=True, slots=True)
class Started:
    """A runner, its caches, one per KV group, messages for the user, and the host tier's memory."""

    runner: ModelRunner
    kv: list[KVCache]
    notes: tuple[str, ...]
    host: HostTier | None


def start_runner(
    config: EngineConfig,
    model: Model,
    device: Device,
    plan: MemoryPlan,
    threads: int,
    report: OnLoad,
    speculation: Speculation | None = None,
    kv_key: bytes = bytes(32),
    host_fd: int = -1,
    grammars: Grammars | None = None,
) -> Started:
    """Make the runner, and allocate its memory. Ranks with GPUs must do so together.

    Args:
        plan: see `planned`.
        speculation: its proposer.
        kv_key: 32 secret bytes, with which blocks outside the pool are verified.
        host_fd: descriptor of the host tier's memory, which ranks share; -1 with one rank.
        grammars: see `Sampler`.

    Raises:
        ConfigError: the configured sizes do not fit.
    """
    draft_kv = speculation.kv_shape if speculation else None
    with device.active():  # on the steps' stream, so that they are zeroed before the first step writes
        kv = model.new_caches(
            [group.num_blocks for group in plan.groups], config.block_size, config.kv_cache_dtype, draft_kv
        )
    host = _host_tier(config, model, kv, plan, kv_key, host_fd)
    notes = [] if host is None else [_describe(host, config)]
    halves = model.ranks.size == 1  # several ranks give up a step together, and the engine retries it
    if not model.kernels.reads_spans:
        if model.stages > 1:
            return Started(
                PipelineRunner(model, kv, plan.logit_rows, threads, speculation, host, grammars), kv, tuple(notes), host
            )
        runner = ModelRunner(model, kv, plan.logit_rows, threads, device, None, speculation, halves, host, grammars)
        return Started(runner, kv, tuple(notes), host)
    graphs = "off" if config.enforce_eager else config.cuda_graphs
    largest = largest_graph(model.num_parameters, config.max_num_batched_tokens)
    spare = round(plan.activations * (1 + min(1, largest / config.max_num_batched_tokens)))
    forward = _device_forward(config, model, kv, device, plan.max_model_len, graphs, spare, speculation)
    notes.append(f"device: {device.describe()}")
    if note := model.kernels.note():  # the largest step has run
        notes.append(f"dense products: {note}")
    if forward.graphs.mode != "off":
        notes += _record(config, forward, kv, device, largest, speculation, report)
    runner = ModelRunner(model, kv, plan.logit_rows, threads, device, forward, speculation, halves, host, grammars)
    return Started(runner, kv, tuple(notes), host)


def _record(
    config: EngineConfig,
    forward: DeviceForward,
    kv: list[KVCache],
    device: Device,
    largest: int,
    speculation: Speculation | None,
    report: OnLoad,
) -> list[str]:
    """Record the steps of decodes, with drafts if there are any, and what drafts them; with "eager", all others.

    Returns messages for the user.
    """
    begin, eager = time.perf_counter(), forward.graphs.mode == "eager"
    every, sizes = all_sizes(config.max_num_seqs, largest), decode_sizes(config.max_num_seqs, largest)
    passes, rows, chains = None, set[Size](), set[ChainSize]()
    if speculation is not None and config.speculation is not None:
        passes = passes_of(forward, kv, speculation.model, speculation.needs_next_token)
        verified, rows, chains = _drafting_sizes(config.speculation, config.max_num_seqs, forward, speculation, eager)
        sizes |= verified
    if eager:
        sizes |= every
        rows |= every

    def recording(share: float) -> None:
        report("recording CUDA graphs", share)

    with torch.inference_mode(), device.active():
        part = 1.0 if passes is None else 0.5
        forward.record(sizes, lambda share: recording(part * share))
        if passes is not None:
            passes.record(rows, chains, lambda share: recording(0.5 + share / 2))
    notes = [f"recorded {len(forward.graphs)} CUDA graphs in {time.perf_counter() - begin:.1f} s"]
    if later := len(every - sizes):
        notes.append(f"up to {later} more CUDA graphs are recorded, of steps with prompts, each at its first use")
    return notes


def _drafting_sizes(
    spec: SpeculativeConfig, most: int, forward: DeviceForward, speculation: Speculation, eager: bool
) -> tuple[set[Size], set[Size], set[ChainSize]]:
    """Sizes of steps that verify drafts, and of what drafts them, see `DraftPasses.record`."""
    drafts = spec.num_speculative_tokens
    requests, trees = range(1, most + 1), spec.tree_width > 1
    counts = range(1 if spec.adaptive and not trees else drafts, drafts + 1)
    paths = {padded_path(length) for length in range(2, spec.tree_depth + 2)} if trees else {0}
    verified = {forward.size_of(n * (1 + count), n, path) for n in requests for count in counts for path in paths}
    rows = row_sizes(forward, most, drafts)
    if trees:
        rows |= {
            forward.size_of(n * w, n, path) for n in requests for w in range(1, spec.tree_width + 1) for path in paths
        }
    drawn = trees or speculation.rejection
    chains = set[ChainSize]() if drawn else chain_sizes(most, counts, eager)
    return set(filter(forward.records, verified)), set(filter(forward.records, rows)), chains


def free_for_each(config: EngineConfig, model: Model, ranks: int, neighbours: int = 0) -> int:
    """Memory that each of this machine's ranks may use now, in bytes, besides the memory that they share.

    Args:
        neighbours: number of engines like this one that will start on this machine, and need as much.
    """
    of_each = model.shared_bytes + config.host_kv_bytes
    to_load = neighbours * ranks * model.weight_bytes
    return max(0, free_memory() - (neighbours + 1) * of_each - to_load) // (ranks * (neighbours + 1))


def _host_tier(
    config: EngineConfig, model: Model, kv: list[KVCache], plan: MemoryPlan, key: bytes, fd: int
) -> HostTier | None:
    """The host tier, if it is configured.

    Raises:
        ConfigError: it has no room for a block of some group, or its memory cannot be pinned.
    """
    if not config.host_kv_bytes:
        return None
    from quire.kv.host import HostTier, Slots, slot_bytes
    from quire.kv.prefault import Prefaulter

    shares = [Share.of(cache, model, number) for number, cache in enumerate(kv)]
    sizes = [slot_bytes(share.layout.block_bytes) for share in shares]
    counts = _slot_counts(config.host_kv_bytes, sizes, [group.num_usable for group in plan.groups])
    if not all(counts):
        raise ConfigError(
            f"host_kv_memory={format_size(config.host_kv_bytes)} is less than one block of {format_size(sum(sizes))}; "
            f"raise it to at least {format_size(64 * sum(sizes))}, or leave it out"
        )
    slots = [
        Slots(count, size - slot_bytes(0), share) for count, size, share in zip(counts, sizes, shares, strict=True)
    ]
    prefaulters = []
    if config.kv_role == "decode" and not kv[0].memory.is_cuda:  # to keep streams even
        prefaulters = [
            Prefaulter(cache.memory, group.peak_blocks) for cache, group in zip(kv, plan.groups, strict=True)
        ]
    try:
        return HostTier(slots, key, kv[0].memory.is_cuda, fd, prefaulters)
    except MemoryError as error:
        raise MemoryPlanError(
            f"host_kv_memory={format_size(config.host_kv_bytes)}: {error}; lower it, or raise the system's limit of "
            "locked memory (ulimit -l)"
        ) from error


def _slot_counts(memory: int, sizes: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Number of slots for each KV group: one, and the rest in proportion to the groups' pools. All zeros if there is no
    room for one slot each.

    Args:
        sizes: by group, bytes of a slot. blocks: by group, blocks of the pool.
    """
    left, whole = memory - sum(sizes), sum(size * count for size, count in zip(sizes, blocks, strict=True))
    return [0 if left < 0 else 1 + left * count // whole for count in blocks]


def _describe(host: HostTier, config: EngineConfig) -> str:
    tokens = host.groups[0].count * config.block_size
    text = f"host tier: {host.num_slots:,} KV blocks ({tokens:,} tokens) in {format_size(config.host_kv_bytes)}"
    if host.pinned or config.kv_role:
        return text
    return (
        f"{text}; on a CPU this is the same memory as kv_cache_memory, which serves better as long as it may grow: a "
        "host tier pays where the pool is bounded, and under a disk tier"
    )


def measure(
    config: EngineConfig,
    model: Model,
    device: Device,
    speculation: Speculation | None = None,
    ranks: int = 1,
    neighbours: int = 0,
    report: OnLoad = lambda phase, share: None,
) -> Measured:
    """Measure a rank's memory, once all ranks have loaded. Ranks with GPUs run the same trial steps, together.

    Args:
        ranks, neighbours: see `free_for_each`; for CPUs.
        report: called with the progress of trial steps, for which kernels are compiled.

    Raises:
        MemoryPlanError: the device has no room for the largest step.
    """
    if not device.asynchronous:
        return Measured(free_for_each(config, model, ranks, neighbours))
    activations = _measured_activations(config, model, device, speculation, report)
    return Measured(_granted(config, device), activations)


def planned(
    config: EngineConfig, model: Model, device: Device, measured: Measured, speculation: Speculation | None = None
) -> MemoryPlan:
    """Plan the use of the memory.

    Args:
        measured: the memory of each rank.

    Raises:
        ConfigError: the configured sizes do not fit, see `plan_memory`.
    """
    if config.host_kv_bytes > (found := free_memory()):
        raise MemoryPlanError(
            f"host_kv_memory={format_size(config.host_kv_bytes)} is more than the {format_size(found)} of memory that "
            "are free; lower it"
        )
    share = 1.0 if device.asynchronous else FREE_SHARE
    return plan_memory(config, model, measured.free, measured.activations, share, speculation)


def _device_forward(
    config: EngineConfig,
    model: Model,
    kv: list[KVCache],
    device: Device,
    longest: int,
    graphs: str = "off",
    spare: int = 0,
    speculation: Speculation | None = None,
) -> DeviceForward:
    width = -(-longest // config.block_size)
    aux_layers, keeps = (speculation.aux_layers, speculation.keeps) if speculation else ((), 1)
    largest = largest_graph(model.num_parameters, config.max_num_batched_tokens)
    return DeviceForward(model, kv, device, config.max_num_seqs, width, graphs, spare, aux_layers, keeps, largest)


def _granted(config: EngineConfig, device: Device) -> int:
    """Device memory that Quire may still use, in bytes.

    Raises:
        MemoryPlanError: weights and other programs use more than `gpu_memory_utilization` already.
    """
    device.release()
    free, total = device.memory()
    granted = free - round((1 - config.gpu_memory_utilization) * total)
    if granted <= 0:
        least = (total - free) / total
        raise MemoryPlanError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {format_size(total)} is "
            f"{format_size(config.gpu_memory_utilization * total)}, but {format_size(total - free)} are taken by the "
            f"weights and other programs; raise it above {least:.2f}, free the GPU, or quantize the weights"
        )
    return granted


def _measured_activations(
    config: EngineConfig, model: Model, device: Device, speculation: Speculation | None, report: OnLoad
) -> int:
    """Measure the activations of the largest step, by running it with pools of two blocks.

    These include a draft model's KV, since kernels are compiled for the distance between blocks.

    Raises:
        MemoryPlanError: there is not enough memory.
    """
    if speculation is not None and speculation.kv_shape is None:
        speculation = None  # it has no draft model
    draft_kv = speculation.kv_shape if speculation else None
    with device.active():
        kv = model.new_caches([2] * len(model.groups), config.block_size, config.kv_cache_dtype, draft_kv)
    forward = _device_forward(config, model, kv, device, longest_context(config, model), speculation=speculation)
    runner = ModelRunner(model, kv, logit_rows(model), 1, device, forward, speculation, halves=False)
    drafts = config.speculation.num_speculative_tokens if config.speculation and speculation else 0
    report(COMPILING, 0.0)
    with torch.inference_mode(), device.active():
        model.kernels.warm_up(model.vocab_size)
        for cache in kv:  # as for a match within a block
            model.kernels.copy_blocks(cache, [(0, 1, 1)])
    try:
        return device.peak(lambda: _run_largest(runner, config, model, report, drafts))
    except torch.OutOfMemoryError as error:
        weights, total = model.weight_bytes + model.table_bytes, device.memory()[1]
        raise MemoryPlanError(
            f"a step of max_num_batched_tokens={config.max_num_batched_tokens} does not fit beside the weights "
            f"({format_size(weights)}) into the GPU's {format_size(total)}; lower max_num_batched_tokens "
            f"to {config.max_num_batched_tokens // 4} or less, or quantize the weights"
        ) from error


def _run_largest(runner: ModelRunner, config: EngineConfig, model: Model, report: OnLoad, drafts: int = 0) -> None:
    """Run a step with the most tokens and requests, all sampled with all filters.

    Then run decodes of all requests, or of fewer with `drafts` each, a single decode, with recurrent layers those of
    some numbers of requests between, and single prompts from short to long with log-probabilities, so that no user
    waits while kernels are compiled.
    """
    requests = min(config.max_num_seqs, config.max_num_batched_tokens)
    each, rest = divmod(config.max_num_batched_tokens, requests)
    longest = longest_context(config, model)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1, seed=0, logprobs=0)
    lengths = [min(each + (number < rest), longest) for number in range(requests)]
    plans = [_prompts(0, 0, lengths, params)]
    tokens = [FROM_PREVIOUS, *[DRAFT] * drafts]
    most = max(1, requests // len(tokens))  # no more rows of logits than without drafts
    counts = {1, most}
    if model.config.recurrent_layers:  # whose kernels are compiled for a power of two of spans
        counts |= {1 << bit for bit in range((most - 1).bit_length())}
    for count in sorted(counts, reverse=True):
        starts = [length + (len(plans) - 1) * len(tokens) for length in lengths[:count]]  # with drafts, at most
        if max(starts) + drafts < longest:
            spans = [
                Span(number, start, list(tokens), len(tokens), start_follows=drafts > 0)
                for number, start in enumerate(starts)
            ]
            plans.append(StepPlan(len(plans), spans))
    whole = min(longest, config.max_num_batched_tokens)
    for length in sorted({whole, *(length for length in ALONE if length < whole)}):
        first = requests + len(plans)
        plan = _prompts(len(plans), first, [length], SamplingParams(temperature=1.0, seed=0, prompt_logprobs=0))
        plan.ended = list(range(first))
        plan.spans[0].targets = plan.spans[0].tokens[1 : ALONE[-1]]
        plans.append(plan)
    plans.append(StepPlan(len(plans), [], ended=list(range(requests + len(plans)))))
    for index, plan in enumerate(plans):
        report(COMPILING, index / len(plans))
        runner.run(plan)


def _prompts(number: int, first: int, lengths: list[int], params: SamplingParams) -> StepPlan:
    """A step of new requests, numbered from `first` on, whose blocks are all the null block."""
    plan = StepPlan(number, [])
    for index, length in enumerate(lengths, start=first):
        tokens = [0] * length
        plan.spans.append(Span(index, 0, tokens, num_sampled=1))
        plan.started.append(RequestInfo(index, params, 0, tokens))
    return plan
