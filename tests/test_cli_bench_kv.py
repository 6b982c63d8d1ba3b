"""The command `quire bench kv`: what it prints, that its figures are what they are said to be, and wrong options."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.bench.kv import COMPUTED, Budget, PrefixTimer, Row, crossover, verdict
from quire.bench.kv_plot import svg, text_plot
from quire.bench.kv_prefill import prefill_process
from quire.cli.bench_kv import _temporary
from quire.cli.main import main
from quire.errors import BenchmarkError, ConfigError
from quire.kv.disk import open_folder
from quire.llm import LLM
from tests.forks import spawn_rank
from tests.oracle import save_checkpoint
from tests.warm import COMMAND, WarmProcess

SMALL = ["--num-kv-blocks", "64", "--max-model-len", "512", "--host-kv-memory", "16MiB", "--threads", "1"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine's process has torch when it begins."""
    monkeypatch.setattr("quire.bench.kv_prefill.spawn_quietly", spawn_rank)


@pytest.mark.usefixtures("forked")
def test_the_command_prints_a_table_crossovers_and_a_plot_and_writes_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--json", str(tmp_path / "kv.json"), "--plot", str(tmp_path / "kv.svg")]
    prefixes = ["--prefixes", "16,64,128,2048", "--repeat", "1"]
    assert main(["bench", "kv", "demo", *prefixes, *files, *SMALL]) == 0
    out = capsys.readouterr().out
    heading, *rows = [line for line in out.splitlines() if re.match(r" *(tokens|16|64|128)  ", line)][:4]
    names = ["computed, ms", "pool, ms", "host, ms", "disk, ms", "shared memory, ms", "socket, ms"]
    assert [row.split()[0] for row in rows] == ["16", "64", "128"]
    ends = [heading.index(name) + len(name) for name in names]
    for row in rows:
        assert [match.end() for match in re.finditer(r"[\d.,]+(?= |$)|-", row)][1:] == ends
    assert rows[0].split()[3:] == ["-"] * 4, "one block alone is computed"
    assert "-" not in rows[1] + rows[2]
    assert "left out: 2,048 tokens: context, pool and tiers have room for " in out
    for name in ("the pool", "host memory", "the disk", "another engine by shared memory", "another engine by socket"):
        assert f"loading from {name} " in out
    assert "time to first token, ms: C computed, P pool" in out
    lines = [json.loads(line) for line in (tmp_path / "kv.json").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [16, 64, 128]
    assert list(lines[1]["seconds"]) == ["computed", "pool", "host", "disk", "shared_memory", "socket"]
    assert lines[0]["seconds"]["socket"] is None and lines[1]["seconds"]["socket"] > 0
    ElementTree.parse(tmp_path / "kv.svg")


def test_what_a_killed_run_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("quire-bench-kv-killed", "quire-bench-kv-running", "quire-kv"):
        (tmp_path / name).mkdir()
        _, _, lock = open_folder(str(tmp_path / name))
        if not name.endswith("running"):
            os.close(lock)
    with _temporary() as folder:
        assert {each.name for each in tmp_path.iterdir()} == {"quire-bench-kv-running", "quire-kv", Path(folder).name}


def test_what_there_is_no_time_for_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--from", "pool", "--prefixes", "16,32,64", "--seconds", "0.0001", "--repeat", "1", "--json"]
    assert main(["bench", "kv", "demo", *said, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [16]
    assert re.search(r"left out: 32 to 64 tokens: 32 would take about \d+ s, and --seconds is 0.0001", err)


def test_a_disk_of_ones_own_is_used_and_what_an_earlier_run_left_there_is_not_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = ["--from", "disk", "--prefixes", "64", "--repeat", "1", "--disk-kv-path", str(tmp_path / "kv")]
    sizes = []
    for _ in range(2):
        assert main(["bench", "kv", "demo", *said, *SMALL]) == 0
        assert "-" not in capsys.readouterr().out.splitlines()[1]
        sizes.append(sum(file.stat().st_size for file in (tmp_path / "kv").glob("*.kv")))
    assert sizes[1] == 2 * sizes[0] > 0, "other prompts were computed and stored"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no model was given"),
        (["demo", "--from", "tape"], "--from 'tape' is unknown; known: pool, host, disk, shared_memory, socket"),
        (["demo", "--prefixes", "16,many"], "--prefixes '16,many' is not a list of token counts"),
        (["demo", "--prefixes", "0"], "--prefixes '0': 0 is out of range; allowed: 1 or more"),
        (["demo", "--repeat", "0"], "--repeat 0 is out of range; allowed: 1 or more"),
        (["demo", "--seconds", "0"], "--seconds 0 is out of range; allowed: more than 0"),
        (["demo", "--plot", "kv.png"], "--plot kv.png: the name must end in .svg"),
        (["demo", "--plot", "/no/such/kv.svg"], "--plot /no/such/kv.svg: the folder /no/such does not exist"),
        (["demo", "--role", "decode"], "kv_role is set by this command"),
        (["demo", "--prefix-cache", "off"], "prefix_cache=off: this benchmark measures the prefix cache"),
        (["demo", "--from", "disk", "--disk-kv-path", "/dev/null", *SMALL], "disk_kv_path: /dev/null"),
        (["demo", "--form", "pool"], "unknown option --form; did you mean --from?"),
        (["demo", "--from", "pool", "--prefixes", "4096", *SMALL], "--prefixes: the shortest has 4,096 tokens"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kv", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_an_engine_that_does_not_start_says_why() -> None:
    says = r"engine that is to compute prompts did not start: .*less than one block"
    with pytest.raises(ConfigError, match=says), prefill_process({"model": "demo", "host_kv_memory": "1"}):
        pass


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 64, "num_hidden_layers": 2}),
        ("qwen3_next", {}),
    ],
)
def test_of_models_with_windows_or_states_what_a_prefix_needs_comes_from_everywhere(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", architecture, **config)
    tiers = {"host_kv_memory": "64MiB", "disk_kv_path": str(tmp_path / "kv")}
    with LLM(str(folder), threads=1, num_kv_blocks=64, max_model_len=512, **tiers) as llm:
        row = PrefixTimer(llm).measure(160, ["pool", "host", "disk"], 2, lambda what: None)
    assert all(row.seconds[source] for source in ("computed", "pool", "host", "disk")), row


def test_a_token_that_is_not_the_computed_one_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", threads=1, num_kv_blocks=64, max_model_len=512, host_kv_memory="16MiB") as llm:
        timer = PrefixTimer(llm)
        timed = timer._timed
        monkeypatch.setattr(timer, "_timed", lambda source, prompt, token: timed(source, prompt, token + 1))
        with pytest.raises(BenchmarkError, match="the token after a prefix from host memory is"):
            timer.measure(64, ["host"], 1, lambda what: None)


def test_a_tier_that_has_nothing_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", threads=1, num_kv_blocks=64, max_model_len=512, host_kv_memory="16MiB") as llm:
        timer = PrefixTimer(llm)
        monkeypatch.setattr(timer, "clear", lambda host=False: PrefixTimer.clear(timer, host=True))
        row = timer.measure(64, ["pool", "host"], 1, lambda what: None)
        assert row.seconds["pool"] and row.seconds["host"] is None


def endless(folder: Path) -> WarmProcess:
    """The command, which will be at its first row for ever."""
    command = ["bench", "kv", "demo", "--repeat", "1000000", *SMALL]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return WarmProcess(COMMAND, *command, environment={**os.environ, "TMPDIR": str(folder)}, **streams)


def test_ctrl_c_leaves_no_process_and_no_file_behind(tmp_path: Path) -> None:
    with endless(tmp_path) as process:
        assert b"tokens" in process.stdout.readline()  # both engines run
        [child] = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert not Path(f"/proc/{child}").exists()
    assert not list(tmp_path.iterdir())


def test_the_other_engine_dies_with_a_command_that_is_killed(tmp_path: Path) -> None:
    with endless(tmp_path) as process:
        assert b"tokens" in process.stdout.readline()
        [child] = children(process.pid)
        process.kill()
        process.wait(60)
    deadline = time.monotonic() + 60
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rows(*times: tuple[int, float, float | None]) -> list[Row]:
    return [Row(tokens, {COMPUTED: computed, "disk": loaded}) for tokens, computed, loaded in times]


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        (rows((16, 1.0, None), (32, 2.0, 3.0), (64, 4.0, 3.5), (128, 8.0, 4.0)), 64),
        (rows((16, 2.0, 1.0), (32, 2.0, 3.0), (64, 4.0, 3.0)), 64),
        (rows((16, 2.0, 1.0), (32, 3.0, 1.0)), 16),
        (rows((16, 1.0, 1.0), (32, 2.0, 2.0)), None),
        (rows((16, 2.0, 1.0), (32, 2.0, None)), None),
    ],
)
def test_the_crossover_is_where_loading_is_faster_from_then_on(measured: list[Row], first: int | None) -> None:
    assert crossover(measured, "disk") == first
    says = "at none of these lengths is" if first is None else f"from {first} tokens on,"
    assert verdict(measured, "disk").startswith(says)


def test_a_budget_expects_what_grows_faster_than_the_length_to_go_on_so() -> None:
    now = 0.0
    budget = Budget(100.0, lambda: now)
    assert budget.allows(1 << 40), "the first one is measured in any case"
    budget.took(1024, 2.0)
    assert budget.expected(2048) == pytest.approx(4.0)
    budget.took(2048, 6.0)
    assert budget.expected(4096) == pytest.approx(18.0) and budget.allows(4096)
    now = 83.0
    assert not budget.allows(4096)


def test_a_plot_has_each_curve_where_it_belongs() -> None:
    text = text_plot(rows((16, 0.001, None), (32, 0.01, 0.01), (64, 1.0, 0.1)))
    legend, *lines = text.splitlines()
    assert "C computed, D disk, * several" in legend
    top, bottom = lines[0], lines[13]
    assert top.rstrip().endswith("C") and bottom.count("C") == 1 and sum("*" in line for line in lines) == 1
    column = {mark: next(line.index(mark) for line in lines if mark in line) for mark in "CD"}
    assert column["C"] == column["D"], "64 tokens"
    root = ElementTree.fromstring(svg("<demo>", rows((16, 0.001, None), (32, 0.01, 0.01), (64, 1.0, 0.1))))
    assert [child.text for child in root if child.tag.endswith("title")] == ["<demo>"]
    assert sum(child.tag.endswith("circle") for child in root) == 5
