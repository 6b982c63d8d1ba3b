"""`quire generate`: where prompts come from, where results go, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quire import LLM
from quire.cli.inputs import Job, read_jsonl, text_jobs
from quire.cli.main import main
from quire.cli.report import closing_rows
from quire.cli.terminal import visible
from quire.cli.views import JsonLines, Panels, ProgressBar, View, choose_view, shown_titles
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.engine.stats import EngineStats
from quire.errors import ConfigError, RequestError
from tests import warm
from tests.warm import COMMAND, WarmProcess

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FLAGS = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
PROMPTS = ["def add(a, b):\n", "import os\nimport "]


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, str]]:
    """What the model says to each prompt, by the Python interface."""
    with LLM("demo") as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        chat = llm.chat([{"role": "user", "content": PROMPTS[0]}], PARAMS)[0]
        texts = {output.prompt or "": output.outputs[0].text for output in outputs}
        yield texts | {"chat": chat.outputs[0].text, "ids": json.dumps(outputs[0].prompt_token_ids)}


# -- with the demo model ------------------------------------------------------------------------------------


def test_one_prompt_gives_its_text_and_nothing_else_on_standard_output(
    expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "demo", PROMPTS[0], *FLAGS, "--preset", "chat"]) == 0
    out, err = capsys.readouterr()
    assert out == expected[PROMPTS[0]] + "\n"
    plan, closing = err.splitlines()
    assert plan.startswith("demo: ") and "KV cache" in plan and "preset chat" in plan and "(-v shows more)" in plan
    assert closing.startswith("6 tokens in ")
    assert main(["generate", "demo", PROMPTS[0], *FLAGS, "--preset", "chat", "-v"]) == 0
    out, err = capsys.readouterr()
    assert out == expected[PROMPTS[0]] + "\n"
    for part in ("preset chat: max_num_seqs=16", "Memory plan", "time to first token", "prefill", "decode", "cached"):
        assert part in err
    assert "length 1" in err


def test_json_lines_in_and_out(expected: dict[str, str], tmp_path: Path) -> None:
    ids = json.loads(expected["ids"])
    entries: list[dict[str, Any]] = [
        {"id": "a", "prompt": PROMPTS[0]},
        {"prompt_token_ids": ids, "logprobs": 1, "n": 2},
        {"id": {"any": "json"}, "messages": [{"role": "user", "content": PROMPTS[0]}]},
        {"id": "a", "prompt": PROMPTS[1], "max_tokens": 2},
    ]
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    assert main(["generate", "demo", "--input", str(source), "--output", str(result), *FLAGS, "--quiet"]) == 0
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    assert sorted(str(line["id"]) for line in lines) == ["3", "a", "a", "{'any': 'json'}"]
    by_prompt = {str(line["prompt"] or line["id"]): line for line in lines}
    assert by_prompt[PROMPTS[0]]["outputs"][0]["text"] == expected[PROMPTS[0]]
    assert by_prompt["{'any': 'json'}"]["outputs"][0]["text"] == expected["chat"]
    assert by_prompt["{'any': 'json'}"]["messages"] == entries[2]["messages"]
    two = by_prompt["3"]
    assert two["prompt_token_ids"] == ids
    assert [choice["text"] for choice in two["outputs"]] == [expected[PROMPTS[0]]] * 2
    assert all(
        str(t) in entry for t, entry in zip(*(two["outputs"][0][k] for k in ("token_ids", "logprobs")), strict=True)
    )
    short = by_prompt[PROMPTS[1]]["outputs"][0]
    assert len(short["token_ids"]) == 2 and short["finish_reason"] == "length"
    assert expected[PROMPTS[1]].startswith(short["text"])


def test_each_line_of_standard_input_can_be_a_prompt(
    expected: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def a():\n\ndef b():\n"))
    assert main(["generate", "demo", "--lines", *FLAGS, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out.index("=== 1 (length)\ndef a():") < out.index("=== 2 (length)\ndef b():") and "=== 3" not in out
    assert err == ""


def test_a_prompt_that_the_model_refuses_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "fine"}\n{"prompt_token_ids": [1000000]}\n')
    assert main(["generate", "demo", "--input", str(source), "--output", "-", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{source}, line 2: " in err and "1000000" in err


def test_messages_that_the_template_refuses_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "fine"}\n{"messages": [{"role": 5}]}\n')
    result.write_text("of yesterday")
    assert main(["generate", "demo", "--input", str(source), "--output", str(result), "--quiet"]) == 2
    assert f"{source}, line 2: " in capsys.readouterr().err
    assert result.read_text() == "of yesterday"


def test_results_take_the_place_of_older_ones(tmp_path: Path) -> None:
    result = tmp_path / "out.jsonl"
    result.write_text("of yesterday\n" * 1000)
    assert main(["generate", "demo", *PROMPTS, *FLAGS, "--output", str(result), "--quiet"]) == 0
    assert sorted(json.loads(line)["id"] for line in result.read_text().splitlines()) == [0, 1]


def test_the_prompts_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link"
    source.write_text('{"prompt": "a"}\n')
    link.symlink_to(source)
    assert main(["generate", "demo", "--input", str(source), "--output", str(link)]) == 2
    assert "is also the input file" in capsys.readouterr().err
    with source.open() as stdin:
        done = warm.run("generate", "demo", "--input", "-", "--output", str(source), stdin=stdin)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert source.read_text() == '{"prompt": "a"}\n'


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.start.start", None)  # to call it would fail otherwise
    assert main(["generate", "demo", "x", "--output", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_log_probabilities_that_nobody_will_see_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    for extra, expected in (([], True), (["--output", "-"], False)):
        assert main(["generate", "demo", "x", *FLAGS, "--logprobs", "1", "--threads", "1", *extra]) == 0
        assert ("only written as JSON lines" in capsys.readouterr().err) is expected


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_one_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ("generate", "demo", "x", "--threads", "1", "--quiet", *FLAGS)
    with FULL.open("w") as full:
        done = warm.run(*prompt, stdout=full)
        assert (done.returncode, done.stderr) == (1, "quire: error: No space left on device\n")
        assert warm.run("generte", stderr=full).returncode == 2
    assert main([*prompt, "--output", str(FULL)]) == 1
    assert capsys.readouterr().err == "quire: error: --output /dev/full cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "message"),
    [
        (">&-", "generate demo x", 2, "standard output is closed"),
        ("<&-", "generate demo", 2, "standard input is closed"),
        ("<&-", "generate demo --input -", 2, "standard input is closed"),
        ("2>&-", "generte", 2, ""),
    ],
)
def test_closed_streams_are_told_clearly(redirection: str, arguments: str, code: int, message: str) -> None:
    command = ["sh", "-c", f'"$0" -m quire.cli.main {arguments} {redirection}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stdout == ""
    assert message in done.stderr and done.stderr.count("\n") == bool(message)


def start_endless() -> WarmProcess:
    """A command that has begun to stream; it checks its invariants so that it is slow, and far from its end."""
    command = ["generate", "demo", "x = [", "--ignore-eos", "--quiet", "--threads", "1", "--check-invariants"]
    process = WarmProcess(COMMAND, *command, stdout=subprocess.PIPE)
    assert process.stdout.read(1)  # it streams before it has ended
    return process


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with start_endless() as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_it_without_a_traceback() -> None:
    with start_endless() as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert err == b""


@pytest.mark.slow
def test_it_works_without_asserts(expected: dict[str, str]) -> None:
    command = [sys.executable, "-O", "-m", "quire.cli.main", "generate", "demo", "--quiet", "--threads", "1", *FLAGS]
    done = subprocess.run(command, input=PROMPTS[0] + "\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected[PROMPTS[0]] + "\n", "")


# -- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: is a list"),
        ("{}", "line 2: has no prompt"),
        ('{"prompt": "a", "messages": []}', "line 2: has prompt and messages"),
        ('{"prompt": 5}', "line 2: prompt: Expected `str`"),
        ('{"prompt": ""}', "line 2: prompt is empty"),
        ('{"prompt_token_ids": ["a"]}', r"line 2: prompt_token_ids: Expected `int`, got `str`"),
        ('{"messages": ["hi"]}', "line 2: messages: Expected `object`"),
        ('{"prompt": "a", "temprature": 1}', "line 2: unknown option 'temprature'; did you mean 'temperature'"),
        ('{"prompt": "a", "temperature": -1}', "line 2: temperature is -1"),
        ('{"prompt": "a", "temperature": NaN}', "line 2: not JSON"),
        ('{"prompt": "a", "id": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: lists or objects are nested"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, what: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(RequestError, match=what):
        read_jsonl(str(source), {}, chat=False)


def test_a_lines_own_parameters_win_over_those_of_all(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a\u2028b", "seed": 1}\n{"prompt": "c", "logit_bias": {"3": 1}}')
    first, second = read_jsonl(str(source), {"seed": 2, "max_tokens": 9}, chat=False)
    assert (first.params.seed, first.params.max_tokens, first.prompt) == (1, 9, "a\u2028b")
    assert (second.params.seed, second.params.logit_bias, second.id) == (2, {3: 1.0}, 2)


def test_a_byte_order_mark_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}', encoding="utf-8-sig")
    monkeypatch.setattr("sys.stdin", io.StringIO(source.read_text(encoding="utf-8")))
    for path in (str(source), "-"):
        assert read_jsonl(path, {}, chat=False)[0].prompt == "a"


def test_with_chat_a_prompt_is_a_users_message(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}')
    for job in (*read_jsonl(str(source), {}, chat=True), *text_jobs(["a"], {}, chat=True)):
        assert job.messages == [{"role": "user", "content": "a"}]
        assert job.title == "a\n"


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_jsonl(str(tmp_path / "gone"), {}, chat=False)
    with pytest.raises(ConfigError, match=r"--output .* cannot be written: Is a directory"):
        JsonLines([], str(tmp_path), None)
    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe")
    empty.write_text("\n\n")
    with pytest.raises(RequestError, match="is not text in UTF-8"):
        read_jsonl(str(binary), {}, chat=False)
    with pytest.raises(RequestError, match="has no prompts"):
        read_jsonl(str(empty), {}, chat=False)


def test_empty_standard_input_is_refused_with_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["generate", "demo"]) == 2
    assert "standard input is empty; give prompts as arguments" in capsys.readouterr().err


# -- views --------------------------------------------------------------------------------------------------


def jobs(*prompts: str, n: int = 1) -> list[Job]:
    return [Job(prompt=prompt, params=SamplingParams(n=n)) for prompt in prompts]


def output(text: str, reason: str | None = None, error: str | None = None) -> RequestOutput:
    choice = CompletionOutput(0, text=text, token_ids=[1] * len(text), finish_reason=reason, error=error)
    return RequestOutput("id", None, [5, 6], [choice], seed=1)


def terminal(height: int = 40) -> Console:
    return Console(force_terminal=True, width=80, height=height, file=io.StringIO(), color_system=None, markup=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def feed(view: View, *updates: tuple[int, RequestOutput]) -> None:
    with view:
        for index, update in updates:
            view.update(index, update)


def test_panels_show_all_prompts_while_they_grow_and_all_of_them_at_the_end() -> None:
    to = terminal()
    prompts = jobs("def one():", "def two():")
    view = Panels(prompts, to, ProgressBar(prompts, to))
    view.update(0, output(" pass"))
    growing = written(to)
    assert "def one(): pass" in growing and "def two():" in growing and "0/2 prompts" in growing
    feed(view, (1, output(" return", "stop")), (0, output(" pass\n" + "long\n" * 50, "length")))
    final = written(to)[len(growing) :]
    assert final.rindex("long") > final.rindex("def one(): pass")  # in full, and in the order of the prompts
    assert final.count("long") > 50 and final.index("def one(): pass") < final.rindex("def two(): return")
    assert max(len(line) for line in final.splitlines() if "\x1b" not in line) <= 80


def test_panels_need_room_on_the_screen() -> None:
    assert Panels.fits(6, terminal(height=24))
    assert not Panels.fits(8, terminal(height=12))
    assert not Panels.fits(100, terminal(height=1000))


def test_without_a_terminal_results_are_plain_and_in_the_order_of_the_prompts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = choose_view(jobs("a: ", "b: "), None, quiet=False)
    feed(view, (1, output("second", "stop")), (0, output("first", "error", "it broke")))
    assert capsys.readouterr().out == "=== 1 (error)\na: first[error: it broke]\n\n=== 2 (stop)\nb: second\n\n"


def test_leading_lines_that_all_prompts_share_are_not_shown() -> None:
    assert shown_titles(jobs("x\ny\na", "x\ny\nb")) == ["...\na", "...\nb"]
    assert shown_titles(jobs("x\ny", "x\ny")) == ["...\ny", "...\ny"]
    assert shown_titles(jobs("a", "b")) == ["a", "b"]
    assert shown_titles(jobs("x\ny")) == ["x\ny"]


def test_a_model_cannot_steer_the_terminal() -> None:
    assert visible(
        "a\x1b[2Jb\r\x07\x9b1m\tc\n"
    ) == "a\N{REPLACEMENT CHARACTER}[2Jb" + "\N{REPLACEMENT CHARACTER}" * 3 + ("1m\tc\n")
    to = terminal()
    prompts = jobs("p", "q")
    feed(Panels(prompts, to, ProgressBar(prompts, to)), (0, output("\x1b[2J", "stop")))
    assert "\x1b[2J" not in written(to)


def test_the_closing_table_counts_what_happened() -> None:
    first, second = output("abc", "length"), output("de", "stop")
    first.metrics, first.cached_tokens = RequestMetrics(time_to_first_token=0.1), 1
    first.clamped_from = 99
    second.metrics = RequestMetrics(time_to_first_token=0.3)
    stats = EngineStats(prefill_tokens=50, prefill_seconds=0.5, decode_tokens=30, decode_seconds=2.0)
    stats.peak_blocks, stats.num_blocks, stats.preemptions = 3, 10, 1
    rows = dict(closing_rows([first, second], stats, 2.5))
    assert rows["time to first token"] == "200 ms median, 300 ms longest"
    assert rows["prefill"] == "100 tokens/s (50 in 0.50 s)"
    assert rows["decode"] == "15 tokens/s (30 in 2.00 s)"
    assert rows["prompt tokens"] == "4"
    assert rows["cached tokens"] == "1 (25% of the prompts)"
    assert rows["output tokens"] == "5 in 2.50 s"
    assert rows["max_tokens clamped"] == "for 1 prompts, to what the context had left"
    assert rows["KV blocks used"] == "3 of 10 at most"
    assert rows["preemptions"] == "1"
    assert rows["finished by"] == "length 1, stop 1"


@pytest.mark.parametrize(
    ("verifications", "drafted", "by_position", "tokens", "shares"),
    [
        (100, 400, [81, 66, 50, 15], "3.12", "1st 81%, 2nd 66%, 3rd 50%, 4th 15%; 53% of 400"),
        (8, 2000, [4, 4, 2, 2, 2, 1], "2.88", "1st 50%, 2nd 50%, 3rd 25%, 4th 25%, ...; 1% of 2,000"),
        (3, 5, [], "1.00", "0% of 5"),
    ],
)
def test_the_closing_table_says_what_drafts_brought_where_some_were_verified(
    verifications: int, drafted: int, by_position: list[int], tokens: str, shares: str
) -> None:
    assert "speculation" not in dict(closing_rows([], EngineStats(), 0.0))
    stats = EngineStats(verifications=verifications, drafted=drafted, accepted=sum(by_position))
    stats.accepted_by_position = by_position
    row = dict(closing_rows([], stats, 0.0))["speculation"]
    assert row == f"{tokens} tokens a verification (drafts accepted: {shares})"


def test_drafts_change_no_text_and_are_counted_in_the_table_and_in_each_line(
    expected: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.jsonl"
    prompt = "x = 1\n" * 20
    flags = ["--max-tokens", "40", "--temperature", "0", "--ignore-eos", "--output", str(file)]
    speculation = ["--speculative-config", '{"method": "ngram", "adaptive": false}']
    lines = []
    for more in ([], speculation, [*speculation, "--no-speculate"]):
        assert main(["generate", "demo", prompt, *flags, *more, "--verbose"]) == 0
        lines.append(json.loads(file.read_text()))
    texts = [line["outputs"][0]["text"] for line in lines]
    assert texts[0] == texts[1] == texts[2]
    metrics = [(line["metrics"]["drafted"], line["metrics"]["accepted"]) for line in lines]
    assert metrics[0] == metrics[2] == (0, 0)
    drafted, accepted = metrics[1]
    assert drafted >= accepted > 0
    assert capsys.readouterr().err.count(f"{accepted / drafted:.0%} of {drafted})") == 1


def test_the_closing_table_has_dashes_for_what_never_happened() -> None:
    rows = dict(closing_rows([], EngineStats(), 0.0))
    assert rows["time to first token"] == rows["prefill"] == rows["decode"] == "-"


# -- what outputs must look like ------------------------------------------------------------------------------


def test_outputs_have_the_form_that_a_flag_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}')
    grammar.write_text('root ::= "a" ("b" | "c")')
    common = ["generate", "demo", "Once", "--quiet", "--temperature", "0", "--max-tokens", "60"]
    assert main([*common, "--json-schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 2)
    assert main([*common, "--regex", "x{3}"]) == 0
    assert capsys.readouterr().out == "xxx\n"
    assert main([*common, "--grammar", str(grammar)]) == 0
    assert capsys.readouterr().out in ("ab\n", "ac\n")


def test_a_form_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"uniqueItems": true}')
    cases = [
        (["--json-schema", str(bad)], "uniqueItems"),
        (["--json-schema", str(tmp_path / "none.json")], "cannot be read"),
        (["--regex", "a", "--structured-outputs", '{"regex": "b"}'], "give one of them"),
        (["--regex", "a", "--grammar", str(bad)], "not allowed with"),
    ]
    for flags, says in cases:
        assert main(["generate", "demo", "Once", *flags]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if says in line]
        assert line.startswith("quire")


@pytest.mark.parametrize(("texts", "what"), [(["caf\udcff"], "the prompt is"), (["x", "caf\udcff"], "prompt 1 is")])
def test_bytes_that_are_not_utf8_are_refused_before_the_model_is_loaded(texts: list[str], what: str) -> None:
    with pytest.raises(RequestError, match=f"{what} not text in UTF-8, at character 3"):
        text_jobs(texts, {}, chat=False)
