"""`make gpu-check` where there is no GPU: its counting, its tables, its processes, and rehearsals: of one workload, and
of all of it (slow)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.gpu import bound, clocks, engines, parity, parity_rows, plan, sweep_products, table, unwaited, workloads
from benchmarks.gpu.__main__ import CHECKS, begin, failed, install, main, output, steps_left, write
from benchmarks.gpu.determinism import PRODUCT
from benchmarks.gpu.engines import bench
from benchmarks.gpu.job import Job
from benchmarks.gpu.records import NAME, append, read
from benchmarks.gpu.run import Run
from benchmarks.gpu.worker import CHECKED_CHOICE, SECTIONS, use_constants

from quire.bench.ceilings import Work
from quire.core.step import Span
from quire.models.random_checkpoint import RandomCheckpoint, model_config
from quire.models.registry import build_model
from quire.ops import Kernels
from quire.ops.triton import linear_dense, splits
from quire.ops.triton.kernels import TritonKernels
from quire.runner.device_forward import DeviceForward

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str]:
    """Exit code, folder and output of a rehearsal."""
    return rehearse(tmp_path_factory.mktemp("out"))


def rehearse(out: Path, *options: str) -> tuple[int, Path, str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--seconds", "1000", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    return done.returncode, out, done.stdout + done.stderr


# -- the rehearsal -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_workload_can_be_rehearsed_by_itself(tmp_path: Path) -> None:
    code, out, printed = rehearse(tmp_path, "--only", "A")
    records = read(out / NAME)
    assert code == 0, printed
    ended = {record["section"]: record["status"] for record in records if record["kind"] == "section"}
    assert ended == dict.fromkeys(("device", "A 0.6B", "A 14B"), "done")
    figures = [one for one in records if one["kind"] == "figure"]
    assert [(one["workload"], one["model"]) for one in figures] == [("A", "0.6B"), ("A", "14B")]
    assert all(one["share"] > 0 and one["host_ms"] > 0 for one in figures)
    page = (out / "gpu.md").read_text()
    assert "CPU (rehearsal)" in page and "| A | 14B |" in page and "failed" not in page
    assert page.splitlines()[1] in printed


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute, where nothing else runs
def test_a_rehearsal_runs_every_section_and_passes_every_check(rehearsal: tuple[int, Path, str]) -> None:
    code, out, printed = rehearsal
    records = read(out / NAME)
    assert code == 0, printed
    ended = {record["section"]: record["status"] for record in records if record["kind"] == "section"}
    assert ended == dict.fromkeys(SECTIONS, "done")
    checks = [record for record in records if record["kind"] == "check"]
    assert len(checks) > 100 and all(check["ok"] for check in checks)
    assert {check["section"] for check in checks} == {name for name in SECTIONS if name.startswith(CHECKS)}


@pytest.mark.slow
def test_a_rehearsal_measures_every_workload_against_its_bound(rehearsal: tuple[int, Path, str]) -> None:
    _, out, _ = rehearsal
    figures = [one for one in read(out / NAME) if one["kind"] == "figure"]
    assert {(one["workload"], one["model"]) for one in figures} == {
        *((workload, model) for workload in "ABHI" for model in ("0.6B", "14B")),
        *((workload, "0.6B") for workload in "CDE"),
        ("G", "14B"),
        *(("F", model) for model in ("Qwen3-30B-A3B", "DeepSeek-V2-Lite", "DeepSeek-V3")),
    }
    hidden = [one for one in figures if one["setting"].endswith("what the host does meanwhile")]
    assert hidden and all(0 < one["value"] == one["host_ms"] for one in hidden)
    figures = [one for one in figures if one not in hidden]
    assert all(one["share"] > 0 and one["host_ms"] > 0 for one in figures if one["workload"] in "ABCDG")
    assert all(one["share"] > 0 and one["value"] > 0 for one in figures if one["workload"] in "FHI")
    assert all(one["beside_us"] > 0 for one in figures if one["workload"] in "HI")
    assert all(0 < one["median_ms"] <= one["p99_ms"] <= one["worst_ms"] for one in figures if one["workload"] == "C")
    assert all(
        list(one["phases"].values()) == sorted(one["phases"].values()) for one in figures if one["workload"] == "E"
    )


@pytest.mark.slow
def test_a_rehearsal_drafts_from_a_recording_and_says_what_it_brings(rehearsal: tuple[int, Path, str]) -> None:
    _, out, _ = rehearsal
    figures = figures_of("G", out)
    for batch in (1, 3):
        none, off, drafted = (one for one in figures if one["setting"].startswith(f"{batch} x 8, "))
        assert [one["setting"].partition(", ")[2] for one in (none, off, drafted)] == [
            "no speculation",
            "speculate=False",
            "4 drafts, 80% right",
        ]
        assert none["tokens_a_step"] == off["tokens_a_step"] == 1.0 and "ratio" not in none
        assert 1.5 < drafted["tokens_a_step"] <= 5
        assert drafted["ratio"] == pytest.approx(drafted["value"] / none["value"])


@pytest.mark.slow
def test_a_rehearsal_says_what_it_costs_to_draft_with_a_head(rehearsal: tuple[int, Path, str]) -> None:
    _, out, _ = rehearsal
    figures = figures_of("G heads", out)
    for batch in (1, 3):
        found = [one for one in figures if one["setting"].startswith(f"{batch} x 8, ")]
        assert [one["setting"].partition(", ")[2] for one in found] == [
            "without a head",
            "a head on the device, speculate=False",
            "a head on the device, 4 drafts",
            "a head that is waited for, 4 drafts",
        ]
        assert found[0]["tokens_a_step"] == found[1]["tokens_a_step"] == 1.0
        assert all(1.0 <= one["tokens_a_step"] < 1.5 and one["step_ms"] > 0 for one in found[2:])
        assert all(one["ratio"] == pytest.approx(one["value"] / found[0]["value"]) for one in found[1:])


def figures_of(section: str, out: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = read(out / NAME)
    return [one for one in records if one["kind"] == "figure" and one["section"] == section]


@pytest.mark.slow
def test_a_rehearsal_writes_its_tables(rehearsal: tuple[int, Path, str]) -> None:
    _, out, printed = rehearsal
    page = (out / "gpu.md").read_text()
    assert page.startswith(table.BEGIN) and page.endswith(f"{table.END}\n")
    assert "CPU (rehearsal)" in page
    assert "| B | 14B | prefill of 96 |" in page
    assert "With `deterministic=False` A 0.6B runs at" in page
    assert "failed" not in page
    assert page.splitlines()[1] in printed


# -- what is counted -----------------------------------------------------------------------------------------

WORK = Work(
    weight_bytes=1200, body_parameters=500, head_parameters=100, kv_bytes=8, attention_ops=12, windows=(None, None, 4)
)
"""Two layers that see all, and one that sees 4 tokens."""


def test_a_decode_reads_weights_and_context_and_multiplies_with_both() -> None:
    cost = bound.step_cost(WORK, [Span(1, 9, [7], num_sampled=1), Span(2, 2, [7], num_sampled=1)])
    assert cost.num_bytes == 1200 + 8 * (10 + 10 + 4 + 3 + 3 + 3) + 8 * 3 * 2
    assert cost.products == 2 * 2 * (500 + 100)
    assert cost.attention == 12 * (10 + 10 + 4 + 3 + 3 + 3)


def test_a_part_of_a_prompt_reads_no_head_and_its_context_once() -> None:
    cost = bound.step_cost(WORK, [Span(1, 2, [7] * 5)])
    assert cost.num_bytes == 1000 + 8 * (7 + 7 + 7) + 8 * 3 * 5  # the first row sees 4 back to 0, the last ends at 7
    assert cost.products == 2 * 5 * 500
    assert cost.attention == 12 * (2 * (3 + 4 + 5 + 6 + 7) + (3 + 4 + 4 + 4 + 4))


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (3, 1), (2, 7), (50, 3)])
def test_pairs_are_what_each_row_sees(start: int, rows: int, window: int | None) -> None:
    seen = [range(max(0, p + 1 - window) if window else 0, p + 1) for p in range(start, start + rows)]
    work = Work(0, 1, 1, 1, 1, (window,))
    cost = bound.step_cost(work, [Span(1, start, [0] * rows)])
    assert cost.attention == sum(len(one) for one in seen)
    assert cost.num_bytes == len(set().union(*seen)) + rows


def test_the_bound_is_the_slower_of_reading_and_computing() -> None:
    rates = bound.Rates(copy=100.0, matmul=1000.0)
    reading, computing = bound.Cost(500, 1000, 1000), bound.Cost(100, 2000, 1000)
    assert (bound.seconds(reading, rates), bound.limit(reading, rates)) == (5.0, "memory")
    assert (bound.seconds(computing, rates), bound.limit(computing, rates)) == (3.0, "compute")


@pytest.mark.parametrize(("shape", "billions", "gigabytes"), [("qwen3-0.6b", 0.596, 1.19), ("qwen3-14b", 14.77, 27.98)])
def test_the_models_measured_have_the_sizes_of_their_names(
    shape: str, billions: float, gigabytes: float, tmp_path: Path
) -> None:
    """The published counts; a step reads all of them but 14B's embedding table."""
    (tmp_path / "config.json").write_text(json.dumps(model_config(shape)))
    checkpoint = RandomCheckpoint(tmp_path, device="meta")
    sizes = {name: entry.num_bytes for name, entry in checkpoint.entries.items()}
    assert sum(sizes.values()) / 2e9 == pytest.approx(billions, abs=0.01)
    read = sum(sizes.values()) - (sizes["model.embed_tokens.weight"] if "lm_head.weight" in sizes else 0)
    assert read / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_a_random_checkpoint_needs_no_file_and_is_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config("qwen3-tiny")))
    checkpoint = RandomCheckpoint(tmp_path, spread=0.5)
    first, again = (checkpoint.tensor("model.layers.1.mlp.up_proj.weight") for _ in range(2))
    assert torch.equal(first, again)
    assert first.dtype == torch.bfloat16 and first.float().std() == pytest.approx(0.5, rel=0.1)
    assert not torch.equal(first, checkpoint.tensor("model.layers.0.mlp.up_proj.weight"))
    model, _ = build_model(checkpoint, "auto", None, Kernels(), None)
    assert model.num_parameters * 2 == sum(entry.num_bytes for entry in checkpoint.entries.values())


# -- the parts -----------------------------------------------------------------------------------------------


def test_every_value_of_a_switch_meets_every_value_of_each_other_one() -> None:
    for first, second in itertools.combinations(zip(*PRODUCT, strict=True), 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product(set(first), set(second)))


def test_sections_to_run_are_those_that_a_worker_knows_in_time() -> None:
    planned = [section for step in plan.STEPS for section in step]
    assert sorted(section.name for section in planned) == sorted(SECTIONS)
    assert plan.TOTAL_SECONDS <= 40 * 60
    alone = [max(section.seconds for section in step) for step in plan.STEPS]
    assert sum(alone) + max(alone) < plan.TOTAL_SECONDS  # where the checks have fewer cores than there are
    assert [[section.name for section in step] for step in plan.chosen(["C"], quick=False)] == [["device"], ["C"]]
    with pytest.raises(ValueError, match="unknown section 'H'; known: device, parity, "):
        plan.chosen(["H"], quick=False)


def test_a_tree_is_read_alike_by_the_reference_and_on_the_device() -> None:
    paths = parity.tree([0, 0, 1, 3])
    assert paths == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    step = parity.Step([(3, 2), (14, 5)], 16, pad_rows=1, pad_spans=1, paths={1: paths})
    host, device = step.host(), step.device_spans("cpu")
    assert host.positions.tolist() == [3, 4, 14, 15, 15, 16, 17]
    at = [3, 4, 14, 15, 16, 17, 18]
    blocks = [int(step.tables[span, place // 16]) for span, place in zip([0] * 2 + [1] * 5, at, strict=True)]
    assert host.slots.tolist() == [block * 16 + place % 16 for block, place in zip(blocks, at, strict=True)]
    assert host.trees is not None and device.trees is not None
    assert host.trees.bases.tolist() == [5, 14] and host.in_trees() == [False, True]
    assert host.trees.paths.tolist() == [[0] * 4] * 3 + [[0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 3, 0], [0, 1, 3, 4]]
    assert device.trees.depths.tolist() == [-1, -1, 0, 1, 1, 2, 3, -1]
    assert device.trees.paths[:7].tolist() == host.trees.paths.tolist()
    assert int(device.trees.bases[1]) == 14 and device.trees.bases.dtype == torch.int32


def test_a_difference_is_seen_against_its_own_row() -> None:
    wanted = torch.tensor([[100.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = wanted.clone()
    found[1, 2] += 0.02
    assert parity.difference(found, wanted) == pytest.approx(0.01)
    assert parity.difference(wanted, wanted) == 0
    assert parity.difference(found[:1], wanted) == float("inf")
    found[0, 0] = float("nan")
    assert not parity.difference(found, wanted) <= 1e9


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_checks_on_a_gpu_are_in_the_data_type_of_their_name(name: str, tmp_path: Path) -> None:
    """A rehearsal takes fp16 in place of bf16, which the interpreter does not multiply."""
    rigs = [parity.Rig(Job("", "cpu", rehearse, None, tmp_path, tmp_path, 0.0), name) for rehearse in (False, True)]
    assert [str(rig.dtype) for rig in rigs] == [
        {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[name],
        {"bf16": "torch.float16", "fp16": "torch.float16", "fp32": "torch.float32"}[name],
    ]


def test_a_kernel_that_errs_fails_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernels, "activate", lambda self, x, how: Kernels().activate(x, how) * 1.01)
    job = Job("parity rows fp16", "cpu", True, None, tmp_path, tmp_path / "records", time.monotonic() + 100)
    parity_rows.run(job, "fp16")
    checks = [json.loads(line) for line in job.records.read_text().splitlines()]
    assert {check["name"].partition(",")[0] for check in checks if not check["ok"]} == {"fp16: silu_mul"}


@pytest.mark.slow
def test_nothing_of_an_engine_is_left_when_the_next_one_is_made(tmp_path: Path) -> None:
    """Each takes most of a GPU's memory."""
    job = Job("C", "cpu", True, None, tmp_path, tmp_path / "records", time.monotonic() + 100)
    with bench(job, "qwen3-tiny", max_num_seqs=4) as under:
        held = [weakref.ref(one) for one in (under.engine.model, under.engine.kv_cache[0], under.engine)]
        under.add(20, 3)
        under.run()
        assert under.tokens == {0: 3} and len(under.meter.plans) >= 3
    assert [one() for one in held] == [None] * 3


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert [workloads.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 100.0, 198.0, 200.0]


# -- processes -----------------------------------------------------------------------------------------------


DONE = json.dumps({"kind": "section", "section": "writes", "status": "done", "seconds": 1})
CODE = {
    "writes": f"import sys; open(sys.argv[1], 'a').write('{DONE}\\n')",
    "crashes": "import os; print('last words', flush=True); os.abort()",
    "hangs": "import subprocess; subprocess.run(['sleep', '600'])",
}


class ShortRun(Run):
    """Processes that do as their section's name says."""

    def command(self, names: Any, seconds: float) -> list[str]:
        return [sys.executable, "-c", CODE[names[0]], str(self.file)]


def test_a_section_that_crashes_or_hangs_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.run.GRACE_SECONDS", 0.0)
    run = ShortRun(tmp_path / NAME, tmp_path, {}, False, time.monotonic() + 100)
    run.side_by_side([["crashes"], ["hangs"], ["writes"]], dict.fromkeys(CODE, 3.0))
    ended = {record["section"]: record for record in run.records()}
    assert {name: record["status"] for name, record in ended.items()} == {
        "crashes": "crashed",
        "hangs": "out of time",
        "writes": "done",
    }
    assert "last words" in ended["crashes"]["tail"]


ENDED_FROM_OUTSIDE = """
import sys, time
from pathlib import Path
from benchmarks.gpu.__main__ import end_with_all
from benchmarks.gpu.run import Run

class OfPids(Run):
    def command(self, names, seconds):
        return [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]

end_with_all()
folder = Path(sys.argv[1])
OfPids(folder / "records", folder, {}, False, time.monotonic() + 600).side_by_side([["one"]], {"one": 600.0})
"""


def test_sections_do_not_outlive_the_process_that_started_them(tmp_path: Path) -> None:
    log = tmp_path / "log of one"
    with subprocess.Popen([sys.executable, "-c", ENDED_FROM_OUTSIDE, str(tmp_path)], cwd=ROOT) as process:
        while not (log.exists() and log.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.02)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_sections_are_skipped_once_time_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path / NAME, tmp_path, {}, False, time.monotonic() + 5)
    records = run.everything(plan.chosen(["parity", "A"], quick=False))
    assert {record["status"] for record in records} == {"skipped"}
    assert failed(records)
    assert not failed([record for record in records if not record["section"].startswith("parity")])


def test_half_a_line_of_a_lost_process_does_no_harm(tmp_path: Path) -> None:
    run = Run(tmp_path / NAME, tmp_path, {}, False, 0.0)
    run.file.write_text(
        '{"kind": "check", "ok": true}\n{"kind": "che{"kind": "check", "ok": false}\n{"kind": "figure"}\n{"k'
    )
    assert run.records() == [{"kind": "check", "ok": True}, {"kind": "figure"}]


def test_processes_that_record_side_by_side_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    """However long a line is: the end of a log is some thousand characters."""
    with ThreadPoolExecutor(4) as pool:
        for number in range(40):
            pool.submit(append, tmp_path / NAME, {"kind": "section", "tail": "\n" * 20000, "number": number})
    assert sorted(record["number"] for record in read(tmp_path / NAME)) == list(range(40))


def test_records_are_kept_where_no_table_can_be_made_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.KEPT", tmp_path / "kept")
    append(tmp_path / NAME, {"kind": "figure"})
    write(tmp_path, read(tmp_path / NAME), keep=True)
    assert read(tmp_path / "kept" / NAME) == [{"kind": "figure"}]
    assert "the tables cannot be made" in (tmp_path / "gpu.md").read_text()


def test_sections_that_were_cut_off_are_left_for_the_next_time() -> None:
    ends = {"device": "done", "A 0.6B": "failed", "A 14B": "out of time"}
    records = [{"kind": "section", "section": name, "status": status} for name, status in ends.items()]
    assert steps_left(plan.chosen(["A", "C"], quick=False), records) == 2


def test_a_program_that_never_ends_or_says_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output("print(5)", {}) == "5"
    assert output("import os; os._exit(3)", {}) is None
    assert capsys.readouterr().err == "ended with 3\n"
    assert output("import os; os._exit(3)", {}, quiet=True) is None
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("benchmarks.gpu.__main__.START_SECONDS", 0.01)
    assert output("import time; time.sleep(60)", {}) is None
    assert "not done after 0.01 s" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_there_is_one_clear_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.end_with_all", lambda: None)
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main([]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the torch of ") and "finds no GPU" in last and "--rehearse" in last


# -- going on ------------------------------------------------------------------------------------------------


def test_a_run_that_was_cut_off_goes_on_with_what_was_not_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the section in whose middle it was cut off, nothing is kept."""
    first, second = tmp_path / "first" / NAME, tmp_path / "second" / NAME
    begin(first, "H100; sources 1", [])
    for record in (
        {"kind": "machine", "section": "device", "copy_rate": 1.0},
        {"kind": "section", "section": "device", "status": "done"},
        {"kind": "figure", "section": "A", "value": 1},
        {"kind": "section", "section": "C", "status": "out of time"},
        {"kind": "check", "section": "parity", "ok": False},
        {"kind": "section", "section": "parity", "status": "failed"},
    ):
        append(first, record)
    wanted = [record for record in read(first)[1:] if record["section"] in ("device", "parity")]
    begin(second, "H100; sources 1", [second, first])
    assert read(second) == [{"kind": "run", "key": "H100; sources 1"}, *wanted]
    assert "done before: device, parity" in capsys.readouterr().out
    begin(second, "H100; sources 2", [second, first])
    assert read(second)[1:] == []  # other sources, or another device
    begin(first, "H100; sources 1", [first], fresh=True)
    assert read(first)[1:] == []


def test_sections_that_are_done_do_not_run_again(tmp_path: Path) -> None:
    run = ShortRun(tmp_path / NAME, tmp_path, {}, False, time.monotonic() + 100)
    tables: list[int] = []
    run.ended = lambda: tables.append(len(run.records()))
    steps = [[plan.Section("writes", "A", 60)], [plan.Section("hangs", "B", 1)]]
    append(run.file, {"kind": "section", "section": "hangs", "status": "done", "seconds": 1})
    ended = [record["section"] for record in run.everything(steps)]
    assert ended == ["hangs", "writes"]
    assert tables == [2, 2]  # written after each process and each step, since the next one may be cut off


def test_what_a_sweep_has_chosen_is_what_later_sections_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, programs = linear_dense.SHORT._replace(stages=2), 7
    monkeypatch.setattr(linear_dense, "SHORT", linear_dense.SHORT)
    monkeypatch.setattr(splits, "WORKERS", splits.WORKERS)
    chosen = ((linear_dense, {"SHORT": list(tile)}), (splits, {"WORKERS": programs}))
    use_constants([{"kind": "constants", "module": module.__name__, "values": values} for module, values in chosen])
    assert (tile, programs) == (linear_dense.SHORT, splits.WORKERS)
    product = linear_dense.DenseProduct(torch.empty(8, 64, dtype=torch.bfloat16), None)
    assert product._short == tile


@pytest.mark.parametrize("found", [{"kind": "check", "ok": False}, {"kind": "section", "status": "crashed"}])
def test_constants_that_fail_their_check_are_not_used_but_those_that_were_swept_later(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = splits.WORKERS
    monkeypatch.setattr(splits, "WORKERS", programs)

    def chosen(section: str, value: int) -> dict[str, Any]:
        values = {"WORKERS": value}
        return {"kind": "constants", "section": section, "module": splits.__name__, "values": values}

    checked = found | {"section": CHECKED_CHOICE}
    use_constants([{"kind": "run", "key": "a"}, chosen("sweep attention", 7), checked])
    assert programs == splits.WORKERS
    use_constants([chosen("sweep attention", 7), checked, chosen("sweep quantized", 8)])
    assert splits.WORKERS == 8


def test_a_choice_of_tiles_that_cannot_be_compiled_is_one_less_but_that_of_the_sources_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, others = sweep_products.choices()[0], sweep_products.choices()[1:3]

    def timed(job: Job, sources: bool) -> dict[Any, float]:
        pair = linear_dense.SHORT, linear_dense.TALL
        assert sources == (pair == chosen)
        if pair in failing:
            raise RuntimeError("out of resource: shared memory")
        return dict.fromkeys("ab", 1.0 if sources else 3.0)

    monkeypatch.setattr(sweep_products, "_timed", timed)
    job = Job("sweep products", "cpu", True, None, tmp_path, tmp_path / NAME, time.monotonic() + 100)
    failing = others[:1]
    sweep_products.run(job)
    found = read(job.records)
    assert ["failed" in one for one in found[:-2]] == [True, False, False]
    assert [one["factor"] for one in found[1:-2]] == pytest.approx([1.0, 3.0])
    assert [one["values"] for one in found[-2:]] == [{"SHORT": list(chosen[0])}, {"TALL": list(chosen[1])}]
    assert all(one["kept"] for one in found[-2:])
    failing = [chosen]
    with pytest.raises(RuntimeError, match="shared memory"):
        sweep_products.run(job)


@pytest.mark.quick("True")
@pytest.mark.parametrize("waits", [False, True])
def test_a_launch_that_waits_for_the_device_fails_its_check(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, run = DeviceForward._batches, engines.Bench.run

    def waiting(self: DeviceForward, inputs: torch.Tensor, *more: Any) -> Any:
        if waits:
            inputs[0].item()
        return places(self, inputs, *more)

    def bench_of_launches(*args: Any, **options: Any) -> Any:
        return bench(*args, **options | {"cuda_graphs": "off"})

    def then_waiting(self: engines.Bench, *args: Any) -> None:  # warm, so the next launches are watched
        run(self, *args)
        monkeypatch.setattr(DeviceForward, "_batches", waiting)
        monkeypatch.setattr(engines.Bench, "run", run)

    monkeypatch.setattr(unwaited, "STEPS", 4)
    monkeypatch.setattr(unwaited, "bench", bench_of_launches)
    monkeypatch.setattr(engines.Bench, "run", then_waiting)
    job = Job("unwaited", "cpu", True, None, tmp_path, tmp_path / NAME, time.monotonic() + 100)
    unwaited.run(job)
    (check,) = read(job.records)
    assert check["ok"] is not waits, check
    assert not waits or "looks at what is on the device" in check["name"]


def test_clocks_are_those_of_a_device_at_work() -> None:
    looks = clocks.Looks()
    for text in ("1980, 2619, 51, 400.5, 0x0", "1200, 2619, 70, 699.0, 0x4", "345, 2619, 30, 70.0, 0x1"):
        looks.take(text)
    assert looks.found == {
        "least_sm": 1200.0,
        "most_sm": 1980.0,
        "least_memory": 2619.0,
        "most_memory": 2619.0,
        "most_temperature": 70.0,
        "most_power": 699.0,
        "reasons": 4,
    }
    with pytest.raises(ValueError):
        looks.take("no devices were found")


# -- tables --------------------------------------------------------------------------------------------------


def test_the_page_has_the_markers_and_keeps_what_stands_around_them() -> None:
    page = (ROOT / "benchmarks" / "gpu.md").read_text()
    replaced = table.with_section(page, "new")
    assert f"{table.BEGIN}\nnew\n{table.END}" in replaced
    assert replaced.partition(table.BEGIN)[0] == page.partition(table.BEGIN)[0]
    with pytest.raises(ValueError, match="no markers"):
        table.with_section("nothing", "new")


def test_a_report_names_what_failed_and_what_determinism_costs() -> None:
    figure = {"kind": "figure", "workload": "B", "model": "0.6B", "unit": "ms a step", "share": 0.5, "bound": "memory"}
    records: list[dict[str, Any]] = [
        figure | {"setting": "64 x 1,024", "value": 2.0, "aim": "80% of the bound", "met": False},
        figure | {"setting": "64 x 1,024, deterministic=False", "value": 4.0},
        {"kind": "check", "section": "parity rows bf16", "name": "silu", "worst": 0.3, "tolerance": 0.1, "ok": False},
        {"kind": "section", "section": "C", "status": "failed", "seconds": 3, "tail": "Trace\nValueError: no"},
    ]
    text = table.report(records, "2026-01-01")
    assert "| B | 0.6B | 64 x 1,024 | 2 ms a step | 50% (memory) |  | 80% of the bound | **no** |" in text
    assert "With `deterministic=False` B 0.6B 64 x 1,024 runs at 50% of its speed; the aim is at most 110 %." in text
    assert "- **failed**: parity rows bf16: silu: 0.3, allowed 0.1" in text
    assert "- **C: failed** after 3 s. ValueError: no" in text
    assert "the device could not be measured" in text


# -- the bundle ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_bundle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bundle", ROOT / "scripts" / "gpu_bundle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_engine_runs_without_the_packages_of_the_server_and_the_command_line(gpu_bundle: ModuleType) -> None:
    assert {"fastapi", "uvicorn", "uvloop", "httptools", "zmq", "prometheus_client", "httpx2"} <= {
        *gpu_bundle.SERVERS_OWN
    }
    modules = gpu_bundle.engine_modules()
    assert {"quire", "torch", "triton", "tokenizers", "blake3", "msgspec"} <= modules
    assert not modules & {*gpu_bundle.SERVERS_OWN, *gpu_bundle.COMMAND_LINES_OWN}
    lacking = gpu_bundle.lacking(modules)
    assert {"tokenizers", "blake3", "msgspec"} <= lacking
    assert not lacking & {"torch", "numpy", "triton", "jinja2", "sympy", "quire"}


def test_missing_packages_come_from_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "needed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", "answer = 42")
        wheel.writestr("needed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1.0\n")
        wheel.writestr("needed-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("needed-1.0.dist-info/RECORD", "")
    environment = {"PYTHONPATH": str(ROOT / "src")}
    monkeypatch.setattr("benchmarks.gpu.__main__.BUNDLE", tmp_path / "none")
    install(tmp_path / "site", environment)
    assert environment == {"PYTHONPATH": str(ROOT / "src")}
    monkeypatch.setattr("benchmarks.gpu.__main__.BUNDLE", tmp_path)
    install(tmp_path / "site", environment)
    command = [sys.executable, "-c", "import needed, quire; print(needed.answer)"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "42\n"
