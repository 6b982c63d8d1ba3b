"""The frontend between clients and engine: what goes wrong with one request's text is that request's alone."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.request import RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.step import TokenLogprobs
from quire.engine.frontend import Frontend, Prepared, _call_id
from quire.engine.outputs import RequestOutput
from quire.errors import PromptTooLongError
from quire.text import detokenizer
from quire.text.tokenizer import Tokenizer
from tests.tokenizer_builders import panicking_json

SOURCE, PANICS = panicking_json()


class Client:
    """A frontend whose engine only notes what it is asked for."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(SOURCE)
        self.aborted: list[int] = []
        self.frontend = Frontend(
            tokenizer=self.tokenizer,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=1000,
            eos_token_ids=[],
            defaults={},
            add=lambda request: None,
            abort=self._abort,
        )

    def _abort(self, number: int, reason: str) -> list[RequestUpdate]:
        self.aborted.append(number)
        return []

    def submit(self, **params: Any) -> RequestOutput:
        return self.frontend.submit(self.frontend.prepare("hello", SamplingParams(max_tokens=100, **params)))


def test_a_token_that_the_decoder_panics_on_ends_its_own_request_alone() -> None:
    client = Client()
    hello = client.tokenizer.encode("hello")
    bad, good = client.submit(), client.submit()
    changed = client.frontend.absorb([RequestUpdate(0, tokens=[*hello, PANICS]), RequestUpdate(1, tokens=hello)])
    assert changed == [bad, good]
    assert (bad.finished, bad.outputs[0].finish_reason) == (True, "error")
    assert "the tokenizer failed: slice index" in (bad.outputs[0].error or "")
    assert (good.finished, good.outputs[0].text) == (False, "hello")
    assert client.aborted == [0]
    client.frontend.absorb([RequestUpdate(0, tokens=hello), RequestUpdate(1, tokens=hello, finish_reason="length")])
    assert (good.outputs[0].text, client.frontend.idle) == ("hellohello", True)


def test_a_log_probability_of_a_token_that_the_decoder_panics_on_ends_its_own_choice_alone() -> None:
    client = Client()
    output = client.submit(n=2, logprobs=1)
    [token, *_] = client.tokenizer.encode("hello")

    def update(number: int, other: int) -> RequestUpdate:
        return RequestUpdate(number, tokens=[token], logprobs=[TokenLogprobs([token, other], [-1.0, -2.0], [1, 2])])

    client.frontend.absorb([update(0, PANICS), update(1, token)])
    assert [choice.finish_reason for choice in output.outputs] == ["error", None]


def test_a_text_beyond_all_bounds_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detokenizer, "MAX_TEXT", 12)
    client = Client()
    hello = client.tokenizer.encode("hello")
    long, short = client.submit(), client.submit()
    for _ in range(3):
        client.frontend.absorb([RequestUpdate(0, tokens=hello)])
    client.frontend.absorb([RequestUpdate(1, tokens=hello)])
    assert "longer than 12 characters; ask for fewer tokens" in (long.outputs[0].error or "")
    assert (long.outputs[0].text, short.outputs[0].text) == ("hellohello", "hello")


@pytest.mark.parametrize(("most", "max_tokens", "kept"), [(3, 4, 3), (5000, 4, 1000), (-1, 4, 996), (-1, None, 999)])
def test_the_last_tokens_of_a_prompt_are_kept(most: int, max_tokens: int | None, kept: int) -> None:
    frontend = Client().frontend
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=most)
    ids = [number % 7 for number in range(1200 if most != 5000 else 999)]
    prepared = frontend.check("text", ids, params, [])
    assert prepared.token_ids == ids[-kept:] and prepared.text == (None if kept < len(ids) else "text")
    assert frontend.check("text", [1, 2, 3], params, []).text == "text"
    if most == 5000:
        with pytest.raises(PromptTooLongError):
            frontend.check("text", [1] * 1200, params, [])


def test_ids_of_calls_are_the_same_wherever_a_request_runs_and_differ_otherwise() -> None:
    def ids(prompt: list[int], seed: int, choice: int) -> list[str]:
        prepared = Prepared(None, prompt, SamplingParams(seed=seed), 10, [])
        return [_call_id(prepared, choice, number) for number in range(2)]

    first = ids([1, 2], 3, 0)
    assert first == ids([1, 2], 3, 0) and all(len(id) == 9 and id.isalnum() for id in first)
    assert len({*first, *ids([1, 3], 3, 0), *ids([1, 2], 4, 0), *ids([1, 2], 3, 1)}) == 8
