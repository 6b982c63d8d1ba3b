"""Tiers of models with several KV groups: windows and recurrent states come back, and no token shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.block_hash import part_name
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError
from tests.oracle import save_checkpoint
from tests.test_kv_groups import windows
from tests.test_kv_host import Outcome, emptied, hosted, make, params, prompts, run
from tests.test_kv_prefill import Prefill, decoder, peer
from tests.test_models_eagle import eagle_tensors, write

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "some windows": ("qwen2", {"num_hidden_layers": 3, **windows()}, {}),
    "windows alone": ("mistral", {"num_hidden_layers": 2, "sliding_window": 40}, {}),
    "windows, int8": ("qwen2", {"num_hidden_layers": 3, **windows()}, {"kv_cache_dtype": "int8"}),
    "windows and drafts": ("qwen2", {"num_hidden_layers": 3, "dtype": torch.float32, **windows(window=24)}, {}),
    "states": ("qwen3_next", {}, {}),
    "short convolutions": ("lfm2", {}, {}),
}
QUICK = ("some windows", "states")
LENGTHS = (15, 33, 64, 65, 130, 150)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    made = {}
    for name, (architecture, config, options) in KINDS.items():
        folder = save_checkpoint(tmp_path_factory.mktemp(name.replace(" ", "-")), architecture, **config)
        made[name] = {"model": str(folder), "threads": 1, **options}
    draft = tmp_path_factory.mktemp("draft")
    write(draft, eagle_tensors())
    made["windows and drafts"]["speculative_config"] = {
        "method": "eagle",
        "model": str(draft),
        "num_speculative_tokens": 3,
    }
    return made


@pytest.fixture(params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in KINDS])
def options(request: pytest.FixtureRequest, folders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return folders[request.param]


def again(options: dict[str, Any]) -> int:
    """Tokens of a cached prefix that are computed again."""
    return int("speculative_config" in options)


def cold(options: dict[str, Any], texts: list[list[int]], most: int) -> list[Outcome]:
    """What an engine without caches says, served at once."""
    engine = make(options, num_kv_blocks=200, prefix_cache="off")
    outcomes = run(engine, texts, most=most)
    engine.close()
    return outcomes


def cold_each(options: dict[str, Any], texts: list[list[int]], most: int) -> list[Outcome]:
    """And one after the other."""
    engine = make(options, num_kv_blocks=200, prefix_cache="off")
    outcomes = [run(engine, [text], 10 * index, most)[0] for index, text in enumerate(texts)]
    engine.close()
    return outcomes


@pytest.mark.parametrize("overlap", [False, True])
def test_who_gives_way_comes_back_with_the_tokens_and_log_probabilities_of_a_roomy_pool(
    options: dict[str, Any], overlap: bool
) -> None:
    expected = cold(options, prompts(), 40)
    blocks = 14 if "windows-alone" in options["model"] else 24  # most of a window's come back by themselves
    engine = make(options, num_kv_blocks=blocks, host_kv_memory="64MiB", async_scheduling=overlap)
    assert run(engine, prompts()) == expected
    counts = hosted(engine)
    assert engine.stats.preemptions and counts["stored"] and counts["loaded"] and not counts["bad"]
    assert run(engine, prompts(), first_id=100) == expected
    engine.close()


@pytest.mark.parametrize("group", [0, -1])
def test_heads_are_loaded_and_a_flipped_bit_in_a_part_of_any_group_costs_no_token(
    options: dict[str, Any], group: int
) -> None:
    texts = prompts(6)[1:]
    expected = cold(options, texts, 8)
    engine = make(options, num_kv_blocks=100, host_kv_memory="64MiB")
    for index, text in enumerate(texts):
        run(engine, [text], first_id=10 * index, most=2)
    emptied(engine)
    run(engine, [[5] * 5], first_id=90, most=2)
    kv, host, before = engine.scheduler.kv, engine.executor._runner.host, engine.stats.cached_tokens
    assert run(engine, texts[:1], first_id=100, most=8) == expected[:1]
    loaded = hosted(engine)["loaded"]
    assert loaded and engine.stats.cached_tokens - before == 64 - again(options)
    emptied(engine)
    request = Request(99, texts[0], params(0), max_tokens=1)
    kv.match(request)
    group %= len(kv.groups)
    slots = [kv.fetches.tier.slot(part_name(each, group)) for each in request.hashes]
    host.block([slot for slot in slots if slot is not None][-1])[7] ^= 4
    assert run(engine, texts, first_id=200, most=8) == expected
    assert hosted(engine)["bad"] == 1
    sizes, moved = [each.block_bytes for each in host.groups], engine.stats.kv_tier_bytes["host"]
    assert min(sizes) * hosted(engine)["loaded"] <= moved["loaded"] <= max(sizes) * hosted(engine)["loaded"]
    engine.close()


def test_a_restart_finds_on_the_disk_what_was_used(options: dict[str, Any], tmp_path: Path) -> None:
    texts = prompts(5)[1:]
    expected = cold_each(options, texts, 8)
    tiers = {"num_kv_blocks": 100, "host_kv_memory": "64MiB", "disk_kv_path": str(tmp_path / "kv")}
    for turn in range(2):
        config = EngineConfig(**{"max_model_len": 192, "max_num_seqs": 8, "check_invariants": True, **options, **tiers})
        engine = Engine(config)
        cached = engine.stats.cached_tokens
        for index, text in enumerate(texts):
            assert run(engine, [text], first_id=10 * index, most=8) == [expected[index]]
            if index == 0:
                assert engine.stats.cached_tokens - cached == (64 - again(options)) * turn
        disk = engine.stats.kv_tiers["disk"]
        assert disk["loaded"] if turn else disk["stored"] >= 3
        engine.close()


def test_another_engine_computes_prompts_of_every_length(options: dict[str, Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret of this cluster")
    key.chmod(0o600)
    texts = [
        [3 + (5 * length + 7 * i * i + i // 3) % 60 for i in range(length)] for length in (15, 33, 64, 65, 130, 150)
    ]
    expected = cold_each(options, texts, 8)
    sizes = {"num_kv_blocks": 120, "max_model_len": 192, "check_invariants": True, "host_kv_memory": "64MiB"}
    options = {**options, **sizes, "cluster_key_file": str(key)}
    prefill = Prefill(**options, max_num_batched_tokens=48)
    engine = decoder(options, prefill)
    try:
        for index, text in enumerate(texts):
            assert run(engine, [text], first_id=index, most=8) == [expected[index]]
        assert peer(engine) == prefill.exported > 5 and not hosted(engine)["bad"]
        whole = [(length - 1) // 16 * 16 for length in LENGTHS if length > 16]
        assert engine.stats.cached_tokens == sum(whole) - again(options) * len(whole)
    finally:
        engine.close()
        prefill.close()


@pytest.mark.parametrize("kind", ["some windows", "states"])
def test_a_directory_is_refused_by_name(folders: dict[str, dict[str, Any]], kind: str) -> None:
    pool = {"kv_role": "both", "kv_directory": "redis://127.0.0.1:1/0"}
    with pytest.raises(ConfigError, match=r"kv_directory=.* is not supported yet"):
        make(folders[kind], num_kv_blocks=60, host_kv_memory="16MiB", **pool)


@pytest.mark.slow
def test_ranks_that_share_heads_save_and_load_their_parts_of_every_groups_blocks(
    folders: dict[str, dict[str, Any]],
) -> None:
    options = {**folders["some windows"], "tensor_parallel_size": 2}
    expected = cold(options, prompts(), 40)
    engine = make(options, num_kv_blocks=24, host_kv_memory="64MiB")
    assert run(engine, prompts()) == expected
    counts = hosted(engine)
    assert engine.stats.preemptions and counts["loaded"] and not counts["bad"]
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"), [("states", {"tensor_parallel_size": 2}), ("some windows", {"pipeline_parallel_size": 2})]
)
def test_ranks_of_which_nobody_knows_who_has_what_are_refused_by_name(
    folders: dict[str, dict[str, Any]], kind: str, more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"host_kv_memory or kv_role with .* is not supported yet"):
        make({**folders[kind], **more}, num_kv_blocks=60, host_kv_memory="16MiB")
