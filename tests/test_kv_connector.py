"""A KV connector of one's own: found by its name, and no token changes whatever it keeps, loses or spoils."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples.kv_connector import DictionaryConnector

from quire import LLM, EngineConfig, SamplingParams
from quire.errors import ConfigError

OPTIONS: dict[str, Any] = {"num_kv_blocks": 40, "threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 256}
PROMPTS = [[100 + number, *range(200, 400)] for number in range(6)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.9, seed=1, logprobs=2)
MADE: list[DictionaryConnector] = []
"""Those of this module's tests, the latest one last."""


class Kept(DictionaryConnector):
    """One that can be looked at."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        MADE.append(self)


class Spoiling(Kept):
    """One that gives other bytes, or none, half of the time."""

    def get(self, name: bytes) -> bytes | None:
        value = super().get(name)
        if value is None or name[0] % 2:
            return value
        return bytes([value[0] ^ 1]) + value[1:] if name[1] % 2 else None


def texts(llm: LLM) -> list[Any]:
    """Tokens and log-probabilities of the prompts, one after the other, twice."""
    results = [llm.generate([prompt], PARAMS)[0] for _ in range(2) for prompt in PROMPTS]
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in results]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with LLM("demo", **OPTIONS, prefix_cache="off") as llm:
        return texts(llm)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with entry points."""
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[quire.kv_connectors]\nkept = {__name__}:Kept\nlost = {__name__}:Lost\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"async_scheduling": False}])
def test_with_a_connector_tokens_and_log_probabilities_are_those_without(
    installed: None, plain: list[Any], options: dict[str, Any]
) -> None:
    if "kv_cache_dtype" in options:
        with LLM("demo", **OPTIONS, **options, prefix_cache="off") as llm:
            plain = texts(llm)
    with LLM("demo", **OPTIONS, **options, kv_connector="kept", check_invariants=True) as llm:
        assert texts(llm) == plain
        assert llm.stats.cached_tokens >= 6 * 192 and any("KV connector: kept" in note for note in llm._engine.notes)
    assert MADE[-1].values


def test_other_bytes_and_lost_values_are_computed(plain: list[Any]) -> None:
    extra = {"kv_connector": f"{__name__}:Spoiling", "kv_connector_extra_config": {"blocks": 60}}
    with LLM("demo", **OPTIONS, **extra, check_invariants=True) as llm:
        assert texts(llm) == plain
    assert MADE[-1].most == 60


def test_with_a_key_file_values_outlive_the_engine(plain: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    options = {**OPTIONS, "kv_connector": f"{__name__}:Kept", "cluster_key_file": str(key)}
    with LLM("demo", **options) as llm:
        assert texts(llm) == plain
    values = MADE[-1].values
    with LLM("demo", **options) as llm:
        MADE[-1].values |= values
        first = llm.generate([PROMPTS[0]], PARAMS)[0]
        assert (first.outputs[0].token_ids, first.outputs[0].logprobs) == plain[0] and first.cached_tokens == 192


def test_a_connector_that_cannot_be_made_is_an_error_that_says_why(installed: None) -> None:
    for name, extra, message in [
        ("missing", {}, r"kv_connector=missing is not installed \(kept, lost"),
        ("lost", {}, "kv_connector=lost cannot be imported: .*Lost"),
        ("no_such_module:Any", {}, "cannot be imported: No module named 'no_such_module'"),
        ("kept", {"blocks": "many"}, "kv_connector=kept cannot be made with .*ValueError"),
        ("builtins:dict", {}, "made a dict; it must make a quire.kv.connector.Connector"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **OPTIONS, kv_connector=name, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_memory": "64MiB"}, "with host_kv_memory is not supported"),
        ({"tensor_parallel_size": 2}, "with 2 ranks is not supported"),
        ({"prefix_cache": "off"}, "with prefix_cache=off is not supported"),
    ],
)
def test_what_a_connector_does_not_go_with_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", kv_connector="kept", **options)
    with pytest.raises(ConfigError, match="set kv_connector"):
        EngineConfig(model="demo", kv_connector_extra_config={})


def test_without_anything_elsewhere_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; from quire import LLM\n"
        "with LLM('demo', threads=1, num_kv_blocks=40) as llm: llm.generate(['a'])\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('quire.kv.', 'quire.engine.tiers'))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["quire.kv.layout", "quire.kv.published"]
