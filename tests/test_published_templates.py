"""What published templates print is what the mask lets through, token by token, and what the parser reads back."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest

from quire.core.sampling_params import SamplingParams
from quire.errors import ChatTemplateError
from quire.text.chat_template import ChatTemplate
from quire.text.detokenizer import Detokenizer
from quire.text.reply import Reply
from quire.text.reply_formats import find_syntax
from quire.text.reply_grammar import reply_request
from quire.text.reply_parser import ReplyParser
from quire.text.tokenizer import Tokenizer
from tests.published_templates import NAMES, has_own_tokenizer, source, tokenizer
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
]
ASKED = [{"role": "user", "content": "Will it rain in São Paulo?"}]
ROME = ("weather", {"city": "Rome", "days": 3})
PAULO = ("weather", {"city": "São Paulo", "place": {"name": "Sé", "at": [-23.5, 46]}})
NOW: tuple[str, dict[str, Any]] = ("now", {})
REPLIES: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "text": ("", "It will not rain.", []),
    "reasoning": ("I look at the sky.", "No.", []),
    "call": ("", "", [ROME]),
    "reasoned call": ("I need a forecast.", "", [ROME]),
    "several": ("", "", [ROME, PAULO]),
    "no arguments": ("", "", [NOW]),
    "text and call": ("", "Let me see.", [PAULO]),
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
}
"""A template for each way of writing calls, and the name of what is found."""


def printed(found: Tokenizer, kind: str) -> tuple[Any, str] | None:
    """The prompt, and what the template prints of a reply to it; None if it prints no such reply."""
    reasoning, content, calls = REPLIES[kind]
    syntax = found.reply_syntax
    if (calls and syntax.tools is None) or (reasoning and syntax.reasoning is None):
        return None
    if len(calls) > 1 and syntax.tools is not None and syntax.tools.single:
        return None
    ids = [f"functions.{name}:{n}" for n, (name, _) in enumerate(calls)]
    if syntax.tools is not None and not syntax.tools.numbered:
        ids = [f"abcDEF12{n}" for n in range(len(calls))]
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        said["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id, (name, arguments) in zip(ids, calls, strict=True)
        ]
    if reasoning:
        said["reasoning_content"] = reasoning
    template = found._template(True)
    try:
        prompt = found.apply_chat_template(copy.deepcopy(ASKED), reply=reply_request(TOOLS, "auto"))
        whole = template.render(
            template.as_known([*copy.deepcopy(ASKED), said]), tools=TOOLS, add_generation_prompt=False
        )
        plain = template.render(
            [*ASKED, {"role": "assistant", "content": "qz"}], tools=TOOLS, add_generation_prompt=False
        )
    except ChatTemplateError:
        return None
    common = prompt.text
    if syntax.reasoning is not None and not whole.startswith(common):  # reasoning was opened, and is printed closed
        common = common.rstrip().removesuffix(syntax.reasoning.start)
    if not whole.startswith(common):
        return None  # the history is printed otherwise than the reply was begun
    body = whole[len(common) :]
    tail = (re.findall(r"<[^<>\s]+>", plain.rpartition("qz")[2]) or [plain.rpartition("qz")[2].strip()])[-1]
    body = (body.rpartition(tail)[0] if tail and tail in body else body).rstrip()
    if prompt.reply.in_reasoning and prompt.reply.syntax.reasoning.end not in body:
        return None
    missing = reasoning not in body or content not in body or any(name not in body for name, _ in calls)
    return None if missing else (prompt, body)


def check(found: Tokenizer, kind: str) -> bool:
    """Whether there was such a reply to check."""
    case = printed(found, kind)
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
        reply, (reasoning, content, calls) = Reply.of(parser.events), REPLIES[kind]
        assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == calls
        assert (reply.reasoning or "").strip() == reasoning and reply.content.strip() == content
    return True


@pytest.mark.parametrize("name", EACH_WAY)
def test_a_published_template_s_replies_pass_the_mask_and_are_read_back(name: str) -> None:
    found = tokenizer(name, real=False)
    assert found.reply_syntax.name == EACH_WAY[name] and found.reply_syntax.tools is not None
    called = [kind for kind, (_, _, calls) in REPLIES.items() if calls]
    assert [kind for kind in called if check(found, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_published_templates_replies_pass_the_mask_and_are_read_back(name: str) -> None:
    """Text is left out without the family's own tokenizer, which says what markers around it are."""
    found = tokenizer(name, real=True)
    for kind, (_, _, calls) in REPLIES.items():
        if calls or has_own_tokenizer(name):
            check(found, kind)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_derived_from_a_published_template_fails(name: str) -> None:
    syntax = find_syntax(ChatTemplate(source(name), {"bos_token": "<s>", "eos_token": "</s>"}))
    assert not syntax.lost and "qz" not in repr(syntax)
    assert syntax.tools is None or syntax.tools.trigger
