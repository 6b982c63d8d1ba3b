"""Replies: from tokens to reasoning, content and tool calls, however they are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.outputs import CompletionOutput
from quire.server.blocks import Blocks
from quire.server.chat_reply import deltas
from quire.server.messages import _arguments
from quire.server.messages_protocol import parse_messages
from quire.server.protocol import parse_chat
from quire.text.chat_template import ChatTemplate
from quire.text.partial_json import completed
from quire.text.reply import ContentText, ReasoningText, Reply, ReplyEvent, ToolCallArguments, ToolCallBegin
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import ReasoningSyntax, ReplyForm, ReplySyntax

THINKS = ReplySyntax(reasoning=ReasoningSyntax("<think>", "</think>"))


def read(form: ReplyForm, pieces: Iterable[str]) -> Reply:
    parser = ReplyParser(form)
    for piece in pieces:
        parser.text(piece)
    parser.finish()
    return Reply.of(parser.events)


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("<think>\nTwo and\n\ntwo.\n</think>\n\nFour.\n", False, "Two and\n\ntwo.", "Four.\n"),
        ("Two.\n</think>\n\nFour.", True, "Two.", "Four."),
        ("<think></think>Four.", False, "", "Four."),
        ("\n<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("Four. <think>No.</think>", False, "", "Four. <think>No.</think>"),
        ("<think>It was cut </thi", False, "It was cut </thi", ""),
        ("<thi", False, "", "<thi"),
        (" Four.", False, "", " Four."),
        ("", True, "", ""),
    ],
)
def test_reasoning_stands_apart_from_content(text: str, in_reasoning: bool, reasoning: str, content: str) -> None:
    reply = read(ReplyForm(THINKS, in_reasoning=in_reasoning), [text])
    assert (reply.reasoning, reply.content) == (reasoning, content)


ANSWERS = msgspec.structs.replace(THINKS, answers=(("<response>", "</response>"), ("<answer>", "</answer>")))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>Hm.</think>\n<answer>\nFour.\n</answer>", "Four."),
        ("<think>Hm.</think><response>Four.</response>\n", "Four."),
        ("<think>Hm.</think>\n\nFour. <answer>", "Four. <answer>"),
        ("<think>Hm.</think><answer>It was cut\n", "It was cut\n"),
        ("<think>Hm.</think><ans", "<ans"),
        ("<answer>Four.</answer>", "<answer>Four.</answer>"),
    ],
)
def test_tags_around_the_content_after_reasoning_are_no_part_of_it(text: str, content: str) -> None:
    for pieces in ([text], text):
        assert read(ReplyForm(ANSWERS), pieces).content == content
    after = text.removeprefix("<think>Hm.</think>")
    if after != text:
        assert read(ReplyForm(ANSWERS, reasoned=True), after).content.strip() == content.strip()


def test_tags_around_content_are_found_where_a_template_names_them() -> None:
    source = "{{ 'thoughts between <think></think>, and the response between <response></response>' }}"
    assert ChatTemplate(source).reply_syntax.answers == (("<response>", "</response>"),)
    assert ChatTemplate("{{ '<response></response>' }}").reply_syntax.answers == ()


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/thi", "a", " ", "\n", "nk>"])), st.booleans(), st.data())
def test_a_reply_is_the_same_however_it_is_cut(parts: list[str], in_reasoning: bool, data: st.DataObject) -> None:
    text, form = "".join(parts), ReplyForm(THINKS, in_reasoning=in_reasoning)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text])


def test_without_a_syntax_all_is_content_at_once() -> None:
    parser = ReplyParser(ReplyForm())
    parser.text(" <think> ")
    assert parser.events == [ContentText(" <think> ")]


def test_a_marker_in_the_wrong_place_is_valid_text_wherever_it_stands() -> None:
    parser = ReplyParser(ReplyForm(THINKS), ["<think>", "</think>"])
    parser.special("<think>")
    parser.text("a")
    parser.special("<think>")
    parser.text("b")
    parser.special("</think>")
    parser.special("</think>")
    parser.finish()
    reply = Reply.of(parser.events)
    assert (reply.reasoning.encode(), reply.content.encode()) == (b"a<think>b", b"</think>")


def test_reasoning_comes_while_it_is_made() -> None:
    parser = ReplyParser(ReplyForm(THINKS, in_reasoning=True))
    parser.text("Two and ")
    assert parser.events == [ReasoningText("Two and")]
    parser.text("two")
    assert parser.events[1:] == [ReasoningText(" two")]


def test_a_long_reply_is_put_together_in_time_that_grows_with_its_length_alone() -> None:
    events: list[ReplyEvent] = [ReasoningText("why "), *[ContentText("word ")] * 150_000]
    events += [ToolCallBegin(0, "a", "f"), *[ToolCallArguments(0, "piece ")] * 150_000, ToolCallBegin(1, "b", "g")]
    content, arguments = "word " * 150_000, "piece " * 150_000
    began = time.process_time()
    reply, made = Reply.of(events), deltas(events)
    blocks = Blocks()
    blocks.take(CompletionOutput(0, events=events, finish_reason="stop"))
    assert time.process_time() - began < 3.0
    assert (reply.reasoning, reply.content, reply.tool_calls[0].arguments) == ("why ", content, arguments)
    assert [made[1]["content"], made[2]["tool_calls"][0]["function"]["arguments"]] == [content, arguments]
    assert len(made) == 4 and made[3]["tool_calls"][0]["id"] == "b"
    assert [block.text for block in blocks.blocks] == ["why ", content, arguments, ""]


WHOLE = '{"a": [1, {"b": "x\\n\\u00e9 \\ud83d\\ude00\\\\"}, true], "c": -1.25, "d": {}}'


@pytest.mark.parametrize("cut", range(1, len(WHOLE) + 1))
def test_json_that_was_cut_is_what_there_is_of_it(cut: int) -> None:
    value = completed(WHOLE[:cut])
    json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    for name, found in value.items():
        assert _is_part(found, json.loads(WHOLE)[name])
    assert cut < len(WHOLE) or value == json.loads(WHOLE)


def _is_part(found: Any, whole: Any) -> bool:
    if isinstance(found, str):
        return isinstance(whole, str) and whole.startswith(found)
    if isinstance(found, list):
        return all(map(_is_part, found, whole))
    if isinstance(found, dict):
        return all(_is_part(value, whole[name]) for name, value in found.items())
    return found == whole or str(whole).startswith(str(found))


@pytest.mark.parametrize("text", ["never", "[}", '{"a": 1}}', "", "{'a'"])
def test_what_does_not_begin_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        completed(text)


def test_a_call_that_was_cut_is_accepted_as_history() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ro", "days": 3, "un'}}
    template = ChatTemplate(source)
    messages = template.as_known([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert template.render(messages) == "<city=Ro><days=3>"
    cut = parse_messages(
        msgspec.json.encode(
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": "Rome?"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": _arguments('{"city": "Ro')}],
                    },
                ],
            }
        )
    )
    assert cut.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'


def test_a_tool_may_return_nothing_and_a_body_begin_with_a_byte_order_mark() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": None},
    ]
    chat = parse_chat(b"\xef\xbb\xbf" + msgspec.json.encode({"messages": messages}))
    assert not chat.messages[2]["content"] and chat.messages[2]["role"] == "tool"
    message = {"max_tokens": 1, "messages": messages[:1]}
    assert parse_messages(b"\xef\xbb\xbf" + msgspec.json.encode(message)).messages[0]["content"] == "Go."
