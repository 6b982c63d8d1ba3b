"""`python -m benchmarks.peers`: what is timed, what tables say, and what happens when an engine is not there."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import __main__ as driver
from benchmarks.peers import protocol, recipes, structured, table
from benchmarks.peers.recipes import QUIRE, PeerError, Recipe, environment
from benchmarks.peers.worker import Worker

from quire.bench import ceilings
from quire.bench.ceilings import Machine, Work
from quire.bench.cells import Cell


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SQUARE", 64)
    monkeypatch.setattr(ceilings, "INT8_SQUARE", 64)


# The clock


def test_prefill_ends_when_every_request_has_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 11.0, 13.0, 14.0])
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: next(now))
    watch = protocol.Watch(batch=2)
    watch.start()
    watch.step(started=1, made=1)
    watch.step(started=2, made=3)
    watch.step(started=2, made=4)
    assert watch.times(output=2) == {"first_s": 3.0, "rest_s": 1.0, "rest_tokens": 1}


@pytest.mark.parametrize(("started", "made"), [(1, 4), (2, 3), (2, 5)])
def test_an_engine_that_drops_or_invents_tokens_is_an_error(started: int, made: int) -> None:
    watch = protocol.Watch(batch=2)
    watch.start()
    watch.step(started, made)
    with pytest.raises(RuntimeError, match=rf"made {made} tokens, where 2 x 2 were asked for"):
        watch.times(output=2)


# The tables

WORK = Work(1000, 100, 0, kv_bytes=0, attention_ops=0, windows=(None,))


def lines_of(*runs: tuple[str, str, float]) -> list[dict[str, Any]]:
    machine = asdict(Machine(1, read_rate=1000.0, matrix_rate=1e9, int8_rate=1e9))
    shape = {
        "cell": "decode-1",
        "batch": 1,
        "prompt": 4,
        "output": 3,
        "prefill_tok_s": 9.0,
        "load_s": 1.0,
        "version": "7",
    }
    lines: list[dict[str, Any]] = [
        {"kind": "machine", "weights": "bf16", "machine": machine},
        {"kind": "work", "weights": "bf16", "work": asdict(WORK)},
    ]
    for engine, weights, rate in runs:
        lines.append({"kind": "run", "weights": weights, "engine": engine, "decode_tok_s": rate, **shape})
    return json.loads(json.dumps(lines))  # as they are read from the file


def test_a_table_compares_the_best_rounds_with_the_best_peer_and_the_ceiling() -> None:
    text = table.tables(
        lines_of(
            ("Quire", "bf16", 0.5), ("Quire", "bf16", 0.9), ("llama.cpp", "bf16", 0.6), ("transformers", "bf16", 0.4)
        )
    )
    assert "| Quire 7 | 0.9 | 1.0 s |" in text
    assert "| *ceiling* | *1.0* |  |" in text
    assert "| **Quire / the best of the others** | **1.50** (llama.cpp) |  |" in text
    assert "| **Quire, of the ceiling** | 90% |  |" in text


def test_kinds_of_weights_have_a_table_each_and_engines_say_their_own_name_for_them() -> None:
    text = table.tables(
        lines_of(("Quire", "int8", 2.0), ("llama.cpp", "int8", 1.0), ("Quire", "bf16", 1.0), ("Quire", "Q4_K_M", 1.0))
    )
    assert "| the same file, Q4_K_M | decode-1 | loading |" in text
    assert text.index("| bf16 weights | decode-1 | loading |") < text.index("| 8-bit weights | decode-1 | loading |")
    assert "| llama.cpp Q8_0 7 | 1.0 | 1.0 s |" in text


def test_what_is_not_available_is_in_the_table_with_the_reason() -> None:
    gone = {"kind": "unavailable", "weights": "bf16", "engine": "transformers", "reason": "no network"}
    text = table.tables([*lines_of(("Quire", "bf16", 1.0)), gone])
    assert "| transformers | not available | – |" in text
    assert "- transformers: not available: no network" in text


# Engines


def test_an_environment_is_made_once_and_again_when_its_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(recipes, "run", lambda command, *_: (commands.append(command), _make_venv(command)))
    old, new = (Recipe("Engine", "run_engine", (package,), {}, drop=("b",)) for package in ("a==1", "a==2"))
    assert environment(old, tmp_path) == environment(old, tmp_path)
    assert len(commands) == 3  # venv, install, uninstall
    environment(new, tmp_path)
    assert len(commands) == 6
    assert "a==2" in commands[4]


def _make_venv(command: list[str]) -> None:
    if "venv" in command:
        Path(command[-1]).mkdir(parents=True)


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    recipe = Recipe("Engine", "run_nothing", (), {})
    with pytest.raises(PeerError, match=r"it ended: .*No module named benchmarks\.peers\.run_nothing"):
        Worker(recipe, "bf16", Path(sys.executable), tmp_path, 1, 512, tmp_path)
    with pytest.raises(PeerError, match="could not be started: No such file"):
        Worker(recipe, "bf16", tmp_path / "python", tmp_path, 1, 512, tmp_path)


@pytest.mark.slow
def test_quire_is_measured_and_a_peer_that_cannot_be_installed_is_reported(
    tmp_path: Path, quick_ceilings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(recipe: Recipe, work: Path) -> Path:
        if recipe is QUIRE:
            return Path(sys.executable)
        raise PeerError("no network")

    monkeypatch.setattr(driver, "environment", refuse)
    options = ["--only", "quire,vllm", "--weights", "bf16", "--cells", "2x8+3,1x8+1", "--shape", "qwen3-tiny"]
    monkeypatch.setattr(sys, "argv", ["peers", *options, "--work", str(tmp_path), "--threads", "1", "--repeat", "1"])
    assert driver.main() == 0
    text = capsys.readouterr().out
    assert "- vLLM (CPU, eager): not available: no network" in text
    lines = [json.loads(line) for line in (tmp_path / "last.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["unavailable", "machine", "work", "run", "run", "machine"]
    assert [line["cell"] for line in lines[3:5]] == ["2x8+3", "1x8+1"]
    assert lines[3]["decode_tok_s"] > 0
    assert "decode_tok_s" not in lines[4]


def test_a_part_of_a_comparison_is_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--only", "quire", "--write"])
    with pytest.raises(SystemExit):
        driver.main()
    assert "is no comparison and is not written" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-moe-1b"])
def test_a_models_tables_are_written_only_where_the_readme_has_a_place(
    shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "SECTIONS", {"qwen3-0.6b": "peers"})
    monkeypatch.setattr(sys, "argv", ["peers", "--shape", shape, "--write"])
    if shape in driver.SECTIONS:
        assert driver._arguments()[0].shape == shape
        return
    with pytest.raises(SystemExit):
        driver._arguments()
    assert "README.md has no place for qwen3-moe-1b, only for qwen3-0.6b" in capsys.readouterr().err


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Raw lines and README that stand in for the repository's, with places for two models' tables."""
    raw, readme = tmp_path / "raw.jsonl", tmp_path / "README.md"
    sparse = driver.SECTIONS["qwen3-moe-1b"]
    readme.write_text(
        f"a\n<!-- begin peers -->\n<!-- end peers -->\n<!-- begin {sparse} -->\n<!-- end {sparse} -->\nb\n"
    )
    monkeypatch.setattr(driver, "RAW", raw)
    monkeypatch.setattr(driver.run_all, "README", readme)
    return raw, readme


ON = {"cpu": "c", "capability": "AVX2", "threads": 1, "torch": "2", "python": "3", "date": "2026-01-01"}


def write_rate(weights: str, rate: float, cpu: str = "c", **more: str) -> None:
    runs = [line for line in lines_of(("Quire", weights, rate)) if line["kind"] == "run"]
    driver._write([line | {"on": ON | {"cpu": cpu}} | more for line in runs])


def test_measuring_one_kind_of_weights_again_keeps_the_others(written: tuple[Path, Path]) -> None:
    raw, readme = written
    for weights, rate in (("bf16", 1.0), ("int8", 2.0), ("bf16", 3.0)):
        write_rate(weights, rate)
    assert [json.loads(line)["decode_tok_s"] for line in raw.read_text().splitlines()] == [2.0, 3.0]
    text = readme.read_text()
    assert text.startswith("a\n") and text.endswith("b\n")
    assert "| Quire 7 | 3.0 | 1.0 s |" in text
    assert "| Quire 7 | 2.0 | 1.0 s |" in text
    assert "Measured on 2026-01-01: c (AVX2)" in text


def test_each_model_has_tables_of_its_own_which_others_leave_alone(written: tuple[Path, Path]) -> None:
    raw, readme = written
    write_rate("bf16", 1.0)  # as lines were before they said a shape
    write_rate("bf16", 2.0, shape="qwen3-moe-1b")
    write_rate("bf16", 3.0, shape="qwen3-0.6b")
    assert [json.loads(line)["decode_tok_s"] for line in raw.read_text().splitlines()] == [2.0, 3.0]
    dense, _, sparse = readme.read_text().partition("<!-- end peers -->")
    assert "| Quire 7 | 3.0 |" in dense and "| Quire 7 | 2.0 |" not in dense
    assert "| Quire 7 | 2.0 |" in sparse and "| Quire 7 | 3.0 |" not in sparse


def test_a_processor_has_tables_of_its_own_where_the_readme_compares_it(
    written: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "OTHER_PROCESSORS", {("qwen3-0.6b", "d"): driver.SECTIONS["qwen3-moe-1b"]})
    for cpu, rate in (("c", 1.0), ("d", 2.0), ("e", 3.0)):
        write_rate("bf16", rate, cpu)
    first, _, second = written[1].read_text().partition("<!-- end peers -->")
    assert "| Quire 7 | 3.0 |" in first and "| Quire 7 | 1.0 |" not in first
    assert "| Quire 7 | 2.0 |" in second


@pytest.mark.parametrize("name", [*driver.SECTIONS.values(), *driver.OTHER_PROCESSORS.values(), structured.SECTION])
def test_the_readme_has_a_place_for_the_tables(name: str) -> None:
    text = driver.run_all.README.read_text("utf-8")
    assert driver.run_all.with_section(text, name, "new") != text


def test_why_an_engine_is_not_available_is_written_without_places_of_this_machine(tmp_path: Path) -> None:
    error = PeerError("it would not", tmp_path / "install.log")
    assert str(error) == f"it would not (see {tmp_path / 'install.log'})"
    assert driver._unavailable(QUIRE, "bf16", error)["reason"] == "it would not"


@pytest.mark.slow
def test_structured_output_is_measured_and_checked_beside_a_peer_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(recipe: Recipe, work: Path) -> Path:
        if recipe is QUIRE:
            return Path(sys.executable)
        raise PeerError("no network")

    monkeypatch.setattr(structured, "environment", refuse)
    options = ["--only", "quire,vllm", "--shape", "qwen3-tiny", "--rows", "2", "--repeat", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["structured", *options, "--work", str(tmp_path)])
    assert structured.main() == 0
    text = capsys.readouterr().out
    assert "| vLLM (CPU, eager) | – | – | – | – | – | no network |" in text
    assert "| 2 of 2 ended of 2 |" in text


def test_only_replies_that_ended_and_meet_their_schema_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    schema = structured.ending(0)
    assert structured.valid([schema] * 3, [None, "{", '{"location": "Rome"}']) == 0
    assert capsys.readouterr().err.count("not valid") == 2
    whole = {"location": "Rome", "unit": "celsius", "days": 3, "include": [], "when": "2026-01-31", "note_0": "x"}
    assert structured.valid([schema], [json.dumps(whole)]) == 1


def test_a_run_line_holds_rates_in_tokens_per_second() -> None:
    line = driver._run_line(QUIRE, "bf16", Cell("c", 2, 10, 4), {"first_s": 4.0, "rest_s": 3.0, "rest_tokens": 6})
    assert (line["prefill_tok_s"], line["decode_tok_s"]) == (5.0, 2.0)
