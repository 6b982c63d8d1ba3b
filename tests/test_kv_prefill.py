"""Prefill and decode apart: one engine computes prompts, another one reads their blocks and decodes, and no token shows
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from tests.oracle import save_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "torch kernels": {"cpu_kernels": "torch"},
    "latent attention": {"model": "deepseek_v3"},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "a drafting head": {"speculative_config": {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}},
}
BLOCK = 16
LENGTHS = [*range(1, 3 * BLOCK + 3), 64, 65, 127, 128, 129]
SECONDS = 60.0

Outcome = list[tuple[int, tuple[float, ...]]]


class Prefill:
    """An engine that computes prompts for others, driven by a thread as an engine process drives one.

    Attributes:
        computed: prompts of which something was computed.
        hold: no step is run while it is set.
    """

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(EngineConfig(**{"kv_role": "prefill", "max_num_seqs": 8, **options}))
        assert self.engine.tiers.exporter is not None
        self.address = str(self.engine.tiers.exporter.address)
        self.computed = 0
        self.hold = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        tiers = self.engine.tiers
        while not self._stop.is_set():
            self.engine.exchange()
            for number, want in tiers.to_compute:
                params = SamplingParams(seed=0).resolved()
                self.engine.add(Request(number, want.tokens, params, max_tokens=0, scope=want.scope))
                self.computed += 1
            tiers.to_compute.clear()
            for number in tiers.dropped:
                self.engine.abort(number)
            tiers.dropped.clear()
            if self.hold.is_set() or self.engine.idle:
                time.sleep(0.002)
                ended = self.engine.take_updates()
            else:
                ended = self.engine.step()
            self.engine.prefilled([update.request for update in ended if update.finish_reason])

    @property
    def exported(self) -> int:
        return self.engine.scheduler.kv.exports.exported

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.engine.close()


@pytest.fixture
def key(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text("a secret of this cluster")
    file.chmod(0o600)
    return str(file)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3")


@pytest.fixture
def options(key: str) -> dict[str, Any]:
    return {
        "model": "demo",
        "threads": 1,
        "num_kv_blocks": 120,
        "max_model_len": 192,
        "check_invariants": True,
        "host_kv_memory": "64MiB",
        "cluster_key_file": key,
    }


@pytest.fixture
def prefill(options: dict[str, Any]) -> Iterator[Prefill]:
    made = Prefill(**options)
    yield made
    made.close()


def decoder(options: dict[str, Any], *prefills: Prefill, **more: Any) -> Engine:
    """An engine that has found those that compute for it."""
    urls = ",".join(each.address for each in prefills)
    made = Engine(
        EngineConfig(**{**options, "kv_role": "decode", "prefill_url": urls, "prefill_min_tokens": 16, **more})
    )
    importer = made.tiers.importer
    assert importer is not None
    wait_until(lambda: all(each.ready for each in importer.prefillers))
    return made


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def prompt(length: int, first: int = 0) -> list[int]:
    return [3 + (first + 7 * index * index + index // 3) % 60 for index in range(length)]


def params(index: int) -> SamplingParams:
    temperature = 0.0 if index % 2 else 0.9
    return SamplingParams(temperature=temperature, seed=index, logprobs=1, ignore_eos=True).resolved()


def run(engine: Engine, texts: list[list[int]], first_id: int = 0, most: int = 8, scope: str = "") -> list[Outcome]:
    """Tokens and log-probabilities of prompts that are served at once."""
    for index, text in enumerate(texts):
        engine.add(Request(first_id + index, text, params(index), max_tokens=most, scope=scope))
    outcomes: list[Outcome] = [[] for _ in texts]
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcomes[update.request - first_id].append((token, tuple(entry.values)))
    return outcomes


def alone(options: dict[str, Any], texts: list[list[int]], **more: Any) -> list[Outcome]:
    """What one engine without any cache says."""
    own = {name: value for name, value in options.items() if name not in ("host_kv_memory", "cluster_key_file")}
    engine = Engine(EngineConfig(**{**own, "prefix_cache": "off"}))
    outcomes = run(engine, texts, **more)
    engine.close()
    return outcomes


def peer(engine: Engine) -> int:
    """Blocks that came from other engines."""
    return engine.stats.kv_tiers["peer"]["loaded"]


@pytest.mark.parametrize("model", MODELS)
def test_every_length_of_a_prompt(model: str, options: dict[str, Any], latent: Path) -> None:
    options |= {name: str(latent) if value == "deepseek_v3" else value for name, value in MODELS[model].items()}
    texts = [prompt(length, first) for first, length in enumerate(LENGTHS)]
    expected = alone(options, texts)
    prefill = Prefill(**options)
    engine = decoder(options, prefill)
    try:
        assert run(engine, texts) == expected
        assert peer(engine) == prefill.exported == sum((length - 1) // BLOCK for length in LENGTHS if length > BLOCK)
        assert not engine.stats.kv_tiers["host"]["bad"]
    finally:
        engine.close()
        prefill.close()
