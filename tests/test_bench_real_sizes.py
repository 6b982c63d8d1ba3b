"""`benchmarks/real_sizes.py`: it runs, small; an engine that is not there is a row that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import real_sizes
from benchmarks.common import Options
from benchmarks.peers.recipes import PeerError, Recipe

from quire.bench.ceilings import Machine


@pytest.mark.slow
def test_an_engine_runs_in_a_process_and_one_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def environment(recipe: Recipe, work: Path) -> Path:
        if recipe is real_sizes.LLAMA:
            raise PeerError("no network")
        return whole(recipe, work)

    whole = real_sizes.environment
    monkeypatch.setenv("QUIRE_PEERS", str(tmp_path / "peers"))
    monkeypatch.setattr(real_sizes, "environment", environment)
    monkeypatch.setattr(real_sizes, "measure_machine", lambda *_, **__: Machine(1, 1e9, 1e10, 1e10))
    result = real_sizes.run(Options(workdir=str(tmp_path), threads=1, quick=True))
    assert [row[:2] for row in result.rows[1::2]] == [("qwen3-tiny", "llama.cpp"), ("qwen3-moe-tiny", "llama.cpp")]
    assert all(row[2] == "not available: no network" and len(row) == len(result.headings) for row in result.rows[1::2])
    for row, raw in zip(result.rows[::2], [raw for raw in result.raw if raw], strict=True):
        assert len(row) == len(result.headings) and all(cell["tok_s"] > 0 for cell in raw["cells"])
        assert raw["peak_bytes"] > 50 << 20 and raw["file_bytes"] > 100 << 10
