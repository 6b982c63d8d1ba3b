"""A decode step of models whose published shapes have kernels of their own, with random weights, beside its bound.

gpt-oss-20b with its experts in MXFP4, as published. Weights are drawn while the model is loaded, so nothing is
downloaded or written. The bound is the time to read what a token needs (its experts, all else that is multiplied, and
the keys and values) at the read rate of the same sitting.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, Result, main, tell
from quire.bench.ceilings import Ceilings, Work, measure_machine
from quire.models.model import Model
from quire.models.random_checkpoint import RandomCheckpoint
from quire.models.registry import load_model
from quire.models.weights import EXPERT
from quire.ops import Mxfp4Weight, RaggedBatch, choose_kernels
from quire.runner.memory_plan import format_size

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
CONTEXT, STEPS, BLOCK = 512, 24, 16


class InMxfp4(RandomCheckpoint):
    """Random weights, of which experts are in MXFP4."""

    def coded(self, name: str, rows: range | None = None) -> Mxfp4Weight | None:
        """See `Checkpoint`."""
        shape = self.entries[name].shape
        if EXPERT.fullmatch(name) is None or len(shape) != 2:
            return None
        generator = torch.Generator().manual_seed(self._seeds[name])
        outputs, groups = shape[0], shape[1] // 32
        codes = torch.empty(outputs, groups, 2, dtype=torch.int64).random_(generator=generator).view(torch.uint8)
        return Mxfp4Weight(codes, torch.full((outputs, groups), 119, dtype=torch.uint8))


def run(options: Options) -> Result:
    """Loads each and times a step of one request."""
    result = Result(("model", "weights", "loaded in, s", "step, ms", "bound, ms", "of the bound"))
    threads = options.threads or torch.get_num_threads()
    config = GPT_OSS_20B | (TINY if options.quick else {})
    tell("models: gpt-oss-20b")
    begin = time.monotonic()
    model = loaded(config, Path(options.workdir) / "gpt-oss-20b")
    took = time.monotonic() - begin
    machine = measure_machine(torch.bfloat16, threads, repeat=2 if options.quick else 7)
    work = Work.of(model, sum(shape.bytes_per_token for shape in model.kv_shapes()))
    bound = Ceilings(work, machine).seconds(work.step(1, CONTEXT))
    with model.kernels.threads(threads):
        seconds = fastest_step(model, 2 if options.quick else STEPS)
    row = format_size(model.weight_bytes), f"{took:.0f}", f"{seconds * 1e3:.1f}", f"{bound * 1e3:.1f}"
    result.add(
        ("gpt-oss-20b, experts in MXFP4", *row, f"{bound / seconds:.0%}"),
        model="gpt-oss-20b",
        weight_bytes=model.weight_bytes,
        active_bytes=work.weights_read(1),
        load_s=took,
        seconds=seconds,
        bound_s=bound,
        read_rate=machine.read_rate,
    )
    return result


def loaded(config: dict[str, Any], folder: Path) -> Model:
    """The model of a configuration, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_model(folder, kernels=choose_kernels(), open_checkpoint=partial(InMxfp4, spread=0.05))


@torch.inference_mode()
def fastest_step(model: Model, steps: int) -> float:
    """Seconds of a step that decodes a token at the end of `CONTEXT`; each with another token, and so other experts."""
    blocks = CONTEXT // BLOCK
    caches = model.new_caches([blocks + 1] * len(model.groups), BLOCK)
    for cache in caches:
        cache.numbers.normal_(0, 0.1)
    table, last = torch.arange(1, blocks + 1), CONTEXT - 1
    batch = RaggedBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([last]),
        slots=table[-1:] * BLOCK + last % BLOCK,
        row_starts=[0, 1],
        context_lens=[CONTEXT],
        block_tables=table[None],
        block_size=BLOCK,
    )
    times = []
    for step in range(steps):
        token = torch.tensor([step * 7 % model.vocab_size])
        begin = time.perf_counter()
        model.logits(model.forward([replace(batch, token_ids=token) for _ in caches], caches))
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main(run)
