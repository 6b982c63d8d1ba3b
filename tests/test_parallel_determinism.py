"""A request's tokens and log-probabilities are those of one rank, bit for bit, for every number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.models.quantize import quantize_folder
from quire.ops import Quantization
from tests.oracle import save_checkpoint
from tests.test_determinism import SETTINGS, Switches, alone, prompts, run, setting

__all__ = ["alone", "setting"]  # fixtures


@contextlib.contextmanager
def engine(setting: dict[str, Any], ranks: int, switches: Switches, **more: Any) -> Iterator[Engine]:
    made = Engine(
        EngineConfig(
            **{**setting, "threads": 1, "async_scheduling": switches.overlap, **more},
            tensor_parallel_size=ranks,
            block_size=switches.block_size,
            prefix_cache=switches.prefix_cache,
            num_kv_blocks=320 // switches.block_size + 2 if switches.small_pool else 400,
            max_model_len=320,
            max_num_batched_tokens=switches.chunk,
            max_num_seqs=8,
            scheduling_policy="priority",
            check_invariants=True,
        )
    )
    try:
        yield made
    finally:
        made.close()


SMALL, LARGE = Switches(16, "radix", 40, True, overlap=True), Switches(32, "hash", 2048, False)
FAST = {("bfloat16", 2), ("int4 weights", 4), ("int8 cache", 2), ("experts", 2), ("latent attention", 4)}


@pytest.mark.parametrize(
    ("setting", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) in FAST else pytest.mark.slow)
        for name in SETTINGS
        for ranks in (2, 4)
    ],
    indirect=["setting"],
)
def test_ranks_change_nothing(setting: dict[str, Any], alone: Any, ranks: int) -> None:
    for switches in (SMALL, LARGE):
        with engine(setting, ranks, switches) as made:
            order = list(range(len(prompts())))
            assert run(made, order) == alone, f"cold, {switches}"
            assert run(made, order[::-1], first_id=100, stagger=2) == alone, f"warm, {switches}"
            assert made.stats.cached_tokens > 0
            assert (made.stats.preemptions > 0) == switches.small_pool


SPECULATION = [
    {"method": "eagle"},
    {"method": "draft_model"},
    {"method": "ngram"},
    {"method": "eagle", "tree_width": 4},
]


@pytest.mark.parametrize(
    "config", [SPECULATION[0], *(pytest.param(c, marks=pytest.mark.slow) for c in SPECULATION[1:])]
)
def test_drafts_are_the_same_on_every_rank(config: dict[str, Any]) -> None:
    params = [SamplingParams(max_tokens=60, seed=1, temperature=t, logprobs=1, ignore_eos=True) for t in (0.0, 0.8)]
    texts = ["def fib(n):\n", "import os\nimport sys\n\nclass Parser:\n"]
    found = []
    for ranks in (1, 2):
        spec = {**config, "adaptive": False} if "tree_width" not in config else config
        with LLM("demo", tensor_parallel_size=ranks, threads=1, speculative_config=spec) as llm:
            outputs = llm.generate(texts, params)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            assert llm.stats.accepted > 0 or "tree_width" in config
    assert found[0] == found[1]


def test_a_quantized_folder_is_read_in_part(tmp_path: Any) -> None:
    save_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    quantize_folder(tmp_path / "model", tmp_path / "int4", Quantization("int4", 32))
    found = []
    for ranks in (1, 2, 4):
        with LLM(str(tmp_path / "int4"), tensor_parallel_size=ranks, threads=1) as llm:
            [output] = llm.generate([[5, 6, 7, 8] * 9], SamplingParams(max_tokens=20, temperature=0.0, logprobs=2))
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1] == found[2]
