"""The scripts in `benchmarks/`: each runs, small, and counts what it says; README sections are replaced whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import (
    ablation,
    batching,
    chunked_prefill,
    kv,
    kv_waste,
    prefix_cache,
    profile_step,
    quality,
    run_all,
    scheduler,
)
from benchmarks.common import Options, Result, json_line


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(workdir=str(tmp_path), threads=1, quick=True)


def test_continuous_batching_makes_the_same_tokens_in_fewer_steps(options: Options) -> None:
    static, continuous = batching.run(options).raw
    assert static["output_tokens"] == continuous["output_tokens"]
    assert continuous["steps"] < static["steps"]


def test_chunks_bound_how_much_of_a_prompt_is_in_one_step(options: Options) -> None:
    whole, *chunked, aimed = chunked_prefill.run(options).raw
    assert len(whole["gaps_s"]) == 1
    assert [len(run["gaps_s"]) for run in chunked] == [5, 32]  # 256 tokens, 64 - 8 or 16 - 8 a step
    assert aimed["gaps_s"]


@pytest.mark.slow
def test_radix_finds_what_hash_does_and_partial_blocks_too(options: Options) -> None:
    cached = {(row["cache"], row["block_size"]): row["cached_tokens"] for row in prefix_cache.run(options).raw}
    assert cached["off", 16] == 0
    assert 0 < cached["hash", 64] < cached["hash", 16] < cached["radix", 16]
    assert cached["radix", 64] == cached["radix", 16]


@pytest.mark.slow
def test_tiers_serve_a_prefix_from_everywhere_and_bring_back_who_gave_way(options: Options) -> None:
    rows = [row["what"] for row in kv.run(options).raw]  # which sees to it that tokens are the same
    # One more row, where a step had nothing beside it: on a busy machine there may be none.
    rows = [row for row in rows if not row.endswith("where nothing moves then")]
    assert len(rows) == 25 and sum("from the disk" in row for row in rows) == 1
    assert sum("while 3 prompts of 256 tokens arrive" in row for row in rows) == 9


def test_paged_kv_wastes_less_the_smaller_its_blocks(options: Options) -> None:
    rows = kv_waste.run(options).raw
    waste = [1 - row["mean_used"] / row["mean_held"] for row in rows]
    assert waste == sorted(waste)
    assert waste[0] < 0.04
    assert waste[-1] > 0.5


@pytest.mark.slow
def test_what_quantization_changes_grows_as_bits_get_fewer(options: Options) -> None:
    rows = {row["numbers"]: row for row in quality.run(options).raw if row["model"] == "embedded"}
    int8, int4 = rows["int8 weights"], rows["int4 weights in groups of 64, head int8"]
    assert rows["bf16"]["mean_divergence"] == 0 < int8["mean_divergence"] < int4["mean_divergence"] < 0.2
    assert rows["bf16"]["agreement"] == 1 and int4["agreement"] > 0.6
    assert rows["bf16"]["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]


def test_scheduler_figures_have_their_goals_beside_them(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_start", lambda *args: None)  # starting processes is slow, and only times
    result = scheduler.run(options)
    assert [row["goal_s"] for row in result.raw] == [1e-3, 1.5e-3, None, 2e-3, None, 2e-6, 2e-6, None, None]
    assert all(0 < row["median_s"] <= row["worst_s"] for row in result.raw)


@pytest.mark.slow
def test_a_profile_divides_a_step_into_its_parts(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_step, "RUNS", ((3, False), (3, True)))
    result = profile_step.run(options)
    assert [(row["weights"], row["sampled"]) for row in result.raw] == [
        ("bf16", False),
        ("bf16", True),
        ("int8", False),
        ("int4", False),
    ]
    expected = [f"products with weights: {name}" for name in ("qkv", "output", "gate_up", "down", "head")]
    expected += ["other kernels: attend", "sampling: sample", "sampling: Python of the sampler"]
    rest = ("scheduler", "runner", "preparing the batch", "between the layers' kernels", "around the head")
    expected += [f"Python and the rest: {part}" for part in rest]
    for row in result.raw:
        assert all(row["parts_ms"][part] > 0 for part in expected)
    assert {len(row) for row in result.rows} == {len(result.headings)}


def test_a_part_of_a_profile_is_without_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(profile_step.time, "perf_counter", lambda: next(now))
    profile = profile_step.Profile()
    inner = profile.timed("kernels", "inner", lambda: None)
    profile.timed("rest", "outer", inner)()
    assert profile.seconds == {("kernels", "inner"): 3.0, ("rest", "outer"): 3.0}


@pytest.mark.parametrize("mechanism", ablation.WITHOUT)
def test_a_mechanism_of_the_self_tuning_is_off_for_a_while(mechanism: str) -> None:
    places = [(owner, name) for owner, name, _ in ablation.WITHOUT[mechanism]]
    whole = [getattr(*place) for place in places]
    with ablation.without(mechanism):
        assert all(getattr(*place) is not was for place, was in zip(places, whole, strict=True))
    assert all(getattr(*place) is was for place, was in zip(places, whole, strict=True))


def test_an_ablation_compares_each_mechanism_with_the_whole(options: Options) -> None:
    made = ablation.run(options, only=["drop_drafting"], simulate=False)
    assert [raw["what"] for raw in made.raw] == [ablation.WHOLE, "drop_drafting"]
    [whole], [part] = (raw["changes"].values() for raw in made.raw)
    assert whole[0] == 0 and whole[1] > 0.9 and 0 < part[1] < 1.5


def test_a_section_is_replaced_and_the_rest_is_kept() -> None:
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    once = run_all.with_section(text, "x", "new")
    assert once == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    assert run_all.with_section(once, "x", "new") == once
    with pytest.raises(ValueError, match="no markers"):
        run_all.with_section(text, "z", "new")


def test_the_readme_has_a_place_for_every_benchmark() -> None:
    text = run_all.README.read_text("utf-8")
    for name in run_all.NAMES:
        assert run_all.with_section(text, name, "new") != text


def test_a_result_is_a_markdown_table_with_its_raw_figures() -> None:
    result = Result(("what", "s"))
    result.add(("one", "1.0"), what="one", seconds=1.02)
    assert result.table() == "| what | s |\n| --- | --: |\n| one | 1.0 |"
    assert json.loads(json_line(result.raw[0])) == {"what": "one", "seconds": 1.02}
