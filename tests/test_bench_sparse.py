"""`benchmarks/sparse.py`: it runs, small, compares what it says, and counts bytes and operations by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import cells, sparse
from benchmarks.common import Options, Result

from quire.bench.ceilings import Machine

MACHINE = Machine(threads=1, read_rate=1e9, matrix_rate=1e10, int8_rate=1e10)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(workdir=str(tmp_path), threads=1, quick=True)


@pytest.fixture
def one_call_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs, and each call is said to take a second longer than the one before it in its turn."""

    def in_turns(calls: dict[str, Any], options: Options) -> dict[str, float]:
        for call in calls.values():
            call()
        return {name: 1.0 + place for place, name in enumerate(calls)}

    monkeypatch.setattr(sparse, "in_turns", in_turns)


@pytest.fixture
def parts(one_call_a_second: None, options: Options) -> Result:
    result = Result(("what", "Quire", "of the bound", "beside", "ratio"))
    sparse.parts(result, options, MACHINE)
    return result


def test_each_part_runs_and_has_a_row_as_wide_as_the_table(parts: Result) -> None:
    assert {len(row) for row in parts.rows} == {len(parts.headings)}
    kinds = [raw["what"] for raw in parts.raw]
    assert kinds == ["experts"] * 4 + ["latent attention"] * 2 + ["sparse choice"] * 2 + [
        "latent decode step",
        "latent cache",
        "prompt",
    ]
    assert all(raw["bound_s"] > 0 for raw in parts.raw if raw["what"] != "latent cache")


def test_grouped_experts_stand_beside_the_same_products_and_beside_plain_torch(parts: Result) -> None:
    one, plain = (row for row in parts.rows if "8 rows" in row[0])
    assert one[0].endswith("looped, the same products") and one[4] == "2.00"
    assert plain[0].endswith("looped, plain torch") and plain[4] == "3.00"


def test_experts_are_bound_by_the_bytes_of_those_chosen_or_by_the_operations_of_all_pairs(parts: Result) -> None:
    alone = next(raw for raw in parts.raw if raw["what"] == "experts" and raw["rows"] == 1)
    assert alone["experts_used"] == 2
    assert alone["bound_s"] == pytest.approx(2 * 3 * 64 * 32 * 2 / 1e9)
    eight = next(raw for raw in parts.raw if raw["what"] == "experts" and raw["rows"] == 8)
    reading, computing = eight["experts_used"] * 3 * 64 * 32 * 2 / 1e9, 2 * 8 * 2 * 3 * 64 * 32 / 1e10
    assert eight["bound_s"] == pytest.approx(max(reading, computing))


def test_latent_attention_reads_a_row_of_the_cache_once_for_all_heads(parts: Result) -> None:
    alone, eight = (raw for raw in parts.raw if raw["what"] == "latent attention")
    assert (alone["num_bytes"], alone["operations"]) == (256 * 80 * 2, 2 * 4 * 256 * (80 + 64))
    assert (eight["num_bytes"], eight["operations"]) == (8 * alone["num_bytes"], 8 * alone["operations"])
    assert alone["bound_s"] == pytest.approx(256 * 80 * 2 / 1e9)


def test_a_choice_of_positions_reads_index_keys_once_for_all_rows(parts: Result) -> None:
    alone, more = (raw for raw in parts.raw if raw["what"] == "sparse choice")
    assert (alone["num_bytes"], alone["operations"]) == (512 * 16 * 2, 2 * 512 * 4 * 16)
    assert (more["num_bytes"], more["operations"]) == (alone["num_bytes"], 16 * alone["operations"])
    assert alone["bound_s"] == pytest.approx(512 * 16 * 2 / 1e9)


def test_the_cache_that_is_allocated_has_the_computed_size(parts: Result) -> None:
    [cache] = [raw for raw in parts.raw if raw["what"] == "latent cache"]
    assert cache["held"] == cache["computed"] == 2 * 80 * 2
    assert cache["full"] == 2 * 4 * (32 + 16) * 2


def test_a_prompt_is_compared_with_the_expanded_form(parts: Result) -> None:
    [prompt] = [raw for raw in parts.raw if raw["what"] == "prompt"]
    assert prompt["expanded"] is True
    assert parts.rows[-1][0].endswith("beside expanded")


@torch.inference_mode()
def test_only_one_of_the_two_models_expands_and_they_agree(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: list[int] = []
    from quire.layers.latent import LatentAttention

    inner = LatentAttention.expanded

    def watched(self: LatentAttention, *arguments: Any) -> torch.Tensor:
        expanded.append(self.layer)
        return inner(self, *arguments)

    monkeypatch.setattr(LatentAttention, "expanded", watched)
    found: dict[str, torch.Tensor] = {}

    def in_turns(calls: dict[str, Any], options: Options) -> dict[str, float]:
        found.update({name: call() for name, call in calls.items()})
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(sparse, "in_turns", in_turns)
    sparse.parts(Result(("",)), options, MACHINE)
    assert expanded == [0, 1]
    torch.testing.assert_close(found["absorbed"], found["the cheaper form"], rtol=0.05, atol=0.05)


def test_the_cells_of_both_shapes_come_first(
    options: Options, one_call_a_second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"bench": 30.0, "run_transformers.py": 20.0}

    def lines(command: list[str]) -> list[dict[str, Any]]:
        [engine] = [name for name in rates if any(word.endswith(name) for word in command)]
        assert command[command.index("--cells") + 1] == "2x16+8,1x64+1"
        return [{"cell": "c", "prefill_tok_s": rates[engine], "prefill_share": 0.5}]

    monkeypatch.setattr(cells, "_lines", lines)
    monkeypatch.setattr(sparse, "measure_machine", lambda *arguments, **more: MACHINE)
    result = sparse.run(options)
    assert result.rows[:2] == [
        ("qwen3-moe-tiny, c, prefill tok/s", "30.0", "50%", "20.0", "1.50"),
        ("deepseek-v2-tiny, c, prefill tok/s", "30.0", "50%", "20.0", "1.50"),
    ]
    assert len(result.rows) == 13
