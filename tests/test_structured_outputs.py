"""Outputs of a form that was asked for: valid whatever the model would say, and the same tokens in any company."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import runpy
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.core.request import Request, RequestUpdate
from quire.core.step import StepPlan, TokenLogprobs
from quire.engine import compiling
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.errors import SamplingParamsError
from quire.grammar import grammars, library
from quire.grammar.json_schema import ANNOTATIONS, ASSERTIONS, FORMATS, LISTS, MAPS, ONE

ROOT = Path(__file__).resolve().parents[1]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
        "age": {"type": "integer", "minimum": -5, "maximum": 130},
        "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "friend": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"}]},
    },
    "required": ["name", "tags", "age", "friend"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": r"[a-z]{2,8}(-[0-9]{3}){1,6}\."},
    {"choice": ["yes", "no", "perhaps, but who knows?"]},
    {"grammar": 'root ::= item ("," item){2,5} ";"\nitem ::= [a-f]+ "=" ("on" | "off")'},
    {"grammar": 'start: "(" expr ")"\nexpr: NUMBER | NUMBER "+" expr\nNUMBER: /[0-9]{1,3}/'},
]
PROMPTS = ["def f(x):\n    return", "Once upon a time", "{", '{"name": "', "x = [1, 2, 3]\n" * 8]


def jobs() -> list[tuple[str, SamplingParams]]:
    """Every form at several temperatures, with other parameters that change logits, and plain requests between them."""
    extras: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"bad_words": ["red", "a"], "min_tokens": 2},
        {"presence_penalty": 0.5, "logit_bias": {40: 5.0}},
        {"n": 2, "top_p": 0.9},
    ]
    made = []
    for number, form in enumerate([*FORMS, None] * 3):
        extra = extras[number % len(extras)] if form is None or "choice" not in form else {}
        params = SamplingParams(
            structured_outputs=form, max_tokens=40, seed=number, temperature=(0.0, 0.8, 2.0)[number // 7], **extra
        )
        made.append((PROMPTS[number % len(PROMPTS)], params))
    return made


def tokens_of(llm: LLM, wanted: list[tuple[str, SamplingParams]]) -> list[Any]:
    outputs = llm.generate([prompt for prompt, _ in wanted], [params for _, params in wanted])
    return [
        [(choice.token_ids, choice.finish_reason, choice.error, choice.cumulative_logprob) for choice in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, num_kv_blocks=512, check_invariants=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Any]:
    """What each job gives by itself."""
    return [tokens_of(llm, [job])[0] for job in jobs()]


ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "overlap": {"async_scheduling": True},
    "small chunks, few blocks": {
        "max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_memory": "448KiB", "max_model_len": 160,
        "async_scheduling": True, "block_size": 16,
    },
    "ngrams": {"speculative_config": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}},
    "draft model": {"speculative_config": {"method": "draft_model", "adaptive": False}, "async_scheduling": True},
    "tree": {"speculative_config": {"method": "eagle", "adaptive": False, "tree_width": 2, "tree_depth": 3}},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.quick("overlap", "tree")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("two ") else ()) for name in ENGINES]
)
def test_tokens_are_the_same_in_any_company(alone: list[Any], name: str) -> None:
    blocks = {} if "few blocks" in name else {"num_kv_blocks": 512}
    with LLM("demo", threads=1, check_invariants=True, **blocks, **ENGINES[name]) as other:
        assert tokens_of(other, jobs()) == alone
        assert "speculative_config" not in ENGINES[name] or other.stats.drafted > 0
        assert "few blocks" not in name or other.stats.preemptions > 0


def test_what_comes_of_each_form_is_of_it(alone: list[Any]) -> None:
    for (_, params), choices in zip(jobs(), alone, strict=True):
        assert {reason for _, reason, _, _ in choices} <= {"stop", "length"}, (params, choices)
    assert sum(reason == "stop" for choices in alone for _, reason, _, _ in choices) > 8


def text_of(llm: LLM, form: dict[str, Any], **options: Any) -> tuple[str, str | None]:
    [output] = llm.generate(
        "Once", SamplingParams(structured_outputs=form, **{"max_tokens": 400, "seed": 1, **options})
    )
    assert output.outputs[0].error is None
    return output.outputs[0].text, output.outputs[0].finish_reason


@pytest.mark.quick("0")
@pytest.mark.parametrize("temperature", [0, 0.7, 2])
def test_each_form_is_met(llm: LLM, temperature: float) -> None:
    for form in FORMS:
        text, reason = text_of(llm, form, temperature=temperature, frequency_penalty=1.0)
        if reason == "length":
            continue  # see below
        if "json" in form:
            jsonschema.validate(json.loads(text), form["json"])
        elif "regex" in form:
            assert re.fullmatch(form["regex"], text)
        elif "choice" in form:
            assert text in form["choice"]
        elif "root" in form["grammar"]:
            assert re.fullmatch("[a-f]+=(on|off)(,[a-f]+=(on|off)){2,5};", text)
        else:
            assert re.fullmatch(r"\([0-9]{1,3}(\+[0-9]{1,3})*\)", text)


def test_what_a_form_forces_is_drafted_for_free(llm: LLM) -> None:
    fields = [f"field_number_{number}" for number in range(20)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in fields},
        "required": fields,
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = SamplingParams(structured_outputs=form, max_tokens=600, seed=3)
    with LLM("demo", threads=1, speculative_config={"method": "ngram", "prompt_lookup_min": 5}) as other:
        counts, tokens = [], []
        for engine in (llm, other):
            before = engine.stats.steps
            [output] = engine.generate("Once", params)
            assert [*json.loads(output.outputs[0].text)] == fields
            tokens.append(output.outputs[0].token_ids)
            counts.append(engine.stats.steps - before)
    assert tokens[0] == tokens[1]
    assert counts[1] < 0.7 * counts[0]


# -- any schema ------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "name", "x-y", "Ä", 'q"t', "a/b", "0", "line\n"])
SMALL = st.integers(0, 3)


def limits(low: str, high: str) -> st.SearchStrategy[dict[str, Any]]:
    """None of two bounds, one, or both in their order."""
    both = st.tuples(SMALL, SMALL).map(sorted)
    return both.flatmap(lambda two: st.sampled_from([{}, {low: two[0]}, {high: two[1]}, {low: two[0], high: two[1]}]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "a", "ü\n", '"\\']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
STRINGS = st.builds(lambda bounds: {"type": "string", **bounds}, limits("minLength", "maxLength")) | st.sampled_from(
    [
        {"type": "string", "pattern": "[0-9]$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
    ]
)
NUMBERS = st.builds(
    lambda kind, bounds, step: {"type": kind, **bounds, **step},
    st.sampled_from(["integer", "number"]),
    limits("minimum", "maximum"),
    st.sampled_from([{}, {"multipleOf": 1}]),
)
LEAVES = (
    STRINGS
    | NUMBERS
    | st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}, {}, True])
    | st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | VALUES.map(lambda value: {"const": value})
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, bounds: {"type": "array", "items": items, **bounds}, inner, limits("minItems", "maxItems")
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": 1}
    )

    @st.composite
    def objects(draw: Any) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, max_size=4))
        required = [name for name in properties if draw(st.booleans())]
        more = draw(st.sampled_from([False, False, {"type": "integer"}, {"type": "string", "maxLength": 3}]))
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}

    several = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return arrays | tuples | objects() | several | inner.map(lambda one: {"$defs": {"d": True}, "allOf": [one]})


SCHEMAS = st.recursive(LEAVES, compound, max_leaves=6)


def outcome(llm: LLM, jobs: list[tuple[Any, float, int]], seed: int) -> list[Any]:
    """What comes of each schema at a temperature, cut at so many tokens; None where the schema is refused."""
    params: list[SamplingParams | None] = []
    for schema, temperature, most in jobs:
        form = StructuredOutputsParams(json=schema)
        try:
            llm._engine.grammars.compile(form)
        except SamplingParamsError as error:
            assert "cannot be used" in str(error), error  # nothing can meet it
            params.append(None)
            continue
        params.append(SamplingParams(structured_outputs=form, temperature=temperature, seed=seed, max_tokens=most))
    kept = [each for each in params if each]
    outputs = iter(llm.generate(["Once"] * len(kept), kept) if kept else [])
    return [each and next(outputs).outputs[0] for each in params]


@settings(max_examples=3, deadline=None, suppress_health_check=[*HealthCheck])
@given(schemas=st.lists(SCHEMAS, min_size=16, max_size=16), seed=st.integers(0, 99), cut=st.integers(1, 30))
def test_whatever_the_schema_a_finished_reply_meets_it(llm: LLM, schemas: list[Any], seed: int, cut: int) -> None:
    jobs = [(schema, (0.0, 0.7, 1.3, 2.0)[index % 4], 150) for index, schema in enumerate(schemas)]
    cut_jobs = [(schema, temperature, cut) for schema, temperature, _ in jobs]
    made = outcome(llm, [*jobs, *cut_jobs], seed)
    for schema, whole, part in zip(schemas, made, made[len(jobs) :], strict=False):
        if whole is None:
            continue
        assert whole.error is None and whole.finish_reason in ("stop", "length")
        assert whole.text.startswith(part.text.rstrip("\ufffd"))  # what is cut is the beginning of something valid
        if whole.finish_reason == "stop":
            jsonschema.validate(json.loads(whole.text), schema)


# -- beside other parameters -----------------------------------------------------------------------------------


def test_min_tokens_that_a_form_does_not_allow_end_the_request_with_an_error_and_no_other(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=20, seed=3)
    [expected] = llm.generate("Once", plain)
    params = [SamplingParams(structured_outputs={"choice": ["yes"]}, min_tokens=9, max_tokens=20), plain]
    bad, good = llm.generate(["Once"] * 2, params)
    assert bad.outputs[0].finish_reason == "error"
    assert "min_tokens" in (bad.outputs[0].error or "")
    assert good.outputs[0].token_ids == expected.outputs[0].token_ids


def test_masks_that_contradict_the_form_end_the_request_with_an_error(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=[5, 6], max_tokens=20)
    [output] = llm.generate("Once", params)
    assert output.outputs[0].finish_reason == "error"
    assert "structured_outputs" in (output.outputs[0].error or "")


def test_a_stop_token_that_is_no_text_comes_only_where_the_reply_is_complete(llm: LLM) -> None:
    for token in (0, 1):  # special ones, neither of them the model's end
        params = SamplingParams(
            structured_outputs={"regex": "x{3}"}, stop_token_ids=[token], logit_bias={token: 100}, temperature=0
        )
        [output] = llm.generate("Once", params)
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("xxx", token)


def test_a_stop_token_that_is_text_cuts_the_reply_where_the_form_has_it_and_comes_nowhere_else(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [comma] = llm.tokenizer.encode(",", add_special_tokens=False)
    common: dict[str, Any] = {"stop_token_ids": [comma], "logit_bias": {comma: 100}, "temperature": 0}
    [cut] = llm.generate("Once", SamplingParams(structured_outputs={"regex": "x{3},x{3}"}, **common))
    assert (cut.outputs[0].text, cut.outputs[0].stop_reason) == ("xxx,", comma)
    [whole] = llm.generate("Once", SamplingParams(structured_outputs={"regex": "x{3}"}, **common))
    assert (whole.outputs[0].text, whole.outputs[0].stop_reason) == ("xxx", None)


def test_a_stop_string_ends_a_constrained_output_too(llm: LLM) -> None:
    [output] = llm.generate(
        "Once", SamplingParams(structured_outputs={"regex": "(ab){20}"}, stop=["ba"], max_tokens=50)
    )
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "ba")


def test_special_tokens_are_no_text(llm: LLM) -> None:
    text, reason = text_of(llm, {"choice": ["<|im_end|>", "<|endoftext|>"]}, skip_special_tokens=False)
    assert reason == "stop"
    assert text.startswith(("<|im_end|>", "<|endoftext|>"))
    [output] = llm.generate(
        "Once", SamplingParams(structured_outputs={"choice": ["<|im_end|>"]}, max_tokens=50, temperature=0)
    )
    assert len(output.outputs[0].token_ids) > 2


def test_a_request_goes_on_after_tokens_that_another_engine_made(llm: LLM) -> None:
    form = StructuredOutputsParams(json=PERSON)
    [whole] = llm.generate("Once", SamplingParams(structured_outputs=form, seed=4, temperature=1.2, max_tokens=200))
    tokens, engine = whole.outputs[0].token_ids, llm._engine
    assert whole.outputs[0].finish_reason == "stop" and len(tokens) > 8
    for done in (1, 5, len(tokens) - 1):
        params = llm._frontend.prepare("Once", SamplingParams(structured_outputs=form, seed=4, temperature=1.2)).params
        stops = frozenset(llm.model.eos_token_ids)
        request = Request(
            10_000 + done, whole.prompt_token_ids, params, max_tokens=200, stop_token_ids=stops,
            output_token_ids=tokens[:done],
        )  # fmt: skip
        engine.add(request)
        new: list[int] = []
        while not engine.idle:
            new += [token for update in engine.step() for token in update.tokens]
        assert [*tokens[:done], *new] == tokens


# -- compiling --------------------------------------------------------------------------------------------------


def add(llm: LLM, number: int, form: StructuredOutputsParams | None) -> None:
    params = SamplingParams(structured_outputs=form, seed=1).resolved()
    stops = frozenset(llm.model.eos_token_ids)
    llm._engine.add(Request(number, [70, 71], params, max_tokens=5, stop_token_ids=stops))


def test_others_pass_a_request_whose_grammar_is_being_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, grammars = llm._engine, llm._engine.grammars
    begun: list[StructuredOutputsParams] = []
    with monkeypatch.context() as held:
        held.setattr(grammars, "begin", begun.append)
        held.setattr(type(grammars), "compiling", True)
        held.setattr(grammars, "ended", lambda seconds=0.0: [])
        form = StructuredOutputsParams(regex="zz[0-9]{3}")
        add(llm, 20_000, form)
        add(llm, 20_001, None)
        ended: list[int] = []
        while len(ended) < 1:
            ended += [update.request for update in engine.step() if update.finish_reason]
        assert ended == [20_001] and begun == [form]
    grammars.begin(form)
    while not engine.idle:
        ended += [update.request for update in engine.step() if update.finish_reason]
    assert ended == [20_001, 20_000]


@pytest.mark.slow
def test_plain_streams_get_a_token_in_every_step_beside_as_many_with_schemas_of_their_own(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gaps are single steps, and nothing is compiled within one."""
    compilers: set[str] = set()
    compiled = library.compiled

    def noted(*given: Any) -> Any:
        compilers.add(threading.current_thread().name)
        return compiled(*given)

    monkeypatch.setattr(library, "compiled", noted)
    monkeypatch.setattr(
        llm._frontend, "_compile", None
    )  # as in a server, whose engine does not compile for its clients
    plain = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    [alone] = llm.generate("Once", plain)
    streams = [llm.add_request("Once", plain) for _ in range(32)]
    made: dict[str, int] = {}
    others: list[str] = []
    ended: dict[str, Any] = {}
    together = 0
    while not llm.idle:
        before = dict(made)
        for output in llm.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                ended[output.request_id] = output.outputs[0]
        if min(before.get(name, 0) for name in streams):  # all have begun
            assert all(made[name] == before[name] + (before[name] < 60) for name in streams)
            together += any(made.get(name, 0) > before.get(name, 0) for name in others)
        if len(others) < 32 and len(made) >= 32:  # two come a step, each with a schema that nobody had before
            for number in (len(others), len(others) + 1):
                schema = {**PERSON, "title": f"stream {number}"}
                params = SamplingParams(structured_outputs={"json": schema}, max_tokens=200, seed=number)
                others.append(llm.add_request("Once", params))
    assert together > 30 and len(ended) == 64
    assert all(ended[name].token_ids == alone.outputs[0].token_ids for name in streams)
    assert all(ended[name].error is None for name in others)
    assert sum(ended[name].finish_reason == "stop" for name in others) > 8
    for name in others:
        if ended[name].finish_reason == "stop":
            jsonschema.validate(json.loads(ended[name].text), PERSON)
    assert compilers and threading.current_thread().name not in compilers


def test_a_grammar_that_was_evicted_while_its_request_waited_is_compiled_again_beside_the_steps(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, compiled, compilers = llm._engine, library.compiled, list[str]()
    monkeypatch.setattr(library, "compiled", lambda *given: compilers.append(_thread()) or compiled(*given))
    monkeypatch.setattr(grammars, "MAX_GRAMMARS", 2)
    monkeypatch.setattr(compiling, "MOST_AHEAD", 4)
    for number in range(12):
        add(llm, 22_000 + number, StructuredOutputsParams(regex=f"q{number}[0-9]{{3}}"))
        assert engine.grammars.num_compiling <= 4
    wait(engine.grammars._begun.values())
    ended: list[str | None] = []
    while not engine.idle:
        ended += [update.finish_reason for update in engine.step() if update.finish_reason]
    assert len(ended) == 12 and "error" not in ended
    assert len(compilers) > 12 and set(compilers) == {"grammars_0"}


def _thread() -> str:
    return threading.current_thread().name


def test_requests_whose_grammars_take_too_much_together_wait_for_one_another(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.grammar.in_use.MAX_USED_BYTES", 1)
    held, used = [], llm._engine.grammars._in_use

    class Watch:
        def planned(self, plan: StepPlan, *args: object) -> None:
            held.append(len({*used._matchers}))

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    watch = Watch()
    llm._engine._observers.append(watch)
    try:
        forms = [StructuredOutputsParams(regex=f"d{number}[a-c]{{3,6}}") for number in (1, 2, 3, 2, 1, 3)]
        given = [SamplingParams(max_tokens=12, seed=1, structured_outputs=form) for form in forms]
        given.insert(2, SamplingParams(max_tokens=4, seed=1))
        made = llm.generate(["x"] * len(given), given)
    finally:
        llm._engine._observers.remove(watch)
    for output, params in zip(made, given, strict=True):
        assert output.outputs[0].error is None and output.outputs[0].finish_reason in ("stop", "length")
        assert params.structured_outputs is None or output.outputs[0].text.startswith(
            str(params.structured_outputs.regex)[:2]
        )
    assert max(held) <= 2, "and one that has ended is forgotten with the next step"
    assert len(set(forms)) == 3 and llm._engine._compiling._full is None


def test_other_ranks_are_told_of_a_grammar_no_later_than_its_request_starts(llm: LLM) -> None:
    plans: list[StepPlan] = []
    form = StructuredOutputsParams(regex="yy[0-9]{3}")
    with pytest.MonkeyPatch.context() as patch:
        submit = llm._engine.executor.submit
        patch.setattr(llm._engine.executor, "submit", lambda plan: plans.append(plan) or submit(plan))
        add(llm, 25_000, None)
        llm._engine.step()
        add(llm, 25_001, form)
        while not llm._engine.idle:
            llm._engine.step()
    told = [index for index, plan in enumerate(plans) if form in plan.compiles]
    starts = [index for index, plan in enumerate(plans) for info in plan.started if info.request == 25_001]
    assert len(told) == len(starts) == 1 and told <= starts


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(llm: LLM) -> None:
    add(llm, 30_000, StructuredOutputsParams(regex="(?=a)b"))
    add(llm, 30_001, None)
    reasons = {}
    while not llm._engine.idle:
        reasons |= {
            update.request: (update.finish_reason, update.error)
            for update in llm._engine.step()
            if update.finish_reason
        }
    assert reasons[30_001] == ("length", None)
    assert reasons[30_000][0] == "error" and "look-ahead" in reasons[30_000][1]


def test_a_checkpoint_without_a_tokenizer_or_an_end_has_no_forms(llm: LLM) -> None:
    frontend = llm._frontend
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(frontend, "tokenizer", None)
        with pytest.raises(SamplingParamsError, match="structured_outputs needs a tokenizer"):
            frontend.check(None, [1], SamplingParams(structured_outputs={"regex": "a"}), [])
        patch.undo()
        patch.setattr(frontend, "_eos", frozenset())
        with pytest.raises(SamplingParamsError, match="set stop_token_ids"):
            frontend.check(None, [1], SamplingParams(structured_outputs={"regex": "a"}), [])


# -- the documentation ---------------------------------------------------------------------------------------------


def test_the_example_for_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "example.py").write_text(example)
    runpy.run_path(str(tmp_path / "example.py"))
    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] in ("Ada", "Grace") and 0 <= answer["age"] <= 130


def test_the_example_with_tools_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    [example] = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "tool_format" in one]
    (tmp_path / "example.py").write_text(example)
    runpy.run_path(str(tmp_path / "example.py"))
    assert "name='weather', arguments='{" in capsys.readouterr().out


def test_the_documentation_names_every_keyword_and_format_that_is_enforced() -> None:
    text = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w$-]+)`", text))
    assert ONE | LISTS | MAPS | ASSERTIONS | FORMATS | (ANNOTATIONS - {"id"}) <= named


def resumed(llm: LLM, params: SamplingParams, known: CompletionOutput | None, count: int) -> RequestOutput:
    """What becomes of a request of which another server has generated the first tokens."""
    ids, scored = ([], None) if known is None else (known.token_ids[:count], known.logprobs)
    logprobs = None if scored is None else [plain(entry) for entry in scored[:count]]
    prepared = llm._frontend.prepare("def f(x):\n    return", params)
    output = llm._frontend.submit(prepared, earlier=[RequestUpdate(0, [*ids], logprobs)] if ids else ())
    while not output.finished:
        llm.step()
    for choice in output.outputs:
        choice.delta = ""
    return output


def plain(entry: dict[int, Logprob]) -> TokenLogprobs:
    return TokenLogprobs([*entry], [each.logprob for each in entry.values()], [each.rank for each in entry.values()])


@pytest.mark.parametrize("form", [None, {"regex": "[a-z ]{40}"}])
def test_a_request_goes_on_after_tokens_of_another_server_as_if_they_were_its_own(llm: LLM, form: Any) -> None:
    wanted = None if form is None else StructuredOutputsParams(**form)
    params = SamplingParams(
        max_tokens=40,
        seed=3,
        temperature=0.9,
        logprobs=2,
        repetition_penalty=1.1,
        stop=["zq"],
        structured_outputs=wanted,
    )
    whole = resumed(llm, params, None, 0)
    for count in (1, 7, len(whole.outputs[0].token_ids) - 1):
        again = resumed(llm, params, whole.outputs[0], count)
        assert again.outputs == whole.outputs


def test_tokens_that_break_a_grammar_end_the_request_that_came_with_them_and_no_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=3, structured_outputs=StructuredOutputsParams(regex="[0-9]{30}"))
    whole = resumed(llm, params, None, 0)
    words = llm.tokenizer.encode("never a number") if llm.tokenizer else []
    wrong = dataclasses.replace(whole.outputs[0], token_ids=words)
    failed = resumed(llm, params, wrong, 3)
    assert failed.outputs[0].finish_reason == "error" and "structured_outputs" in (failed.outputs[0].error or "")
    assert resumed(llm, params, None, 0).outputs == whole.outputs
