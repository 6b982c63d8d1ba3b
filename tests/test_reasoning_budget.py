"""A bound on reasoning: its end comes where it must, however the reply is written, and in any company."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.request import Request
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.outputs import CompletionOutput
from quire.errors import SamplingParamsError
from quire.grammar.grammars import Grammars, Matcher, masks
from quire.grammar.vocabulary import Vocabulary
from quire.models.hub import ASSETS
from quire.text.detokenizer import Detokenizer
from quire.text.known_formats import KNOWN
from quire.text.reply import Reply
from quire.text.reply_grammar import ReplyRequest, reply_grammar
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import Tokenizer
from tests.reply_templates import HERMES
from tests.test_reply_grammar import TOOLS, marked_tokenizer, markers_of

SYNTAXES = {name: KNOWN[name] for name in ("hermes", "mistral", "harmony")}
ANSWERS = StructuredOutputsParams(choice=["yes", "no"])
REQUESTS = {
    "free": ReplyRequest(),
    "a form": ReplyRequest(structured=ANSWERS),
    "tools": ReplyRequest(tools=TOOLS, tool_choice="required"),
}


@functools.cache
def known(tokenizer: Tokenizer) -> tuple[Vocabulary, Grammars]:
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size)
    return vocabulary, Grammars(lambda: vocabulary)


def allowed(matcher: Matcher, ahead: Sequence[int] = ()) -> list[int]:
    bits = np.unpackbits(matcher.mask(ahead).view(np.uint8), bitorder="little")[: matcher.vocab_size]
    return np.flatnonzero(bits).tolist()


class Walk:
    """A random reply: within reasoning much of it is parts of characters, or of the marker that ends it."""

    def __init__(self, tokenizer: Tokenizer, form: ReplyForm, request: ReplyRequest, budget: int | None) -> None:
        made = reply_grammar(form, request)
        self.tokenizer, self.form = tokenizer, made.form
        self.vocabulary, self.grammars = known(tokenizer)
        self.bound = None if budget is None else form.budget(budget)
        self.matcher = self.grammars.matcher(made.structured, [0], budget=self.bound)
        self.structured = made.structured
        self.tokens: list[int] = []

    def parts(self) -> list[int]:
        vocabulary = self.vocabulary
        reasoning = self.form.syntax.reasoning
        assert reasoning is not None
        marker = vocabulary(reasoning.end)[:-1]
        return [*marker, *(id for id, token in enumerate(vocabulary.tokens) if len(token) == 1 and token[0] >= 0xC2)]

    def run(self, luck: random.Random, most: int = 120) -> None:
        parts, opening = self.parts(), self.tokenizer._controls().encode(self.form.syntax.reasoning.start).ids  # type: ignore[union-attr]
        script = [] if self.form.in_reasoning else opening
        while len(self.tokens) < most:
            may = allowed(self.matcher)
            assert may, self.matcher.error
            place = len(self.tokens)
            liked = script[place : place + 1] if place < len(script) else parts if luck.random() < 0.7 else []
            usual = may if may[0] or len(may) == 1 else may[1:]
            token = luck.choice(sorted({*liked}.intersection(may)) or usual)
            if 0 in may and place >= len(script) and (luck.random() < 0.2 or len(may) == 1):
                break
            self.tokens.append(token)
            self.matcher.append(token)

    def read(self) -> tuple[Reply, int]:
        parser = ReplyParser(self.form, self.tokenizer.special_texts)
        detokenizer = Detokenizer(self.tokenizer, SamplingParams(), parser)
        detokenizer.push(self.tokens)
        detokenizer.finish()
        return Reply.of(parser.events), parser.reasoning_tokens


@pytest.fixture(scope="module")
def tokenizers() -> dict[tuple[str, bool], Tokenizer]:
    """By the format, and whether its markers are special tokens."""
    return {
        (name, marked): marked_tokenizer(markers_of(syntax) if marked else ())
        for name, syntax in SYNTAXES.items()
        for marked in (False, True)
    }


@pytest.mark.quick(
    "hermes-a form-special tokens",
    "mistral-free-text",
    "mistral-a form-text",
    "mistral-tools-special tokens",
    "harmony-free-text",
)
@pytest.mark.parametrize("marked", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("name", SYNTAXES)
def test_no_reply_reasons_longer_than_it_may(
    tokenizers: dict[tuple[str, bool], Tokenizer], name: str, request_: str, marked: bool
) -> None:
    tokenizer, syntax = tokenizers[name, marked], SYNTAXES[name]
    assert syntax.reasoning is not None
    markers = len(tokenizer._controls().encode(syntax.reasoning.start + syntax.reasoning.end).ids)
    reached = 0
    for seed in range(6):
        budget, luck = (0, 1, 2, 3, 7, 12)[seed], random.Random(seed)
        form = ReplyForm(syntax, in_reasoning=seed % 2 == 1)
        walk = Walk(tokenizer, form, REQUESTS[request_], budget)
        walk.run(luck)
        reply, counted = walk.read()
        assert counted <= budget + markers, (seed, reply)
        reached += counted >= budget
        if request_ == "a form" and walk.matcher.error is None and len(walk.tokens) < 120:
            assert reply.content.strip() in ("yes", "no")
    assert reached


@pytest.mark.parametrize("marked", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_masks_over_drafts_are_those_over_tokens(
    tokenizers: dict[tuple[str, bool], Tokenizer], request_: str, marked: bool
) -> None:
    tokenizer = tokenizers["hermes", marked]
    for seed in range(4):
        form = ReplyForm(SYNTAXES["hermes"], in_reasoning=seed % 2 == 1)
        walk = Walk(tokenizer, form, REQUESTS[request_], 5 + seed)
        walk.run(random.Random(seed), most=24)
        for begin in range(0, len(walk.tokens), 3):
            matcher, other = (
                walk.grammars.matcher(walk.structured, [0], walk.tokens[:begin], walk.bound) for _ in range(2)
            )
            ahead = walk.tokens[begin : begin + 7]
            rows = masks([matcher] * (len(ahead) + 1), [ahead[:count] for count in range(len(ahead) + 1)])
            for count, row in enumerate(rows):
                assert np.array_equal(row, other.mask()), (seed, begin, count)
                other_forced = other.forced()
                if count < len(ahead):
                    assert not other_forced or allowed(other) != [other_forced[0]] or ahead[count] == other_forced[0]
                    other.append(ahead[count])
            wrong = next((token for token in range(4, 40) if token not in allowed(matcher)), None)
            if wrong is not None:  # drafts that may not stand there change nothing
                before = matcher.mask()
                matcher.mask([wrong])
                assert np.array_equal(matcher.mask(), before)


# -- in the engine ---------------------------------------------------------------------------------------------

TEMPLATE = HERMES.replace("'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif")
CHATS = [[{"role": "user", "content": text}] for text in ("def f(x):", "Who are you?", "1, 2, 3, 1, 2, 3, 1, 2")]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking") / "demo"
    shutil.copytree(ASSETS / "demo", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), max_model_len=512, num_kv_blocks=256, check_invariants=True) as made:
        yield made


def answers(llm: LLM, budget: int | None, tools: bool = False, **options: Any) -> list[CompletionOutput]:
    params = [
        SamplingParams(thinking_token_budget=budget, max_tokens=80, seed=seed, temperature=seed / 2, **options)
        for seed in range(len(CHATS))
    ]
    more = {"tools": [TOOL], "tool_choice": "required"} if tools else {}
    return [one for output in llm.chat(CHATS, params, **more) for one in output.outputs]


@pytest.mark.quick("tools")
@pytest.mark.parametrize("tools", [False, True], ids=["free", "tools"])
def test_reasoning_is_what_it_would_be_up_to_the_bound_and_ends_there(llm: LLM, tools: bool) -> None:
    marker = len(llm.get_tokenizer().encode("</think>", add_special_tokens=False))  # type: ignore[union-attr]
    unbounded = answers(llm, None, tools)
    assert any(one.reasoning_tokens == 80 for one in unbounded), "none would reason on"
    for budget in (0, 1, 9):
        for one, other in zip(answers(llm, budget, tools), unbounded, strict=True):
            same = min(budget, other.reasoning_tokens)
            assert one.token_ids[:same] == other.token_ids[:same]
            if other.reasoning_tokens > budget + marker:
                assert one.token_ids[: budget + marker] != other.token_ids[: budget + marker]
                assert budget <= one.reasoning_tokens <= budget + marker
                assert len(one.token_ids) > one.reasoning_tokens, "nothing comes after it"
            if tools and one.finish_reason == "stop":
                assert [call.name for call in one.reply.tool_calls][:1] == ["weather"]
    large = answers(llm, 1000, tools)
    assert [one.token_ids for one in large] == [one.token_ids for one in unbounded]


COMPANIES: dict[str, dict[str, Any]] = {
    "overlap, few blocks": {
        "async_scheduling": True,
        "num_kv_blocks": 24,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
    },
    "ngrams": {
        "num_kv_blocks": 512,
        "speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1},
    },
    "draft model": {
        "num_kv_blocks": 512,
        "speculative_config": {"method": "draft_model", "model": "demo-draft", "adaptive": False},
        "async_scheduling": True,
    },
}


def of_all_kinds(llm: LLM) -> list[list[CompletionOutput]]:
    return [answers(llm, budget, tools, n=2) for budget, tools in ((0, True), (3, False), (11, True))]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[CompletionOutput]]:
    return of_all_kinds(llm)


@pytest.mark.quick("ngrams")
@pytest.mark.parametrize("name", COMPANIES)
def test_tokens_are_the_same_in_any_company(checkpoint: Path, alone: list[list[CompletionOutput]], name: str) -> None:
    with LLM(str(checkpoint), max_model_len=256, check_invariants=True, **COMPANIES[name]) as other:
        found = of_all_kinds(other)
        assert "few blocks" not in name or other.stats.preemptions > 0
        assert "speculative_config" not in COMPANIES[name] or other.stats.drafted > 0
    for ours, theirs in zip(alone, found, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert one.token_ids == two.token_ids and one.reasoning_tokens == two.reasoning_tokens


def test_a_request_goes_on_after_tokens_that_another_engine_made(llm: LLM) -> None:
    params = SamplingParams(thinking_token_budget=6, seed=3, temperature=1.2, max_tokens=30)
    [whole] = llm.chat(CHATS[0], params)
    tokens, engine = whole.outputs[0].token_ids, llm._engine
    chat = llm._render(CHATS[0], {})
    resolved = llm._frontend.prepare_all([chat.token_ids], [params], [chat.reply])[0]
    for done in (1, 5, 6, 7, len(tokens) - 1):
        request = Request(
            20_000 + done, chat.token_ids, resolved.params, max_tokens=30, output_token_ids=tokens[:done],
            stop_token_ids=frozenset(llm.model.eos_token_ids), reasoning=resolved.reasoning,
        )  # fmt: skip
        engine.add(request)
        new: list[int] = []
        while not engine.idle:
            new += [token for update in engine.step() for token in update.tokens]
        assert [*tokens[:done], *new] == tokens


def test_masks_that_contradict_the_bound_end_the_request_with_an_error(llm: LLM) -> None:
    [bad, _, good] = answers(llm, 2, bad_words=["</think>", "<", "</", " </"])
    assert bad.finish_reason == "error" and "thinking_token_budget" in str(bad.error)
    assert len(bad.token_ids) == 2 and good.error == bad.error


def test_a_bound_means_a_chat_whose_template_reasons(llm: LLM) -> None:
    params = SamplingParams(thinking_token_budget=5)
    with pytest.raises(SamplingParamsError, match="this is not a chat") as found:
        llm.generate("Once", params)
    assert found.value.param == "thinking_token_budget"
    with LLM("demo") as plain, pytest.raises(SamplingParamsError, match="shows no reasoning"):
        plain.chat(CHATS[0], params)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    for bad in (-2, 1.5, True, "3"):
        with pytest.raises(SamplingParamsError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=bad)  # type: ignore[arg-type]
