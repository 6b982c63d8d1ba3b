"""What somebody meets in a notebook: what is shown of things, warnings, and progress."""

from __future__ import annotations

import inspect
import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

import quire
from quire import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutputsParams
from quire.errors import CheckpointNotFoundError
from quire.notebook import BAR_WIDTH, loading
from quire.progress import BatchProgress, batch_progress

NEVER = SamplingParams(min_tokens=50, structured_outputs=StructuredOutputsParams(choice=["x"]))
"""No token may come: such a request ends with an error."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=128) as engine:
        yield engine


class Cell:
    """Stands in for IPython's `display` in a kernel."""

    def __init__(self) -> None:
        self.pictures: list[dict[str, str]] = []
        self.displayed = 0

    @property
    def is_plain(self) -> bool:
        return not any(ord(one) < 32 for picture in self.pictures for text in picture.values() for one in text)

    def display(self, picture: dict[str, str], raw: bool, display_id: bool) -> Cell:
        assert raw and display_id
        self.displayed += 1
        self.pictures.append(picture)
        return self

    def update(self, picture: dict[str, str], raw: bool) -> None:
        assert raw
        self.pictures.append(picture)


def ipython(monkeypatch: pytest.MonkeyPatch, shell: object) -> Cell:
    cell = Cell()
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_progress_in_a_notebook_is_one_output_that_is_replaced(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ipython(monkeypatch, types.SimpleNamespace(kernel=object()))
    llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3, ignore_eos=True), progress=True)
    first, last = cell.pictures[0], cell.pictures[-1]
    assert "0/3 prompts" in first["text/plain"] and "3/3 prompts" in last["text/plain"]
    assert '<progress value="1.000" max="1">' in last["text/html"]
    assert cell.is_plain
    assert capsys.readouterr() == ("", "")


def test_loading_in_a_notebook_is_one_output_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = ipython(monkeypatch, types.SimpleNamespace(kernel=object()))
    with LLM("demo", max_model_len=128):
        texts = [picture["text/plain"] for picture in cell.pictures]
        assert texts[0] == f"[{'.' * BAR_WIDTH}] demo: loading"
        assert any("demo: loading weights" in text for text in texts)
        assert re.fullmatch(r"demo: loaded in \d+\.\d s", texts[-1])
    assert cell.displayed == 1 and cell.is_plain
    assert capsys.readouterr() == ("", "")
    told: list[str] = []
    with LLM("demo", max_model_len=128, on_load=lambda phase, share: told.append(phase)):
        assert told and cell.displayed == 1, "who asks to be told shows it in a way of its own"
    with pytest.raises(CheckpointNotFoundError):
        LLM("no/such<b>folder")
    assert cell.pictures[-1]["text/html"] == "no/such&lt;b&gt;folder: not loaded"


def test_elsewhere_loading_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("demo") as on_load:
        assert on_load is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()])
def test_in_a_terminal_progress_is_a_bar(shell: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ipython(monkeypatch, shell)
    assert isinstance(batch_progress(3), BatchProgress)
    monkeypatch.delitem(sys.modules, "IPython")
    assert isinstance(batch_progress(3), BatchProgress)


def test_requests_that_end_with_an_error_warn_where_they_were_asked_for(llm: LLM) -> None:
    fine = SamplingParams(max_tokens=2)
    with pytest.warns(RuntimeWarning, match=r"2 of 3 requests failed; the first is outputs\[1\]: ") as caught:
        outputs = llm.generate(["a", "b", "c"], [fine, NEVER, NEVER])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error"]
    assert [str(warning.filename) for warning in caught] == [__file__]
    with pytest.warns(RuntimeWarning, match=r"1 of 1") as caught:
        llm.chat([{"role": "user", "content": "x"}], NEVER)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(["a"], fine)


def test_things_say_what_they_are(llm: LLM) -> None:
    assert repr(llm).startswith("<LLM 'demo': 4,000,512 parameters, bfloat16")
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None and tokenizer is llm.tokenizer
    assert repr(tokenizer).endswith("tokenizer.json': 4,096 tokens, with a chat template>")
    assert tokenizer.decode(tokenizer.encode("def f():")) == "def f():"


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_help_has_every_option_with_its_type_default_and_meaning(cls: type[Any]) -> None:
    parameters = inspect.signature(cls).parameters
    text = inspect.getdoc(cls) or ""
    hints = get_type_hints(EngineConfig)
    for name, field in EngineConfig.__dataclass_fields__.items():
        if name != "model":
            assert (parameters[name].default, parameters[name].annotation) == (field.default, hints[name])
            assert f"    {name}: {field.metadata['help']} (default: {field.default})" in text


def test_dir_names_what_is_meant_to_be_used_and_nothing_else() -> None:
    assert dir(quire) == sorted(quire.__all__)
    assert all(getattr(quire, name) is not None for name in dir(quire))
