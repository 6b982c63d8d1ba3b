"""What published templates print is what the mask lets through, token by token, and what the parser reads back; and
they print the same as in transformers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import runpy
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pytest

from quire.core.sampling_params import SamplingParams
from quire.errors import ChatTemplateError
from quire.text.chat_template import REASONING_NAMES
from quire.text.detokenizer import Detokenizer
from quire.text.reply import Reply
from quire.text.reply_grammar import reply_request
from quire.text.reply_parser import ReplyParser
from quire.text.tokenizer import Tokenizer
from tests.published_templates import NAMES, ROOT, found_syntax, tokenizer
from tests.test_reply_grammar import grammars_of

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "at": {"type": "array", "items": {"type": "number"}}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "description": "how many"},
                    "place": {**CITY, "description": "exactly"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
    },
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Books a table.",
            "parameters": {
                "type": "object",
                "$defs": {"Place": CITY},
                "properties": {
                    "day": {"type": "string", "format": "date", "description": "when"},
                    "link": {"type": "string", "format": "uri", "description": "what is asked"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                    "place": {"$ref": "#/$defs/Place"},
                },
                "required": ["day"],
            },
        },
    },
]


Call = tuple[str, dict[str, Any]]
ROME: Call = ("weather", {"city": "Rome", "days": 3})
PAULO: Call = ("weather", {"city": "São Paulo", "place": {"name": "Sé", "at": [-23.5, 46]}})
NOW: Call = ("now", {})
BOOK: Call = ("book", {"day": "2024-01-01", "link": "http://a.b/c", "note": "1 window", "place": {"name": "Sé"}})


class Said(NamedTuple):
    """A reply, and what was called and answered before it."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    before: tuple[Call, ...] = ()


REPLIES = {
    "text": Said(content="It will not rain."),
    "reasoning": Said("I look at the sky.", "No."),
    "call": Said(calls=(ROME,)),
    "reasoned call": Said("I need a forecast.", calls=(ROME,)),
    "several calls": Said(calls=(ROME, PAULO)),
    "call, no arguments": Said(calls=(NOW,)),
    "text and call": Said(content="Let me see.", calls=(PAULO,)),
    "call, date, address, Optional and reference": Said(calls=(BOOK,)),
    "text after a result": Said(content="It will rain.", before=(ROME,)),
    "call after a result": Said(calls=(PAULO,), before=(ROME,)),
}
EACH_WAY = {
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm47",
    "MiniMax-M2": "minimax_m2",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "derived",
    "Mistral-Small-3.2-24B-Instruct-2506": "derived",
    "moonshotai-Kimi-K2": "kimi_k2",
    "Cohere2MoE": "derived",
    "upstage-Solar-Open-100B": "derived",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "openai-gpt-oss-120b": "harmony",
}
"""A template for each way of writing calls, and the name of what is found."""
OTHERWISE = {
    ("openai-gpt-oss-120b", "text and call"): "text before a call is printed as reasoning",
    ("LFM2.5-8B-A1B", "date"): "an address stands in single quotes; in double ones its form is enforced",
    ("deepseek-ai-DeepSeek-V4", "no arguments"): "there is an empty line, which the mask takes out",
    ("deepseek-ai-DeepSeek-V4-Flash-0731", "no arguments"): "there is an empty line, which the mask takes out",
    ("meetkai-functionary-medium-v3.2", "text"): "a recipient of text stands before it, in plain letters",
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "text and call"): "text is a message behind its call's",
    ("google-gemma-4-31B-it", "text and call"): "text stands behind the call that it precedes",
    ("google-gemma-4-31B-it-interleaved", "text and call"): "text stands behind the call that it precedes",
    ("MiniMax-M3", "text"): "without reasoning, a reply begins with the end of it",
    ("muse-glimmer", "text"): "a recipient of text stands before it, in plain letters",
}
"""What templates print and models are not made to write, by words in the kinds of replies, and why."""


def chat(found: Tokenizer, said: Said) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages before a reply, as OpenAI's clients send them, and the reply as a message."""
    tools = found.reply_syntax.tools
    numbers = itertools.count()

    def message(calls: tuple[Call, ...], **fields: Any) -> dict[str, Any]:
        made = []
        for name, arguments in calls:
            number = next(numbers)
            id = f"functions.{name}:{number}" if tools is None or tools.numbered else f"abcDEF12{number}"
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            made.append({"id": id, "type": "function", "function": function})
        return {"role": "assistant", **fields, **({"tool_calls": made} if made else {})}

    messages: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain in São Paulo?"}]
    if said.before:
        messages.append(message(said.before, content=None))
        calls = messages[-1]["tool_calls"]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
    return messages, message(said.calls, content=said.content, **thought)


def printed(found: Tokenizer, said: Said) -> tuple[Any, str] | None:
    """The prompt, and what the template prints of a reply to it; None if it prints no such reply."""
    reasoning, content, calls, before = said
    syntax = found.reply_syntax
    if ((calls or before) and syntax.tools is None) or (reasoning and syntax.reasoning is None):
        return None
    if len(calls) > 1 and syntax.tools is not None and syntax.tools.single:
        return None
    messages, reply = chat(found, said)
    template = found._template(True)

    def rendered(last: dict[str, Any]) -> str:
        known = template.as_known(copy.deepcopy([*messages, last]))
        return template.render(known, tools=TOOLS if syntax.tools else None, add_generation_prompt=False)

    try:
        wanted = reply_request(TOOLS) if syntax.tools is not None else reply_request()
        prompt = found.apply_chat_template(copy.deepcopy(messages), reply=wanted)
        whole, plain = rendered(reply), rendered({"role": "assistant", "content": "qz"})
    except ChatTemplateError:
        return None
    common, start = prompt.text, syntax.reasoning.start if syntax.reasoning is not None else ""
    if start and not whole.startswith(common):  # reasoning was opened, and is printed closed or not at all
        common = common.rstrip().removesuffix(syntax.reasoning.end).rstrip().removesuffix(start)
    if not whole.startswith(common):
        return None  # the history is printed otherwise than the reply was begun
    body = whole[len(common) :]
    if common != prompt.text:
        body = body.removeprefix(start).removeprefix(start.partition("\n")[0])
        body = body.removeprefix(syntax.reasoning.end) if prompt.reply.reasoned else body
    after = plain.rpartition("qz")[2]
    at = max(body.rfind(word) for word in (content, *(name for name, _ in calls)) if word)
    ends = [*re.findall(r"<[^<>\s]+>", after), "<|eom_id|>", "<|tool_response>", "<|call|>", after.strip()]
    body = body[
        : min([place for end in ends if end and (place := body.find(end, at)) >= 0], default=len(body))
    ].rstrip()
    if reasoning and prompt.text.rstrip().endswith(syntax.reasoning.end):
        return None  # the prompt has turned it off
    if prompt.reply.in_reasoning and prompt.reply.syntax.reasoning.end not in body:
        return None
    missing = reasoning not in body or content not in body or any(name not in body for name, _ in calls)
    return None if missing or "{'" in body else (prompt, body)  # some print lists and objects as Python does


def check(found: Tokenizer, kind: str) -> bool:
    """Whether there was such a reply to check."""
    case = printed(found, REPLIES[kind])
    if case is None:
        return False
    prompt, body = case
    ids = found._controls().encode(body).ids
    if prompt.structured is not None:
        matcher = grammars_of(found).matcher(prompt.structured, [0])
        for index, token in enumerate(ids):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            assert bits[token], (body, found.decode(ids[:index], False), found.decode([token], False))
            matcher.append(token)
    for size in (1, len(ids)):
        parser = ReplyParser(prompt.reply, found.special_texts)
        detokenizer = Detokenizer(found, SamplingParams(), parser)
        for at in range(0, len(ids), size):
            detokenizer.push(ids[at : at + size])
        detokenizer.finish()
        reply, (reasoning, content, calls, _) = Reply.of(parser.events), REPLIES[kind]
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [*calls]
        assert (reply.reasoning or "").strip() == reasoning and reply.content.strip() == content
    return True


def kinds(name: str) -> list[str]:
    """The kinds of replies that a template prints as models are made to write them."""
    other = [words for template, words in OTHERWISE if template == name]
    return [kind for kind in REPLIES if not any(words in kind for words in other)]


@pytest.mark.parametrize("name", EACH_WAY)
def test_a_published_template_s_replies_pass_the_mask_and_are_read_back(name: str) -> None:
    found = tokenizer(name, real=False)
    assert found.reply_syntax.name == EACH_WAY[name] and found.reply_syntax.tools is not None
    assert {kind for kind in kinds(name) if check(found, kind)} & {"call", "reasoned call"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_published_templates_replies_pass_the_mask_and_are_read_back(name: str) -> None:
    found = tokenizer(name, real=True)
    for kind in kinds(name):
        check(found, kind)


def in_transformers(found: Tokenizer, messages: list[dict[str, Any]], begun: bool) -> set[str]:
    """What transformers prints of these messages, in each spelling that its templates take: arguments as objects or
    text, no content as given, as null or as an empty text."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = set()
    for as_text, empty in itertools.product((False, True), ((None, ""), (None,), ("",))):
        given = copy.deepcopy(messages)
        for message in given:
            for call in message.get("tool_calls", ()) if not as_text else ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            message["content"] = message["content"] if message["content"] or len(empty) > 1 else empty[0]
            message |= (
                dict.fromkeys(REASONING_NAMES, message["reasoning_content"]) if message.get("reasoning_content") else {}
            )
        with contextlib.suppress(jinja2.TemplateError, TypeError):
            [text], _ = render_jinja_template(
                [given],
                tools=TOOLS,
                chat_template=found._template(True).source,
                add_generation_prompt=begun,
                **found.special_tokens,
            )
            texts.add(text)
    return texts


def check_same(found: Tokenizer, said: Said, begun: bool) -> None:
    messages, reply = chat(found, said)
    messages = messages if begun else [*messages, reply]
    template = found._template(True)
    try:
        ours = template.render(template.as_known(copy.deepcopy(messages)), tools=TOOLS, add_generation_prompt=begun)
    except ChatTemplateError as error:
        assert not in_transformers(found, messages, begun), error
    else:
        assert ours in in_transformers(found, messages, begun)


@pytest.mark.parametrize(
    "name", [*EACH_WAY, *(pytest.param(one, marks=pytest.mark.slow) for one in NAMES if one not in EACH_WAY)]
)
def test_a_published_template_prints_what_it_prints_in_transformers(name: str) -> None:
    found = tokenizer(name, real=False)
    for said in REPLIES.values():
        check_same(found, said, begun=True)
        check_same(found, said, begun=False)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_derived_from_a_published_template_fails(name: str) -> None:
    syntax = found_syntax(name)
    assert not syntax.lost and "qz" not in repr(syntax)
    assert syntax.tools is None or syntax.tools.trigger


def test_the_table_of_docs_agents_is_what_is_found() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "reply_formats.py"), run_name="reply_formats")
    assert not script["wrong_families"]()
    made = script["table"](found_syntax)
    assert made in (ROOT / "docs" / "agents.md").read_text(), "write it with scripts/reply_formats.py --write"
