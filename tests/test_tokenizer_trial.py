"""The first loading of a tokenizer, in a process that may end as it likes: there is always an error of ours."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import ChatTemplateError, CheckpointError, TokenizerError, TokenizerFailedError
from quire.models.hub import resolve
from quire.text import tokenizer_trial
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_trial import TokenizerTrial
from tests.http_tools import children_of
from tests.oracle import save_checkpoint
from tests.tokenizer_builders import CHATML_CONFIG, byte_level_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(byte_level_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CHATML_CONFIG))
    return tmp_path


@pytest.fixture
def in_its_place(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has other Python code run where the tokenizer would be loaded."""

    def put(code: str) -> None:
        monkeypatch.setattr(tokenizer_trial.child, "python", lambda module: [sys.executable, "-c", code])

    return put


def check(folder: Path, **options: Any) -> str:
    with TokenizerTrial(folder, **options) as trial:
        return trial.check()


def test_a_tokenizer_that_loads_passes_and_leaves_no_process(folder: Path) -> None:
    before = children_of(os.getpid())
    with TokenizerTrial(folder) as trial:
        assert len(children_of(os.getpid())) == len(before) + 1
        trial.check()
    assert children_of(os.getpid()) == before


def test_a_chat_template_that_takes_long_is_to_blame_and_costs_only_the_chats(folder: Path, in_its_place: Any) -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(CHATML_CONFIG | {"chat_template": slow}))
    in_its_place(
        "from quire.text import tokenizer_worker; tokenizer_worker.TEMPLATE_SECONDS = 0.3; tokenizer_worker.main()"
    )
    why = check(folder)
    assert why.startswith("chats are refused: the chat template takes more than 0.3 s")
    tokenizer = Tokenizer.load(folder)
    tokenizer.refuse_chats(why)
    assert tokenizer.no_chats == why and tokenizer.encode("a")


def test_its_process_leaves_by_itself_and_its_answer_stays(folder: Path) -> None:
    """Its memory must not be there when that for KV is counted."""
    with TokenizerTrial(folder) as trial:
        assert trial._process is not None and trial._process.wait(60) == 0
        trial.check()


def test_nothing_is_tried_without_a_tokenizer_or_where_it_ships_with_quire(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    for folder in (tmp_path, resolve("demo")):
        with TokenizerTrial(folder) as trial:
            assert children_of(os.getpid()) == before
            trial.check()


def test_what_is_wrong_is_told_in_the_words_of_the_loading_process(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=rf"^{folder}/tokenizer\.json is not a valid tokenizer"):
        check(folder)


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "\ud800", "{% for i in x %}" * 30 + "{% endfor %}" * 30, "{{" + "(" * 500 + "1" + ")" * 500 + "}}"],
    ids=["syntax", "surrogate", "blocks", "brackets"],
)
def test_a_template_that_does_not_compile_stops_chats_alone_and_is_named(folder: Path, source: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(CHATML_CONFIG | {"chat_template": source}))
    check(folder)
    tokenizer = Tokenizer.load(folder)
    told = f"the chat template in {folder}/tokenizer_config.json "
    assert tokenizer.reply_syntax.described.startswith(f"chats are refused: {told}")
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=f"^{re.escape(told)}"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_loading_has_a_deadline(folder: Path, in_its_place: Callable[[str], None]) -> None:
    in_its_place("import time; time.sleep(600)")
    with pytest.raises(TokenizerError, match=rf"^{folder}/tokenizer\.json took longer than 0\.2 s to load; "):
        check(folder, deadline=0.2)


def test_loading_has_a_bound_of_memory(folder: Path) -> None:
    content = json.loads(byte_level_json())
    content["model"]["vocab"] |= {f"token{index}": 400 + index for index in range(100_000)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=rf"^{folder}/tokenizer\.json .*memory"):
        check(folder, memory_bytes=4 << 20)


def test_a_tokenizer_that_asks_for_more_memory_than_there_is_ends_its_trial_alone(folder: Path) -> None:
    """Rust ends a process whose memory is refused."""
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(byte_level_json()) | {"normalizer": charsmap}))
    with pytest.raises(TokenizerError, match=rf"^{folder}/tokenizer\.json .*may take more than 2048 MiB of memory"):
        check(folder)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended with SIGSEGV"),
        ("import os; os.abort()", "gave up; it may take more than 2048 MiB of memory"),
        ("raise SystemExit(3)", "ended with exit code 3"),
    ],
)
def test_a_crash_is_an_error_that_names_the_file(
    folder: Path, code: str, words: str, in_its_place: Callable[[str], None]
) -> None:
    in_its_place(code)
    with pytest.raises(TokenizerError, match=rf"^{folder}/tokenizer\.json cannot be loaded: .*{words}"):
        check(folder)


def test_where_no_process_can_be_started_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial.child.sys, "executable", str(folder / "nothing"))
    with pytest.raises(TokenizerFailedError, match="no process to try the tokenizer in: No such file"):
        check(folder)


def test_a_folder_whose_name_no_message_can_hold_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_level_json())
    with pytest.raises(TokenizerError, match=r"udcff' has a name that is no Unicode; rename it"):
        check(folder)


def test_an_engine_with_a_bad_tokenizer_does_not_start(tmp_path: Path) -> None:
    before = children_of(os.getpid())
    folder = save_checkpoint(tmp_path / "model", "llama")
    (folder / "tokenizer.json").write_text(byte_level_json()[:-200])
    with pytest.raises(CheckpointError, match=rf"^{folder}/tokenizer\.json is not a valid tokenizer"):
        LLM(str(folder), threads=1, kv_cache_memory="8MiB")
    assert children_of(os.getpid()) == before
