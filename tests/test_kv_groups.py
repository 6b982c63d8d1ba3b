"""Models of which some layers see a window: each kind of layer has blocks of its own, which only memory tells."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_manager import Handle
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.recorder import Recorder
from quire.log import kv_use
from quire.models.config import DecoderConfig
from quire.models.layer_groups import layer_groups
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import VOCAB, load_reference, random_prompt, reference_choices, save_checkpoint
from tests.test_models_eagle import eagle_tensors, write
from tests.test_speculation import Outcome, run

WINDOW = 40
INDICES = (0, 1, 3, 4, 6, 7, 10, 13)
"""Of `tests.test_speculation.request`: every filter once, stop tokens, bad words, one that is not drafted for."""


def windows(first: int = 1, window: int = WINDOW, **more: Any) -> dict[str, Any]:
    """Layers from the first one on see a window."""
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": first, **more}


def engine_of(folder: Path | str, **options: Any) -> Engine:
    defaults = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "check_invariants": True}
    return Engine(EngineConfig(model=str(folder), **defaults | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("mixed", "windowed", "draft", "eagle", "float")}
    save_checkpoint(made["mixed"], "qwen2", num_hidden_layers=3, **windows())
    save_checkpoint(made["windowed"], "mistral", num_hidden_layers=2, sliding_window=WINDOW)
    save_checkpoint(made["draft"], "qwen2", num_hidden_layers=2, **windows(window=20))
    write(made["eagle"], eagle_tensors())
    save_checkpoint(made["float"], "qwen2", dtype=torch.float32, num_hidden_layers=3, **windows(window=24))
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture(scope="module")
def all_alone(folders) -> dict[str, list[Outcome]]:
    """What each request gets by itself, without a cache."""
    engines = {name: engine_of(folders[name], prefix_cache="off") for name in ("mixed", "windowed")}
    return {name: [run(engine, [index])[0] for index in range(16)] for name, engine in engines.items()}


@pytest.fixture(scope="module")
def alone(all_alone) -> dict[str, list[Outcome]]:
    """The same of `INDICES`."""
    return {name: [outcomes[index] for index in INDICES] for name, outcomes in all_alone.items()}


# -- what is kept --------------------------------------------------------------------------------------------------


def test_the_windowed_layers_of_a_long_request_keep_a_window_and_a_chunk(folders):
    engine = engine_of(folders["mixed"], max_model_len=512, max_num_batched_tokens=32)
    full, windowed = engine.scheduler.kv.groups
    prompt = random_prompt(400)
    engine.add(Request(0, prompt, SamplingParams(temperature=0.0, ignore_eos=True).resolved(), max_tokens=64))
    most = [0, 0]
    while not engine.idle:
        engine.step()
        for request in engine.scheduler.running:
            held = [sum(block != NULL_BLOCK for block in table) for table in request.tables]
            most = [max(pair) for pair in zip(most, held, strict=True)]
    assert most[0] == 29, "463 tokens in blocks of 16"
    assert most[1] == -(-(WINDOW - 1 + 32) // 16) == 5
    sizes = [cache.bytes_per_block for cache in engine.kv_cache]
    assert sizes[1] == 2 * sizes[0], "two of the three layers"
    before = most[0] * sum(sizes)
    assert most[0] * sizes[0] + most[1] * sizes[1] < 0.5 * before
    assert engine.kv_cache[0].num_blocks == full.pool.num_blocks > windowed.pool.num_blocks


def test_more_requests_run_at_once_than_where_all_layers_keep_everything(tmp_path, monkeypatch):
    """The same memory, the same load: long prompts, of which windowed layers need little."""
    folder = save_checkpoint(tmp_path, "qwen2", num_hidden_layers=4, max_position_embeddings=2048, **windows(1, 32))

    def most_running() -> tuple[int, list[list[int]]]:
        engine = engine_of(folder, kv_cache_memory="2400KiB", max_num_batched_tokens=256, max_model_len=1024)
        outputs: list[list[int]] = [[] for _ in range(8)]
        for id in range(8):
            params = SamplingParams(temperature=0.0, ignore_eos=True).resolved()
            engine.add(Request(id, random_prompt(900, seed=id), params, max_tokens=40))
        most = 0
        while not engine.idle:
            for update in engine.step():
                outputs[update.request] += update.tokens
            most = max(most, len(engine.scheduler.running))
        return most, outputs

    most, outputs = most_running()
    monkeypatch.setattr(DecoderConfig, "groups", property(lambda config: layer_groups([None] * config.num_layers)))
    before, same = most_running()
    assert most > before > 1 and outputs == same


def test_what_the_live_view_and_metrics_say_counts_the_blocks_of_all_groups(folders):
    engine = engine_of(folders["mixed"], num_kv_blocks=40)
    engine.add(Request(0, random_prompt(100), SamplingParams(temperature=0.0).resolved(), max_tokens=2))
    while not engine.idle:
        engine.step()
    kv, full, windowed = engine.scheduler.kv, *engine.scheduler.kv.groups
    kv.hold(Handle("transfer", 1), [(1, block) for block in windowed.cached])
    usable, held = 40 + windowed.num_usable, len(windowed.cached)
    document = json.loads(Recorder().document(engine, "live"))
    stats = document["stats"]
    assert (stats["num_blocks"], stats["held_blocks"], stats["cached_blocks"]) == (usable, held, 2 * held)
    assert stats["free_blocks"] == usable - 2 * held
    assert kv_use(stats) == pytest.approx(held / windowed.num_usable) and kv_use(stats) > held / usable
    cells = document["kv"]["cells"]
    assert len(cells) == usable and (cells.count("c"), cells.count("1")) == (len(full.cached), held)
    assert [(node["parent"], node["tokens"], node["references"]) for node in document["tree"]] == [(None, 101, 1)]


# -- the same tokens -----------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers_whatever_was_cached(folders):
    reference = load_reference(Path(folders["float"]))
    engine = engine_of(folders["float"], max_num_batched_tokens=48)
    head = random_prompt(90)
    for id, tail in enumerate(([], [5, 6, 7], random_prompt(70, seed=1))):
        prompt = [*head, *tail]
        engine.add(Request(id, prompt, SamplingParams(temperature=0.0, ignore_eos=True).resolved(), max_tokens=32))
        tokens: list[int] = []
        while not engine.idle:
            tokens += [token for update in engine.step() for token in update.tokens]
        assert len(tokens) == 32 and tokens == reference_choices(reference, prompt, tokens)
    assert engine.stats.cached_tokens >= 2 * 89


@pytest.mark.quick("-hash", "preempted-radix", "overlapped-off")
@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 16, "max_num_batched_tokens": 40, "max_num_seqs": 8}, {"async_scheduling": True}],
    ids=["", "preempted", "overlapped"],
)
def test_nothing_around_a_request_changes_its_tokens(folders, alone, cache, options):
    engine = engine_of(folders["mixed"], prefix_cache=cache, **options)
    assert run(engine, INDICES) == alone["mixed"]
    assert run(engine, INDICES[::-1], first_id=100, stagger=2) == alone["mixed"], "warm"
    assert (engine.stats.preemptions > 0) == ("num_kv_blocks" in options)
    assert (engine.stats.cached_tokens > 0) == (cache != "off")


def test_a_prefix_is_found_after_its_windowed_blocks_were_evicted(folders):
    engine = engine_of(folders["mixed"], max_model_len=512, max_num_batched_tokens=64)
    kv, prompt = engine.scheduler.kv, random_prompt(320)
    chosen = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True).resolved()

    def complete(id: int, text: list[int]) -> list[Any]:
        engine.add(Request(id, text, chosen, max_tokens=12))
        found: list[Any] = []
        while not engine.idle:
            for update in engine.step():
                found += [
                    (token, entry.ids, entry.values)
                    for token, entry in zip(update.tokens, update.logprobs, strict=True)
                ]
        return found

    text = [*prompt, *random_prompt(40, seed=2)]
    engine.scheduler.kv.cache.clear()
    expected = complete(0, text)
    kv.cache.clear()
    complete(1, prompt)
    assert kv.cache.evict(1, 15) == 15, "those that its window passed first"
    before = engine.stats.cached_tokens
    assert complete(2, text) == expected
    assert engine.stats.cached_tokens - before == 320
    kv.cache.evict(1, 10**6)
    before = engine.stats.cached_tokens
    assert complete(3, text) == expected
    assert engine.stats.cached_tokens == before, "no window, no match"


SPECULATION = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "draft"},
    "draft_model, trees": {"method": "draft_model", "model": "draft", "tree_width": 3, "num_speculative_tokens": 9},
    "eagle": {"method": "eagle", "model": "eagle"},
    "eagle, trees": {
        "method": "eagle", "model": "eagle", "tree_width": 4, "num_speculative_tokens": 12, "tree_depth": 4
    },
}  # fmt: skip
DRAFTED = [
    pytest.param(target, spec, id=f"{target}, {name}", marks=pytest.mark.slow if i and (i + j) % 2 else ())
    for i, (name, spec) in enumerate(SPECULATION.items())
    for j, target in enumerate(("mixed", "windowed"))
]
"""Each method meets a target, and each kind of drafts both; `make test-slow` adds the rest."""


@pytest.mark.quick("windowed, ngram", "mixed, eagle, trees")
@pytest.mark.parametrize(("target", "spec"), DRAFTED)
def test_drafts_change_nothing(folders, all_alone, target, spec):
    """The draft model sees windows in some of its layers, too: its planes lie in blocks that keep all."""
    indices = range(16) if spec["method"] == "ngram" else INDICES  # of its drafts few are right
    alone = [all_alone[target][index] for index in indices]
    spec = {"adaptive": False, **spec} | ({"model": folders[spec["model"]]} if "model" in spec else {})
    engine = engine_of(folders[target], speculative_config=spec, max_num_batched_tokens=64)
    assert run(engine, indices) == alone
    assert run(engine, indices[::-1], first_id=100, stagger=2) == alone, "warm"
    assert engine.stats.drafted > 100 and engine.stats.accepted > 0
    drafts = spec["method"] != "ngram"
    own = [group.retention.window for group in engine.scheduler.kv.groups]
    assert own == {("mixed", True): [None, WINDOW], ("mixed", False): [None, WINDOW]}.get(
        (target, drafts), [None] if drafts else [WINDOW]
    )
    assert [cache.draft_kv is not None for cache in engine.kv_cache] == [drafts] + [False] * (len(own) - 1)
    small = engine_of(folders[target], speculative_config=spec, num_kv_blocks=16, max_num_batched_tokens=40)
    assert run(small, indices) == alone


@pytest.mark.parametrize(
    "spec",
    [None, pytest.param({"method": "draft_model", "model": "draft", "adaptive": False}, marks=pytest.mark.slow)],
)
def test_where_the_device_reads_the_spans_tokens_are_the_same(folders, alone, spec):
    """Tables of each group lie on the device; steps are recorded, and overlap."""
    options = {} if spec is None else {"speculative_config": spec | {"model": folders["draft"]}}
    with on_device(DelayedDevice(), SpanKernels()):
        engine = engine_of(
            folders["mixed"], cpu_kernels="torch", max_num_batched_tokens=64, num_kv_blocks=40, **options
        )
    plain = engine_of(folders["mixed"], cpu_kernels="torch", prefix_cache="off")
    expected = run(plain, INDICES)
    assert run(engine, INDICES) == expected
    assert run(engine, INDICES[::-1], first_id=100, stagger=2) == expected, "warm"


# -- fuzz ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", range(3))
def test_three_groups_of_layers_change_nothing_either(seed, tmp_path, monkeypatch):
    """Two windows, and all positions between them; no configuration says so yet."""
    rnd = random.Random(seed)
    seen = rnd.choice([1, 3, 17]), None, rnd.choice([32, 48])
    monkeypatch.setattr("quire.models.qwen3.read_windows", lambda *_: seen)
    folder = save_checkpoint(tmp_path, "qwen3")
    prompts = [rnd.choices(range(3, VOCAB), k=rnd.randrange(1, 150)) for _ in range(6)]
    prompts += [[*rnd.choice(prompts)[: rnd.randrange(1, 150)], 4] for _ in range(6)]
    params = SamplingParams(temperature=0.0, ignore_eos=True).resolved()

    def outputs(**options: Any) -> dict[int, list[int]]:
        engine = engine_of(folder, **options)
        assert [group.retention.window for group in engine.scheduler.kv.groups] == [None, seen[2], seen[0]]
        made: dict[int, list[int]] = {id: [] for id in range(len(prompts))}
        for id, prompt in enumerate(prompts):
            engine.add(Request(id, prompt, params, max_tokens=12))
            for _ in range(rnd.randrange(3)):
                for update in engine.step():
                    made[update.request] += update.tokens
        while not engine.idle:
            for update in engine.step():
                made[update.request] += update.tokens
        return made

    expected = outputs(prefix_cache="off", max_num_seqs=1)
    for size in (16, 32):
        assert outputs(block_size=size, num_kv_blocks=320 // size, max_num_batched_tokens=48) == expected
