"""Sparse models on a CPU: mixture of experts, latent and sparse attention, beside transformers and their plain forms.

Random bf16 weights of `qwen3-moe-1b` and `deepseek-v2-lite-1b` (see `quire.models.random_checkpoint`). First the
cells of `benchmarks.cells` for both; then single parts on made-up inputs: a layer's experts in one call and one after
the other, latent attention and a decode step at a long context, the choice of positions of sparse attention beside
plain torch's, in DeepSeek V3.2's shape, and a prompt in both forms of latent attention. What is compared runs in
turns, and the best of each counts. Bounds are by the bytes that are read (of experts, those that some token chose)
and by the operations, at the machine's best rates of the same sitting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import compare
from benchmarks.common import Options, Result, main, tell
from quire.bench.ceilings import Ceilings, Machine, Work, measure_machine
from quire.layers.latent import expanded_is_cheaper
from quire.models.model import Model
from quire.models.random_checkpoint import SPREAD, model_config, random_checkpoint
from quire.models.registry import load_model
from quire.ops import Kernels, KVCache, RaggedBatch, choose_kernels
from quire.ops import sparse as chosen
from quire.ops.experts import LoopedExperts, Routing, route

TURNS = 5
BLOCK, DTYPE = 16, torch.bfloat16
EXPERT_ROWS = (1, 32, 512)
CONTEXT, REQUESTS, PROMPTS = 8192, (1, 8), (1024, 4096)
LAYERS = 16
"""Of the cache on which latent attention alone is timed, for one request: far more than a processor's caches hold."""


def run(options: Options) -> Result:
    """Both engines' cells, then the parts."""
    result = Result(("what", "Quire", "of the bound", "beside", "ratio"))
    sparse, latent = shapes(options)
    for shape in (sparse, latent):
        compare(result, folder_of(shape, options), options, label=f"{shape}, ")
    machine = measure_machine(DTYPE, options.threads or torch.get_num_threads(), repeat=2 if options.quick else 7)
    parts(result, options, machine)
    return result


@torch.inference_mode()
def parts(result: Result, options: Options, machine: Machine) -> None:
    """All but the cells."""
    sparse, latent = shapes(options)
    time_experts(result, sparse, machine, options)
    model = load_model(folder_of(latent, options), kernels=choose_kernels())
    time_latent_attention(result, latent, model, machine, options)
    time_choice(result, machine, options)
    time_decode_step(result, latent, model, machine, options)
    measure_cache(result, latent, model)
    either = choose_kernels(deterministic=False)  # the same kernels, but layers may choose the expanded form
    time_prompts(result, latent, (model, load_model(folder_of(latent, options), kernels=either)), machine, options)


def shapes(options: Options) -> tuple[str, str]:
    """The shape of a model with experts, and of one that has latent attention too."""
    return ("qwen3-moe-tiny", "deepseek-v2-tiny") if options.quick else ("qwen3-moe-1b", "deepseek-v2-lite-1b")


def folder_of(shape: str, options: Options) -> Path:
    """The random checkpoint's folder, written at the first call."""
    with random_checkpoint(shape, options.workdir) as folder:
        return folder


def time_experts(result: Result, shape: str, machine: Machine, options: Options) -> None:
    """A layer's experts in one call, beside one after the other: with the same products, and with plain torch's."""
    config, generator = model_config(shape), torch.Generator().manual_seed(0)
    hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    ways, routing = _experts(hidden, inner, count, generator), Routing(count, config["num_experts_per_tok"])
    for rows in (1, 8) if options.quick else EXPERT_ROWS:
        tell(f"sparse: experts, {rows} rows")
        x = torch.randn(rows, hidden, generator=generator).to(DTYPE)
        ids, weights = route(torch.randn(rows, count, generator=generator), routing, None)
        seconds = in_turns({name: _call(way, x, ids, weights) for name, way in ways.items()}, options)
        used, numbers = len(ids.unique()), 3 * hidden * inner  # of an expert
        reading = used * numbers * DTYPE.itemsize / machine.read_rate
        bound = max(reading, 2 * ids.numel() * numbers / machine.matrix_rate)
        for beside in ("looped, the same products", "looped, plain torch"):
            result.add(
                _row(f"{shape}, experts of a layer, {rows} rows, ms; beside {beside}", seconds, bound, beside),
                what="experts",
                rows=rows,
                experts_used=used,
                bound_s=bound,
                seconds={name: seconds[name] for name in ("grouped", beside)},
            )


def _experts(hidden: int, inner: int, count: int, generator: torch.Generator) -> dict[str, Any]:
    """The same experts computed in three ways."""
    weights = [
        [torch.randn(size, generator=generator).mul_(SPREAD).to(DTYPE) for _ in range(count)]
        for size in ((2 * inner, hidden), (hidden, inner))
    ]
    fast, plain = (
        [[kernels.pack([one]) for one in part] for part in weights] for kernels in (choose_kernels(), Kernels())
    )
    return {
        "grouped": choose_kernels().experts(*fast),
        "looped, the same products": LoopedExperts(*fast),
        "looped, plain torch": LoopedExperts(*plain),
    }


def time_latent_attention(result: Result, shape: str, model: Model, machine: Machine, options: Options) -> None:
    """Attention alone, absorbed, of requests that decode at a long context."""
    heads, config = model.config.layer.num_heads, model.config.layer.latent
    context = 256 if options.quick else CONTEXT
    for requests in REQUESTS:
        tell(f"sparse: latent attention, {requests} requests")
        layers = max(2, LAYERS // requests)
        kv, batch = _batch(requests, 1, context, layers, config.row)
        q = torch.randn(requests, heads, config.row).to(DTYPE)

        def attend(kv: KVCache = kv, batch: RaggedBatch = batch, q: torch.Tensor = q) -> None:
            step = replace(batch)  # which has no plan of attention yet
            for layer in range(kv.layers):
                model.kernels.attend_latent(q, kv, step, layer, config.scale, config.kv_lora_rank)

        seconds = in_turns({"attend": attend}, options)["attend"] / layers
        num_bytes = requests * context * config.row * DTYPE.itemsize
        operations = 2 * requests * heads * context * (config.row + config.kv_lora_rank)
        bound = max(num_bytes / machine.read_rate, operations / machine.matrix_rate)
        name = f"{shape}, latent attention of a layer, decode of {requests} at a context of {context:,}, ms"
        result.add(
            _row(name, {"attend": seconds}, bound),
            what="latent attention",
            requests=requests,
            context=context,
            num_bytes=num_bytes,
            operations=operations,
            bound_s=bound,
            seconds=seconds,
        )


def time_choice(result: Result, machine: Machine, options: Options) -> None:
    """Which positions rows attend to, of a layer of DeepSeek V3.2's shape, for the last rows of a long context."""
    heads, width, top, context = (4, 16, 64, 512) if options.quick else (64, 128, 2048, 32_768)
    for rows in (1, 16):
        tell(f"sparse: choice of positions, {rows} rows")
        kv, batch = _batch(1, rows, context, 2, 512 + 64 + width)
        q, weights = torch.randn(rows, heads, width).to(DTYPE), torch.randn(rows, heads)

        def choose(
            kernels: Kernels,
            kv: KVCache = kv,
            batch: RaggedBatch = batch,
            q: torch.Tensor = q,
            weights: torch.Tensor = weights,
        ) -> torch.Tensor:
            step = replace(batch)
            choice = chosen.choice(step, top)
            kernels.choose(q, weights, kv, step, 1, choice)
            return choice.slots

        calls = {"choice": _call(choose, choose_kernels()), "plain torch": _call(choose, Kernels())}
        seconds = in_turns(calls, options)
        num_bytes, operations = context * width * DTYPE.itemsize, 2 * rows * context * heads * width
        bound = max(num_bytes / machine.read_rate, operations / machine.matrix_rate)
        name = f"sparse attention, choice of {top:,} of {context:,} positions, {rows} rows, ms; beside plain torch"
        result.add(
            _row(name, seconds, bound, "plain torch"),
            what="sparse choice",
            rows=rows,
            num_bytes=num_bytes,
            operations=operations,
            bound_s=bound,
            seconds=seconds,
        )


def time_decode_step(result: Result, shape: str, model: Model, machine: Machine, options: Options) -> None:
    """A step of one request at a long context, the head included."""
    tell("sparse: decode step")
    context = 256 if options.quick else CONTEXT
    kv, batch = _batch(1, 1, context, model.num_layers, model.head_dim)
    seconds = in_turns({"step": lambda: model.logits(model.forward([replace(batch)], [kv]))}, options)["step"]
    work = Work.of(model, model.kv_shape().bytes_per_token)
    bound = Ceilings(work, machine).seconds(work.step(1, context))
    result.add(
        _row(f"{shape}, decode step of 1 at a context of {context:,}, ms", {"step": seconds}, bound),
        what="latent decode step",
        context=context,
        bound_s=bound,
        seconds=seconds,
    )


def measure_cache(result: Result, shape: str, model: Model) -> None:
    """Bytes of a token in a cache as it is allocated, beside those of all heads' keys and values."""
    config, layers = model.config.layer.latent, model.num_layers
    [kv] = model.new_caches([4], BLOCK)
    held, name = kv.bytes_per_block // BLOCK, f"{shape}, bytes of KV a token; beside full keys and values"
    full = layers * model.config.layer.num_heads * (config.qk_head_dim + config.v_head_dim) * DTYPE.itemsize
    result.add(
        (name, f"{held:,}", "", f"{full:,}", f"{full / held:.1f}"),
        what="latent cache",
        held=held,
        computed=layers * (config.kv_lora_rank + config.qk_rope_head_dim) * DTYPE.itemsize,
        full=full,
    )


def time_prompts(result: Result, shape: str, models: tuple[Model, Model], machine: Machine, options: Options) -> None:
    """A whole prompt in one step. `models`: one that is always absorbed, and one that takes the cheaper form."""
    layer, work = models[0].config.layer, Work.of(models[0], models[0].kv_shape().bytes_per_token)
    for prompt in (256,) if options.quick else PROMPTS:
        tell(f"sparse: prompt of {prompt} tokens")
        kv, batch = _batch(1, prompt, prompt, models[0].num_layers, models[0].head_dim)
        names = ("absorbed", "the cheaper form")
        calls = {name: _call(_first_token, model, batch, kv) for name, model in zip(names, models, strict=True)}
        seconds = in_turns(calls, options)
        bound = Ceilings(work, machine).seconds(work.prompts(1, prompt))
        expanded = expanded_is_cheaper(layer.latent, layer.num_heads, batch)
        beside = "expanded" if expanded else "the same: it is cheaper"
        result.add(
            _row(f"{shape}, prompt of {prompt:,}, absorbed, ms; beside {beside}", seconds, bound, names[1]),
            what="prompt",
            prompt=prompt,
            expanded=expanded,
            bound_s=bound,
            seconds=seconds,
        )


def _first_token(model: Model, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
    return model.logits(model.forward([replace(batch)], [kv])[-1:])


def in_turns(calls: Mapping[str, Callable[[], object]], options: Options) -> dict[str, float]:
    """Seconds of each, the fastest of a few; they take turns, and the first turn does not count."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(2 if options.quick else 1 + TURNS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def _call(function: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: function(*arguments)


def _row(name: str, seconds: Mapping[str, float], bound: float, beside: str | None = None) -> tuple[str, ...]:
    """Quire's own is the first of `seconds`; `beside`: what it is compared with, if with anything."""
    ours = next(iter(seconds.values()))
    theirs = () if beside is None else (f"{seconds[beside] * 1e3:.2f}", f"{seconds[beside] / ours:.2f}")
    return name, f"{ours * 1e3:.2f}", f"{bound / ours:.0%}", *(theirs or ("", ""))


def _batch(requests: int, rows: int, context: int, layers: int, row: int) -> tuple[KVCache, RaggedBatch]:
    """A cache of made-up rows, and a step of the last `rows` of `context` tokens of each request."""
    blocks = -(-context // BLOCK)
    kv = KVCache(1 + requests * blocks, layers, 1, row, BLOCK, DTYPE, sides=1)
    kv.numbers.normal_()
    tables = torch.arange(1, 1 + requests * blocks).view(requests, blocks)
    positions = torch.arange(context - rows, context)
    slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK  # [requests, rows]
    return kv, RaggedBatch(
        token_ids=torch.randint(500, (requests * rows,)),
        positions=positions.repeat(requests),
        slots=slots.flatten(),
        row_starts=list(range(0, (requests + 1) * rows, rows)),
        context_lens=[context] * requests,
        block_tables=tables,
        block_size=BLOCK,
    )


if __name__ == "__main__":
    main(run)
