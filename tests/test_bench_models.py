"""`benchmarks/models.py`: it runs, small, and its weights are in the format that it says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks import models
from benchmarks.common import Options

from quire.bench.ceilings import Machine


def test_it_runs_and_counts_the_bytes_of_the_experts_that_a_token_has(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(models, "measure_machine", lambda *_, **__: Machine(1, 1e9, 1e10, 1e10))
    result = models.run(Options(workdir=str(tmp_path), threads=1, quick=True))
    [row], [raw] = result.rows, result.raw
    assert row[0].startswith("gpt-oss-20b") and raw["seconds"] > 0
    experts = 2 * 8 * (2 * 96 * 64 + 64 * 96) * 17 // 32
    biases = 2 * 8 * (2 * 96 + 64) * 2
    idle = (experts + biases) * 6 // 8
    assert raw["weight_bytes"] - raw["active_bytes"] == idle
    assert raw["bound_s"] >= raw["active_bytes"] / 1e9


def test_its_experts_are_in_mxfp4_and_the_same_whenever_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(models.GPT_OSS_20B | models.TINY))
    checkpoint = models.InMxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    first, second = checkpoint.coded(name), checkpoint.coded(name)
    assert first is not None and second is not None and torch.equal(first.restored(), second.restored())
    assert first.restored().std() > 0.005 and len({*first.codes.flatten().tolist()}) > 200
    for other in ("model.layers.1.mlp.experts.3.up_proj.bias", "lm_head.weight"):
        assert checkpoint.coded(other) is None
