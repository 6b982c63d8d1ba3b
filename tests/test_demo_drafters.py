"""What ships to draft for the embedded model: it fits, it is small, and it is right as often as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.engine.engine import Engine
from quire.models.checkpoint import resolve
from quire.models.model import Model
from quire.models.registry import load_model
from quire.ops import RaggedBatch
from quire.speculate.load_draft import load_draft_model, load_eagle
from quire.text.tokenizer import Tokenizer

TEXT = '''"""Read and write simple tables of values."""

import os
import sys

__all__ = ["Error", "Reader", "open"]


class Error(Exception):
    """Base class for other exceptions in this module."""


class Reader:
    """Reads rows from a file object, one at a time."""

    def __init__(self, file, delimiter=",", encoding=None):
        self.file = file
        self.delimiter = delimiter
        self.encoding = encoding
        self._closed = False

    def __iter__(self):
        return self

    def __next__(self):
        line = self.file.readline()
        if not line:
            raise StopIteration
        return line.rstrip("\\n").split(self.delimiter)

    def close(self):
        """Close the file.  Calling it more than once is allowed."""
        if not self._closed:
            self._closed = True
            self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc_value, traceback):
        self.close()


def open(path, mode="r", encoding=None):
    """Open a table.  Raise Error if the file does not exist."""
    if not os.path.exists(path):
        raise Error("no such file: %r" % path)
    return Reader(io.open(path, mode, encoding=encoding))


def main(args=None):
    if args is None:
        args = sys.argv[1:]
    for name in args:
        with open(name) as reader:
            for row in reader:
                print(row)


if __name__ == "__main__":
    main()
'''
"""Written for this test, so no one has trained on it; in the style that the demo model knows."""

GOLDEN = {"draft": (0.70, 0.72), "eagle": (0.725, 0.745), "eagle, second": (0.73, 0.755)}
"""Least and most of the greedy drafts that are right; another machine's rounding moves very few of 364."""


@pytest.fixture(scope="module")
def demo() -> Model:
    return load_model(resolve("demo"), "float32")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return Tokenizer.load(resolve("demo")).encode(TEXT)


def batch_of(tokens: list[int], start: int = 0) -> RaggedBatch:
    """A span from position `start` on, of a request whose blocks are 1, 2, ..."""
    positions = torch.arange(start, start + len(tokens))
    return RaggedBatch(
        token_ids=torch.tensor(tokens),
        positions=positions,
        slots=positions + 16,
        row_starts=[0, len(tokens)],
        context_lens=[start + len(tokens)],
        block_tables=torch.arange(1, (start + len(tokens) - 1) // 16 + 2)[None],
        block_size=16,
    )


@torch.inference_mode()
def hidden_states(model: Model, ids: list[int]) -> torch.Tensor:
    return model.forward([batch_of(ids)], model.new_caches([len(ids) // 16 + 2], 16))


def test_both_are_small_and_say_what_they_are_worth() -> None:
    folders = [resolve("demo-draft"), resolve("demo-eagle")]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 5_000_000
    for folder in folders:
        assert "greedy" in (folder / "README.md").read_text().lower()
        assert not list(folder.glob("*.partial"))


def test_the_draft_model_is_right_as_often_as_it_was(demo: Model, ids: list[int]) -> None:
    draft = load_draft_model(resolve("demo-draft"), demo, resolve("demo"))
    with torch.inference_mode():
        drafts = draft.logits(hidden_states(draft, ids)).argmax(-1)
        best = demo.logits(hidden_states(demo, ids)).argmax(-1)
    low, high = GOLDEN["draft"]
    assert low <= (drafts == best).float().mean() <= high


def test_the_heads_first_and_second_drafts_are_right_as_often_as_they_were(demo: Model, ids: list[int]) -> None:
    head = load_eagle(resolve("demo-eagle"), demo)
    hidden = hidden_states(demo, ids)
    kv = demo.new_caches([len(ids) // 16 + 2], 16, draft_kv=head.kv_shape)[0].draft_kv
    assert kv is not None
    second = []
    with torch.inference_mode():
        best = demo.logits(hidden).argmax(-1).tolist()
        out = head.forward(hidden[:-1], batch_of(ids[1:]), kv)
        first = head.logits(out).argmax(-1).tolist()
        for p in range(1, len(ids) - 1):  # what is known up to p - 1, then a row fed with the head's own output
            guessed = head.forward(out[p - 1 : p], batch_of(ids[p + 1 : p + 2], p), kv)
            second.append(int(head.logits(guessed).argmax()))
            head.forward(hidden[p : p + 1], batch_of(ids[p + 1 : p + 2], p), kv)  # as it was
    for drafts, wanted, (low, high) in (
        (first, best[1:], GOLDEN["eagle"]),
        (second, best[2:], GOLDEN["eagle, second"]),
    ):
        assert low <= sum(a == b for a, b in zip(drafts, wanted, strict=True)) / len(wanted) <= high


def test_the_draft_model_also_generates_by_itself() -> None:
    assert {file.name for file in Path(resolve("demo-draft")).iterdir()} >= {"config.json", "tokenizer.json"}
    model = load_model(resolve("demo-draft"))
    assert model.num_parameters < 1_000_000 and model.vocab_size == 4096


PROMPTS = ("def read(self, size=-1):\n", "for i in range(10):\n    ", "try:\n    import ssl\nexcept ImportError:\n")


class Stated:
    """The demo model's engine, told that steps take what they took on one machine, whatever they take on this one.

    Attributes:
        tokens: of all requests, in their order.
        milliseconds: by those times.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        config = EngineConfig(
            model="demo", async_scheduling=False, prefix_cache="off", speculative_config=spec, max_model_len=512
        )
        self.engine, self.milliseconds = Engine(config), 0.0
        self._commit = self.engine.scheduler.commit
        self.engine.scheduler.commit = self.commit  # type: ignore[method-assign]
        self.tokens = [self.generate(i, text) for i, text in enumerate(PROMPTS)]
        self.engine.close()

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """0.32 ms, 0.2 for each draft: those of `demo-eagle` took so much (benchmarks/README.md); rows cost little."""
        drafts = max(span.num_drafted for span in result.spans)
        requests = self.engine.scheduler.requests
        followed = any(requests[span.request].draft_state.drafting_enabled for span in plan.spans)
        result.began, result.drafting = self.milliseconds / 1000, (0.01 * followed + 0.19 * drafts) / 1000
        result.seconds = 0.32 / 1000 + 0.01 / 1000 * drafts + result.drafting
        self.milliseconds += 1000 * result.seconds
        return self._commit(plan, result, now)

    def generate(self, id: int, prompt: str) -> list[int]:
        tokenizer = Tokenizer.load(resolve("demo"))
        assert tokenizer is not None
        params = SamplingParams(temperature=0.0, ignore_eos=True).resolved()
        self.engine.add(Request(id, tokenizer.encode(prompt), params, max_tokens=120))
        made: list[int] = []
        while not self.engine.idle:
            for update in self.engine.step():
                made += update.tokens
        return made


@pytest.mark.quick("draft_model")
@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_by_default_they_bring_nearly_what_the_better_of_none_and_always_four_brings(method: str) -> None:
    four, tuned = Stated({"method": method, "adaptive": False}), Stated({"method": method})
    assert four.tokens == tuned.tokens
    plain = 0.32 * sum(map(len, tuned.tokens))
    assert four.milliseconds < 0.9 * plain
    assert 0.95 * tuned.milliseconds <= four.milliseconds
