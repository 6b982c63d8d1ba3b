"""The log: one line an event, whatever it holds, and no harm to anybody when it cannot be written."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import log
from tests.conftest import pytest_runtest_makereport

logger = logging.getLogger("quire.test")
TOUCHED = ("", "quire", *log._THIRD_PARTY)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in TOUCHED]
    before = [(one, one.level, list(one.handlers), one.propagate) for one in loggers]
    raising = logging.raiseExceptions
    yield
    log.flush()
    logging.raiseExceptions = raising
    logging.captureWarnings(False)
    for one, level, handlers, propagate in before:
        for handler in set(one.handlers) - set(handlers):
            handler.close()
        one.level, one.handlers, one.propagate = level, handlers, propagate
        one.setLevel(level)


def lines(stream: io.StringIO) -> list[str]:
    log.flush()
    return stream.getvalue().splitlines()


def summary(**changes: object) -> log.RequestSummary:
    facts: dict[str, object] = {
        "request_id": "cmpl-1",
        "prompt_tokens": 10,
        "cached_tokens": 3,
        "output_tokens": 21,
        "first_token_seconds": 0.25,
        "total_seconds": 2.25,
        "reason": "stop",
    }
    return log.RequestSummary(**(facts | changes))  # type: ignore[arg-type]


# -- lines ------------------------------------------------------------------------------------------------------


def test_text_lines_have_time_and_level_in_columns() -> None:
    stream = io.StringIO()
    log.configure("text", stream=stream)
    logger.info("one")
    logger.warning("two %d", 2)
    first, second = lines(stream)
    assert first[12:] == " info    one" and second[12:] == " warning two 2"
    assert [first[i] for i in (2, 5, 8)] == [":", ":", "."]


def test_json_lines_hold_the_event_and_its_fields() -> None:
    stream = io.StringIO()
    log.configure("json", stream=stream)
    log.event(logger, "engine_died", "the engine died", level=logging.ERROR, boot=2, cause="SIGKILL")
    [line] = lines(stream)
    found = json.loads(line)
    time_of = found.pop("time")
    assert found == {
        "level": "error",
        "logger": "quire.test",
        "event": "engine_died",
        "text": "the engine died",
        "boot": 2,
        "cause": "SIGKILL",
    }
    assert time_of.endswith("+00:00") and "T" in time_of


def test_fields_may_be_called_anything_and_hold_anything() -> None:
    stream = io.StringIO()
    log.configure("json", stream=stream)
    fields = {"name": "x", "text": "no", "logger": "no", "msg": 1, "args": 2, "nan": float("nan"), "odd": {1, 2}}
    log.event(logger, "e", "yes", **fields)
    [line] = lines(stream)
    found = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert found["text"] == "yes" and found["logger"] == "quire.test"
    assert found["name"] == "x" and found["nan"] is None and found["odd"]


def test_debug_lines_are_told_only_when_asked_for() -> None:
    for debug, count in ((False, 0), (True, 1)):
        stream = io.StringIO()
        log.configure("text", debug, stream=stream)
        logger.debug("detail")
        assert len(lines(stream)) == count


def test_other_libraries_speak_only_to_warn_and_only_once() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    log.configure("text", stream=stream)
    for name in ("uvicorn.error", "uvicorn.access", "asyncio", "someone.else"):
        logging.getLogger(name).info("chatter")
        logging.getLogger(name).warning("trouble in %s", name)
    found = lines(stream)
    assert len(found) == 4 and all("trouble in" in line for line in found)


def test_configuring_again_replaces_the_first_time() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.configure("text", stream=first)
    log.configure("json", stream=second)
    logger.info("hello")
    assert not lines(first) and len(lines(second)) == 1


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_is_told_and_cannot_pass_for_a_line(format: str) -> None:
    stream = io.StringIO()
    log.configure(format, stream=stream)  # type: ignore[arg-type]
    try:
        raise ValueError("bad\n12:00:00.000 info    forged")
    except ValueError:
        logger.exception("it failed")
    found = lines(stream)
    if format == "json":
        assert len(found) == 1 and any("ValueError: bad" in line for line in json.loads(found[0])["traceback"])
    else:
        assert "it failed" in found[0] and all(line.startswith("    ") for line in found[1:])
        assert any("ValueError: bad" in line for line in found)


# -- what clients send ---------------------------------------------------------------------------------------------

EVIL = "x\n12:00:00.000 info    forged\r\x1b[31mred\x00\u2028\u202e\ud800\x85"


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_clients_label_cannot_forge_lines_or_steer_the_terminal(format: str) -> None:
    stream = io.StringIO()
    log.configure(format, stream=stream)  # type: ignore[arg-type]
    log.log_request(logger, summary(request_id=EVIL, path=EVIL, model=EVIL, user=EVIL, error=EVIL, reason=EVIL))
    logger.info("said: %s", EVIL)
    raw = stream.getvalue() if lines(stream) else ""
    assert raw.count("\n") == 2 and raw.isascii() and raw.replace("\n", "").isprintable()


def test_what_a_test_logged_can_be_sent_by_xdist() -> None:
    """A report that is no valid Unicode would cost it the worker: of the test above, there is one."""
    hook = pytest_runtest_makereport()
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(pytest.TestReport("a", ("a", 0, "a"), {}, "passed", None, "call", [("Captured log call", EVIL)]))
    [(_, text)] = end.value.value.sections
    assert text.encode() and "\\ud800" in text and "\u2028" in text


@given(st.text(st.characters(), max_size=200), st.integers(0, 80))
def test_sanitized_text_is_printable_and_bounded(text: str, limit: int) -> None:
    clean = log.sanitize(text, limit)
    assert clean.isprintable() or not clean
    clean.encode()
    assert len(clean) <= 10 * limit + 3
    if text.isprintable() and len(text) <= limit:
        assert clean == text


# -- the lines of requests and of the engine -----------------------------------------------------------------------


def test_request_line_tells_what_happened() -> None:
    line = log.request_line(summary())
    assert line == "cmpl-1  10 prompt (3 cached), 21 out, first token 250 ms, 10.0 tok/s, 2.2 s in all, stop"
    line = log.request_line(summary(path="/v1/completions", model="demo", key="key 2", user="alice"))
    assert line.startswith("cmpl-1  /v1/completions, demo, key 2, user alice: 10 prompt (3 cached), 21 out, ")


def test_request_line_of_a_request_without_tokens() -> None:
    line = log.request_line(
        summary(output_tokens=0, first_token_seconds=None, total_seconds=0.004, reason="refused 429", error="full")
    )
    assert line == "cmpl-1  10 prompt (3 cached), 0 out, no token, 4 ms in all, refused 429: full"


def test_request_line_of_what_never_ran_tells_no_tokens() -> None:
    refused = log.RequestSummary(
        request_id="req-1", path="/v1/x", total_seconds=0.001, reason="refused 404", error="no"
    )
    assert log.request_line(refused) == "req-1  /v1/x: 1 ms in all, refused 404: no"


def test_the_first_reason_for_a_requests_end_stays() -> None:
    ended = log.RequestSummary(request_id="req-1")
    ended.end("refused 400", "bad")
    ended.end("disconnect")
    assert (ended.reason, ended.error) == ("refused 400", "bad")


def test_one_token_has_no_rate() -> None:
    assert summary(output_tokens=1).tokens_per_second is None
    assert summary(total_seconds=0.25).tokens_per_second is None


def test_request_event_holds_every_number() -> None:
    stream = io.StringIO()
    log.configure("json", stream=stream)
    log.log_request(logger, summary(path="/v1/completions", model="demo", key="key 2", user="alice"))
    found = json.loads(lines(stream)[0])
    assert (found["event"], found["request_id"], found["cached_tokens"]) == ("request", "cmpl-1", 3)
    assert (found["first_token_seconds"], found["tokens_per_second"], found["reason"]) == (0.25, 10.0, "stop")
    asked = [found[name] for name in ("path", "model", "key", "user")]
    assert asked == ["/v1/completions", "demo", "key 2", "alice"]


BEFORE = {"steps": 5, "prompt_tokens": 100, "cached_tokens": 20, "output_tokens": 50, "prefill_tokens": 80}
AFTER = {
    "steps": 25,
    "prompt_tokens": 1100,
    "cached_tokens": 520,
    "output_tokens": 250,
    "prefill_tokens": 680,
    "decode_tokens": 100,
    "running": 4,
    "waiting": 1,
    "num_blocks": 200,
    "held_blocks": 30,
}


def test_statistics_line_tells_rates_of_the_interval() -> None:
    line = log.statistics_line(BEFORE | {"decode_tokens": 0}, AFTER, 10.0)
    assert line == "running 4, waiting 1, KV 15 %, prefill 50.0 tok/s, decode 20.0 tok/s, prefix hits 50 %"


def test_statistics_of_a_new_engine_count_from_zero() -> None:
    fields = log.statistics_fields(AFTER, BEFORE, 10.0)
    assert fields["decode_tokens_per_second"] == 5.0 and fields["hit_rate"] == 0.2


def test_statistics_without_new_prompts_or_blocks_or_time_are_told_too() -> None:
    assert log.statistics_line({}, {}, 0.0).endswith("no new prompts")
    assert log.statistics_line(AFTER, AFTER, 1.0) == (
        "running 4, waiting 1, KV 15 %, prefill 0.0 tok/s, decode 0.0 tok/s, no new prompts"
    )


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_line_on_a_terminal_takes_the_place_of_a_progress_bar(format: str) -> None:
    ours, terminal = os.openpty()
    with open(terminal, "w") as stream:
        log.configure(format, stream=stream)  # type: ignore[arg-type]
        os.write(terminal, b"loading 40 %")
        logger.info("a line")
        log.flush()
        log.configure("text", stream=io.StringIO())
        written = ""
        while not written.endswith("\n"):  # a terminal gives what it has by then
            written += os.read(ours, 1000).decode()
    os.close(ours)
    assert written.endswith("a line\r\n" if format == "text" else "\r\n")
    assert written.startswith("loading 40 %\r\x1b[K" if format == "text" else "loading 40 %{")


# -- when it cannot be written -------------------------------------------------------------------------------------


def test_a_broken_pipe_costs_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream, (tmp_path / "log").open("w") as file:
        log.configure("text", stream=stream)
        for _ in range(5):
            logger.error("nobody listens")
        log.flush()
        os.dup2(file.fileno(), writer)
        logger.error("somebody listens again")
        log.flush()
        log.configure("text", stream=io.StringIO())
    [line] = (tmp_path / "log").read_text().splitlines()
    assert line.endswith("somebody listens again") and capfd.readouterr().err == ""


def test_a_closed_stream_costs_lines_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    class Shut(io.StringIO):
        shut = True

        def write(self, text: str) -> int:
            if self.shut:
                raise ValueError("I/O operation on closed file")
            return super().write(text)

    stream = Shut()
    log.configure("text", stream=stream)
    logger.error("nobody listens")
    log.flush()
    stream.shut = False
    logger.error("somebody listens again")
    [line] = lines(stream)
    assert line.endswith("somebody listens again") and capfd.readouterr().err == ""


def test_a_record_that_is_not_valid_is_lost_and_reported() -> None:
    stream = io.StringIO()
    log.configure("text", stream=stream)
    logger.info("%d", "no number")
    logger.info("next")
    found = lines(stream)
    assert "next" in found[0] and "1 log lines were lost" in found[1]


def test_a_reader_that_does_not_read_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_WAITING", 50)
    monkeypatch.setattr(log, "FLUSH_SECONDS", 0.2)
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as pipe, open(writer, "w") as stream:
        log.configure("text", stream=stream)
        started = time.monotonic()
        for _ in range(2000):
            logger.info("x" * 500)  # more than a pipe and the queue hold together
        assert time.monotonic() - started < 60
        received = b""
        while b"log lines were lost" not in received:  # the reader comes back
            received += pipe.read(65536)
        log.configure("text", stream=io.StringIO())


def test_a_log_that_is_closed_while_nobody_reads_it_ends_its_thread_when_somebody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "MAX_WAITING", 50)
    monkeypatch.setattr(log, "FLUSH_SECONDS", 0.1)
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as pipe, open(writer, "w") as stream:
        handler = log.LineHandler(stream)
        for _ in range(100):  # more than a pipe and the queue hold together
            handler.emit(logging.makeLogRecord({"msg": "x" * 5000}))
            time.sleep(0.001)
        handler.close()
        assert handler._thread.is_alive(), "it writes a line that nobody reads"
        while handler._thread.is_alive():
            pipe.read(65536)
            handler._thread.join(0.1)


def test_a_process_whose_log_is_not_read_still_ends() -> None:
    code = """if True:
        import logging
        from quire import log
        log.configure("text")
        for _ in range(3000):
            logging.getLogger("quire").info("x" * 500)
    """
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    with child:
        assert child.wait(timeout=60) == 0


def test_last_lines_of_a_process_are_written() -> None:
    code = "from quire import log; import logging; log.configure(); logging.getLogger('quire').info('the end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.endswith("the end\n")


def test_importing_it_brings_nothing_heavy() -> None:
    code = "import sys, quire.log; print(*({'torch', 'fastapi', 'asyncio', 'prometheus_client'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_prompts_tokens_are_told_by_where_they_came_from() -> None:
    def fetch(source: str, tokens: int, seconds: float | None = 0.031, **more: object) -> dict[str, object]:
        return {"source": source, "tokens": tokens, "seconds": seconds, "engine": "", "resumed": False, **more}

    apart = [fetch("peer", 2816, engine="http://b:8000"), fetch("host", 2816, 0.002)]
    assert log.prompt_origins(4096, 3840, apart) == (
        "1,024 of 4,096 prompt tokens cached here, 2,816 from http://b:8000 in 31 ms, 256 computed"
    )
    swapped = [fetch("disk", 32, 1.5), fetch("host", 64, 0.004), fetch("remote", 48, None)]
    assert log.prompt_origins(100, 64, swapped) == (
        "0 of 100 prompt tokens cached here, 32 from the disk in 1.5 s, 32 from host memory in 4 ms, 36 computed"
    )
    swapped = [fetch("host", 144, 0.004, resumed=True)]
    assert log.prompt_origins(7, 0, swapped) == (
        "0 of 7 prompt tokens cached here, 7 computed, 144 from host memory in 4 ms after a preemption"
    )
    assert log.prompt_origins(100, 64, []) == log.prompt_origins(100, 64, [fetch("peer", 0)]) == ""
