"""A request's tokens and log-probabilities are those of one rank, bit for bit, for every number of ranks."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.models.quantize import quantize_folder
from tests.oracle import save_checkpoint
from tests.test_determinism import SETTINGS, Switches, alone, engine_of, prompts, run, setting

__all__ = ["alone", "setting"]  # fixtures


SMALL, LARGE = Switches(16, "radix", 40, True, overlap=True), Switches(32, "hash", 2048, False)
FAST = {
    ("bfloat16", 2, LARGE),
    ("int4 weights", 2, SMALL),
    ("int8 cache", 2, LARGE),
    ("experts", 2, SMALL),
    ("latent attention", 4, LARGE),
}
"""Each rank is a process: as many ranks meet both pools; `make test-slow` adds the rest."""


@pytest.mark.quick("int4 weights-2-small", "int8 cache-2-large")
@pytest.mark.parametrize(
    ("setting", "ranks", "switches"),
    [
        pytest.param(
            name,
            ranks,
            pool,
            marks=() if (name, ranks, pool) in FAST else pytest.mark.slow,
            id=f"{name}-{ranks}-{kind}",
        )
        for name, ranks, (kind, pool) in itertools.product(SETTINGS, (2, 4), (("small", SMALL), ("large", LARGE)))
    ],
    indirect=["setting"],
)
def test_ranks_change_nothing(setting: dict[str, Any], alone: Any, ranks: int, switches: Switches) -> None:
    with contextlib.closing(engine_of(setting, switches, tensor_parallel_size=ranks)) as engine:
        order = list(range(len(prompts())))
        assert run(engine, order) == alone, "cold"
        assert run(engine, order[::-1], first_id=100, stagger=2) == alone, "warm"
        assert engine.stats.cached_tokens > 0
        assert (engine.stats.preemptions > 0) == switches.small_pool


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


@pytest.mark.slow
def test_a_quantized_folder_is_read_in_part(tmp_path: Any) -> None:
    save_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    quantize_folder(tmp_path / "model", tmp_path / "int4", "int4")
    found = []
    for ranks in (1, 2, 4):
        with LLM(str(tmp_path / "int4"), tensor_parallel_size=ranks, threads=1) as llm:
            [output] = llm.generate([[5, 6, 7, 8] * 9], SamplingParams(max_tokens=20, temperature=0.0, logprobs=2))
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1] == found[2]
