"""Engines without the promise of equal bits: which form latent attention takes, and that its tokens are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.fingerprint import system
from quire.layers import latent
from quire.layers.latent import LatentAttention
from tests.oracle import load_reference, random_prompt, reference_greedy, reference_logits, save_checkpoint

TOKENS = 12
HEAD = random_prompt(150, seed=1)
PROMPTS = [
    random_prompt(300, seed=2),
    [*HEAD, 5, 6, 7],
    random_prompt(9, seed=3),
    [*HEAD, 9],
    random_prompt(260, seed=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3")


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of every call of the expanded form."""
    rows: list[int] = []
    whole = LatentAttention.expanded

    def counted(self: LatentAttention, still: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append(len(still))
        return whole(self, still, *others)

    monkeypatch.setattr(LatentAttention, "expanded", counted)
    yield rows


def make(folder: Path, deterministic: bool = False, **options: Any) -> Engine:
    defaults = {"threads": 1, "max_model_len": 320, "num_kv_blocks": 200, "check_invariants": True}
    return Engine(EngineConfig(model=str(folder), deterministic=deterministic, **(defaults | options)))


def run(engine: Engine, prompts: list[list[int]], stagger: int = 0) -> list[list[tuple[int, float]]]:
    """Greedy tokens of each prompt with their log-probabilities; with `stagger`, one joins every so many steps."""
    params = SamplingParams(temperature=0.0, logprobs=0, seed=0, ignore_eos=True).resolved()
    todo = list(enumerate(prompts))
    outcomes: list[list[tuple[int, float]]] = [[] for _ in prompts]
    step = 0
    while todo or not engine.idle:
        if todo and (not stagger or step % stagger == 0):
            for number, prompt in todo if not stagger else todo[:1]:
                engine.add(Request(number, prompt, params, max_tokens=TOKENS))
            todo = todo[1:] if stagger else []
        for update in engine.step():
            assert update.error is None
            entries = zip(update.tokens, update.logprobs or [], strict=True)
            outcomes[update.request] += [(token, entry.values[0]) for token, entry in entries]
        step += 1
    return outcomes


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[tuple[int, float]]]:
    """What transformers makes of the prompts."""
    reference, outcomes = load_reference(folder), []
    for prompt in PROMPTS:
        tokens = reference_greedy(reference, prompt, TOKENS)
        scores = reference_logits(reference, [*prompt, *tokens]).log_softmax(-1)[len(prompt) - 1 : -1]
        outcomes.append([(token, float(row[token])) for token, row in zip(tokens, scores, strict=True)])
    return outcomes


def assert_close(found: list[list[tuple[int, float]]], expected: list[list[tuple[int, float]]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.quick("hash", "off")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_kernels": "torch"},
        {"max_num_batched_tokens": 100, "max_num_seqs": 4},
        {"max_num_batched_tokens": 60, "max_num_seqs": 8, "num_kv_blocks": 22},
        {"block_size": 64, "prefix_cache": "hash"},
        {"prefix_cache": "off", "async_scheduling": True},
    ],
    ids=["whole", "torch", "chunks", "small pool", "hash", "off"],
)
def test_tokens_are_transformers_in_the_cheaper_form(
    folder: Path, expected: list[list[tuple[int, float]]], expanded: list[int], options: dict[str, Any]
) -> None:
    engine = make(folder, **options)
    assert_close(run(engine, PROMPTS), expected)
    first = list(expanded)
    assert_close(run(engine, PROMPTS[::-1], stagger=2), expected[::-1])
    assert max(first) > 50 and min(expanded) > 8  # prompts are expanded, decodes alone never
    assert (engine.stats.cached_tokens > 0) == (engine.config.prefix_cache != "off")
    assert (engine.stats.preemptions > 0) == (options.get("num_kv_blocks") == 22)


def test_a_quantized_cache_is_restored_from_its_codes(folder: Path, expanded: list[int]) -> None:
    absorbed, cheaper = (
        run(make(folder, deterministic, kv_cache_dtype="int8", prefix_cache="off"), PROMPTS[:1])[0]
        for deterministic in (True, False)
    )
    assert expanded
    assert absorbed[0][0] == cheaper[0][0] and absorbed[0][1] == pytest.approx(cheaper[0][1], abs=1e-3)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_with_the_promise_nothing_is_expanded(folder: Path, expanded: list[int], kernels: str) -> None:
    run(make(folder, deterministic=True, cpu_kernels=kernels), PROMPTS)
    assert not expanded


def test_where_memory_holds_not_one_head_the_absorbed_form_serves(
    folder: Path, expected: list[list[tuple[int, float]]], expanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "RESTORED_BYTES", 1000)
    assert_close(run(make(folder), PROMPTS), expected)
    assert not expanded


def test_a_note_says_what_an_engine_without_the_promise_does(folder: Path, tmp_path: Path) -> None:
    dense = save_checkpoint(tmp_path, "qwen3")
    assert "deterministic=False has no effect on a CPU for this model" in make(dense).notes
    assert any("latent attention in its cheaper form" in note for note in make(folder).notes)
    assert not any("deterministic" in note for note in make(folder, deterministic=True).notes)


def test_engines_with_and_without_the_promise_have_other_fingerprints(folder: Path) -> None:
    names = {system(make(folder, promised).fingerprint) for promised in (True, False)}
    assert len(names) == 2
