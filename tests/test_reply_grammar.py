"""One grammar for a whole reply: what it lets come is what the parser reads, in every format."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.grammars import Grammars
from quire.models.hub import ASSETS
from quire.server.chat_reply import deltas
from quire.text import reply_formats
from quire.text.chat_template import ChatTemplate, check_messages
from quire.text.detokenizer import Detokenizer
from quire.text.known_formats import KNOWN
from quire.text.reply import Reply
from quire.text.reply_formats import in_format
from quire.text.reply_grammar import ReplyGrammar, ReplyRequest, reply_grammar, reply_request
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import ID, NAME, NUMBER, ReplyForm, ReplySyntax
from quire.text.reply_writing import written_call
from quire.text.tokenizer import Tokenizer, _reply_form
from tests.reply_templates import FORMATS, PLAIN

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "where": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "weather_note", "description": "Keeps it.", "parameters": NOTE}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": WEATHER, "weather_note": NOTE, "now": {"type": "object"}}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(FORMATS[name], SPECIALS)


def marked_tokenizer(markers: Sequence[str] = (), special: bool = True) -> Tokenizer:
    """The demo's, with these as special tokens, or as other added ones."""
    return _tokenizer(tuple(markers), special)


@functools.cache
def _tokenizer(markers: tuple[str, ...], special: bool) -> Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    add = library.add_special_tokens if special else library.add_tokens
    add([AddedToken(marker, special=special, normalized=False) for marker in markers])
    return Tokenizer(library.to_str(), {}, {"default": PLAIN})


@functools.cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer.vocabulary(tokenizer.vocab_size))


def markers_of(syntax: ReplySyntax) -> list[str]:
    return sorted({found for text in syntax.texts() for found in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", text)})


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special tokens"])
def marked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sampled(
    tokenizer: Tokenizer, made: ReplyGrammar, seed: int, most: int = 400, hints: Sequence[str] = ()
) -> tuple[Reply, bool, list[int]]:
    """A random reply, of tokens that the grammar lets come, and whether it ended by itself."""
    grammars = grammars_of(tokenizer)
    assert made.structured is not None
    matcher = grammars.matcher(made.structured, [0])
    parser = ReplyParser(made.form, tokenizer.special_texts)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
    luck, tokens, ended = random.Random(seed), [], False
    liked = {token for hint in hints for token in tokenizer._controls().encode(hint).ids}
    while len(tokens) < most:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, matcher.error
        if 0 in allowed and luck.random() < 0.3:
            ended = True
            break
        wanted = [token for token in allowed if token in liked] if luck.random() < 0.9 else []
        token = luck.choice(wanted or [token for token in allowed if token] or allowed)
        tokens.append(token)
        matcher.append(token)
        detokenizer.push([token])
    detokenizer.finish()
    return Reply.of(parser.events), ended, tokens


HINTS = [
    '"',
    '<|"|>',
    ":",
    ",",
    "}",
    "]",
    "<",
    "</parameter>",
    "</arg_value>",
    "\n",
    "a",
    "1",
    "C",
    "final",
    "<|message|>",
]


def test_gpt_oss_reasons_and_says_in_any_number_of_messages(marked: bool) -> None:
    syntax = template("harmony").reply_syntax
    found = marked_tokenizer(markers_of(syntax) if marked else [])
    parts = [("analysis", "a"), ("analysis", "b"), ("commentary", "c"), ("analysis", "d"), ("final", "e")]
    text = "<|end|><|start|>assistant".join(f"<|channel|>{name}<|message|>{part}" for name, part in parts)
    for wanted in (reply_request(TOOLS), ReplyRequest(structured=StructuredOutputsParams(regex="e"))):
        written = text if wanted.tools else text.replace("commentary", "analysis")
        made = reply_grammar(ReplyForm(syntax), wanted)
        assert made.structured is not None
        matcher = grammars_of(found).matcher(made.structured, [0])
        parser = ReplyParser(made.form, found.special_texts)
        detokenizer = Detokenizer(found, SamplingParams(), parser)
        for token in found._controls().encode(written).ids:
            assert np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]
            matcher.append(token)
            detokenizer.push([token])
        detokenizer.finish()
        reply = Reply.of(parser.events)
        assert (reply.reasoning, reply.content) == (("abd", "ce") if wanted.tools else ("abcd", "e"))


HEADERS = [
    f"{header}json<|message|>"
    for spaced in (" ", " <|constrain|>")
    for header in (
        f"<|channel|>commentary to=functions.now{spaced}",
        f" to=functions.now<|channel|>commentary{spaced}",
    )
]
"""Of a call by gpt-oss."""


@pytest.mark.parametrize("header", HEADERS)
def test_gpt_oss_writes_whom_it_calls_before_the_channel_or_behind_it(header: str, marked: bool) -> None:
    syntax = template("harmony").reply_syntax
    found = marked_tokenizer(markers_of(syntax) if marked else [])
    made = reply_grammar(ReplyForm(syntax), reply_request(TOOLS))
    assert made.structured is not None
    for before in ("", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"):
        matcher = grammars_of(found).matcher(made.structured, [0])
        ids = found._controls().encode(f"{before}{header}{{}}").ids
        for token in ids:
            assert np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[token]
            matcher.append(token)
        for size in (1, len(ids)):
            parser = ReplyParser(made.form, found.special_texts)
            detokenizer = Detokenizer(found, SamplingParams(), parser)
            for at in range(0, len(ids), size):
                detokenizer.push(ids[at : at + size])
            detokenizer.finish()
            reply = Reply.of(parser.events)
            assert (reply.reasoning or "", reply.content) == (("a" if before else ""), "")
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [("now", "{}")]


@pytest.mark.parametrize("header", HEADERS)
def test_a_call_that_gpt_oss_writes_without_tools_is_content_without_its_header(header: str) -> None:
    text = f'<|channel|>analysis<|message|>a<|end|><|start|>assistant{header}{{"b": 1}}'
    for pieces in ([text], text):
        parser = ReplyParser(ReplyForm(KNOWN["harmony"]))
        for piece in pieces:
            parser.text(piece)
        parser.finish()
        assert (Reply.of(parser.events).reasoning, Reply.of(parser.events).content) == ("a", '{"b": 1}')


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.quick(
    "text-auto-qwen3_coder",
    "text-auto-glm45",
    "text-auto-llama3_json",
    "text-auto-mistral",
    "text-auto-derived",
    "text-auto-deepseek_v3",
    "text-auto-deepseek_v31",
    "text-auto-deepseek_v32",
    "text-auto-minimax_m2",
    "text-auto-kimi_k2",
    "text-auto-lfm2",
    "text-auto-gemma4",
    "text-required-llama3_json",
    "text-required-mistral",
    "text-named-llama3_json",
    "text-named-mistral",
    "text-named-derived",
    "text-named-kimi_k2",
    "special tokens-auto-hermes",
    "special tokens-auto-llama3_json",
    "special tokens-auto-derived",
    "special tokens-auto-deepseek_v31",
    "special tokens-auto-harmony",
    "special tokens-required-llama3_json",
    "special tokens-required-mistral",
    "special tokens-required-derived",
    "special tokens-named-llama3_json",
    "special tokens-named-derived",
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_what_the_grammar_lets_come_is_what_the_parser_reads(name: str, choice: Any, marked: bool) -> None:
    syntax = template(name).reply_syntax
    specials = markers_of(syntax) if marked else []
    tokenizer = marked_tokenizer(specials)
    opening = [] if choice != "auto" else [syntax.tools.begin + syntax.tools.before_name] if syntax.tools else []
    for seed in (0, 2) if marked else (1, 2):
        form = ReplyForm(syntax, in_reasoning=seed == 2 and syntax.reasoning is not None)
        made = reply_grammar(form, reply_request(TOOLS, NAMED if choice == "named" else choice))
        reply, ended, _ = sampled(tokenizer, made, seed, hints=[*HINTS, *opening])
        if not ended:
            continue
        if choice != "auto":
            assert reply.tool_calls and not reply.content.strip()
        for call in reply.tool_calls:
            assert call.name in SCHEMAS
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if choice == "named":
            assert [call.name for call in reply.tool_calls] == ["weather"]


CALLS = [
    ("weather", {"city": 'A "b"\\ \n</tool_call>[TOOL_CALLS]é', "days": 3, "unit": "C", "where": [1.5, -2]}),
    ("weather_note", {"text": "} , ] <think>"}),
]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_template_writes_is_read_back(name: str, marked: bool) -> None:
    """Rendered, encoded as output tokens, decoded and parsed, token by token."""
    found = template(name)
    syntax = found.reply_syntax
    assert syntax.name == name and syntax.tools is not None
    specials = markers_of(syntax) if marked else []
    tokenizer = marked_tokenizer(specials)
    calls = CALLS[:1] if syntax.tools.single else CALLS
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    texts = {
        key: {name: () for name, each in schema.get("properties", {}).items() if "C" in each.get("enum", ["C"])}
        if syntax.tools.parameters and key != "weather"
        else dict.fromkeys(("city", "unit"), ())
        for key, schema in parameters.items()
    }
    written = "".join(written_call(syntax.tools, number, *call) for number, call in enumerate(calls)) + syntax.tools.end
    parser = ReplyParser(ReplyForm(syntax, tools=texts, reasoned=syntax.content is None), tokenizer.special_texts)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
    for token in tokenizer._controls().encode(written).ids:
        detokenizer.push([token])
    detokenizer.finish()
    reply = Reply.of(parser.events)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == calls
    assert reply.content == ""


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_found(name: str) -> None:
    """What is found of a template writes the very text that the template prints."""
    found = template(name)
    tools = found.reply_syntax.tools
    assert found.reply_syntax.name == name and tools is not None
    if name == "harmony":
        return  # it is written otherwise than printed
    function = {"name": "f", "arguments": {"a": "x y", "b": [1, {} if name == "lfm2" else {"c": None}]}}
    ids = ["functions.f:0", "functions.f:1"] if tools.numbered else ["000000000", "000000001"]
    calls = [{"id": id, "type": "function", "function": function} for id in ids[: 1 if tools.single else 2]]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    printed = found.render(found.as_known(check_messages(said)), add_generation_prompt=False)
    written = "".join(written_call(tools, number, **function) for number in range(len(calls))) + tools.end
    assert written in printed


_CALLS = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
_JSON = "{{ c.function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("call", "before_name", "before_arguments"),
    [
        ("<call>{{ c.id }}<name>{{ c.function.name }}<args>" + _JSON + "</call>", f"<call>{ID}<name>", "<args>"),
        ("<call>{{ c.function.name }}<id>{{ c.id }}<args>" + _JSON + "</call>", "<call>", f"<id>{ID}<args>"),
        ("<call>{{ loop.index0 }} {{ c.function.name }} " + _JSON + "</call>", f"<call>{NUMBER} ", " "),
        ("<call>{{ c.id }}<args>" + _JSON + "</call>", "<call>functions.", f":{NUMBER}<args>"),
        ("<call>{{ c.function.name }}<f={{ c.function.name }}>" + _JSON + "</call>", "<call>", f"<f={NAME}>"),
    ],
)
def test_ids_numbers_and_names_stand_as_such_in_what_is_found(
    call: str, before_name: str, before_arguments: str
) -> None:
    found = ChatTemplate(_CALLS.replace("CALL", call), SPECIALS)
    tools = found.reply_syntax.tools
    assert tools is not None and (tools.before_name, tools.before_arguments) == (before_name, before_arguments)
    written = "".join(written_call(tools, number, *one) for number, one in enumerate(CALLS))
    made = reply_grammar(ReplyForm(found.reply_syntax), reply_request(TOOLS, "required"))
    parser = ReplyParser(made.form)
    for letter in written:
        parser.text(letter)
    parser.finish()
    reply = Reply.of(parser.events)
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == CALLS
    assert len({call.id for call in reply.tool_calls}) == 2


@pytest.mark.parametrize(
    "call",
    [
        "{{ c.function.name }}\n" + _JSON,
        "<|end|>{{ c.function.name }}\n" + _JSON,
    ],  # nothing, or what ends a text, begins it
)
def test_a_call_that_does_not_begin_unlike_text_is_not_found(call: str) -> None:
    assert ChatTemplate(_CALLS.replace("CALL", call), SPECIALS).reply_syntax.tools is None


def test_what_fails_while_a_template_is_looked_at_costs_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_formats, "_find_tools", lambda *_: 1 // 0)
    syntax = template("hermes").reply_syntax
    assert syntax.tools is None and syntax.reasoning is not None
    assert "tool calls are off" in syntax.described and "ZeroDivisionError" in syntax.described


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|channel>thought", "<channel|>"),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_found_by_markers_that_a_template_only_drops(start: str, end: str, opened: bool) -> None:
    """Of earlier turns; a prompt may end within it."""
    dropped = f"{{%- set text = m.content.split('{end}')[-1] %}}{{{{- m.role + text }}}}"
    opening = f"{{%- if add_generation_prompt %}}{{{{- 'model\\n{start if opened else ''}\\n' }}}}{{% endif %}}"
    found = ChatTemplate(f"{{%- for m in messages %}}{dropped}{{% endfor %}}{opening}", SPECIALS)
    form = _reply_form(found, found.render([{"role": "user", "content": "?"}], add_generation_prompt=True))
    assert form.in_reasoning == opened and form.syntax.reasoning is not None
    tokenizer = marked_tokenizer(markers_of(form.syntax))
    parser = ReplyParser(form, tokenizer.special_texts)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
    for token in tokenizer._controls().encode(f"{'' if opened else start}\nWhy?\n{end}\nSo.").ids:
        detokenizer.push([token])
    detokenizer.finish()
    reply = Reply.of(parser.events)
    assert (reply.reasoning, reply.content) == ("Why?", "So.")


def test_a_template_that_knows_no_tools_shows_no_way_to_call_them() -> None:
    form = ReplyForm(ChatTemplate(PLAIN).reply_syntax)
    assert form.syntax.tools is None
    with pytest.raises(SamplingParamsError, match="no way to call tools"):
        reply_grammar(form, ReplyRequest(tools=TOOLS))
    assert reply_grammar(form, ReplyRequest(tools=TOOLS, tool_choice="none")).structured is None


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "glm45", "deepseek_v3", "mistral", "lfm2", "gemma4", "deepseek_v32"]
)
def test_every_way_to_cut_a_reply_gives_the_same(name: str) -> None:
    syntax = KNOWN[name]
    assert syntax.tools is not None
    texts = {"weather": dict.fromkeys(("city", "unit"), ()), "weather_note": {"text": ()}}
    form = ReplyForm(syntax, tools=texts, reasoned=True)
    calls = "".join(written_call(syntax.tools, number, *call) for number, call in enumerate(CALLS)) + syntax.tools.end
    text = f"Let me look. {syntax.tools.trigger[:-1]} \n\n{calls}\n"

    def read(pieces: list[str]) -> Reply:
        parser = ReplyParser(form)
        for piece in pieces:
            parser.text(piece)
        parser.finish()
        return Reply.of(parser.events)

    whole = read([text])
    assert len(whole.tool_calls) == 2 and whole.content.startswith("Let me look.")
    assert all(read([text[:cut], text[cut:]]) == whole for cut in range(len(text)))
    assert read([*text]) == whole


@functools.cache
def _by_start(tokenizer: Tokenizer) -> tuple[Any, dict[int, list[int]]]:
    """The vocabulary, and which tokens begin with each byte."""
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size)
    by_start: dict[int, list[int]] = {}
    for id in vocabulary.texts:
        by_start.setdefault(vocabulary.tokens[id][0], []).append(id)
    return vocabulary, by_start


def _tokens(tokenizer: Tokenizer, text: str, luck: random.Random) -> list[int]:
    """Some tokens that spell it, often parts of characters; special tokens stay whole."""
    vocabulary, by_start = _by_start(tokenizer)
    named = sorted(filter(None, vocabulary.specials), key=len, reverse=True)
    ids, rest = [], text.encode()
    while rest:
        special = next((name for name in named if rest.startswith(name.encode())), None)
        if special is not None:
            ids.append(vocabulary.specials[special])
        else:
            most = luck.choice((1, 2, 9))
            fits = [id for id in by_start[rest[0]] if rest.startswith(vocabulary.tokens[id])]
            ids.append(luck.choice([id for id in fits if len(vocabulary.tokens[id]) <= most]))
        rest = rest[len(vocabulary.tokens[ids[-1]]) :]
    return ids


@pytest.mark.quick(
    "text-gemma4",
    "special tokens-hermes",
    "special tokens-qwen3_coder",
    "special tokens-glm45",
    "special tokens-deepseek_v3",
    "special tokens-mistral",
    "special tokens-kimi_k2",
    "special tokens-deepseek_v32",
)
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "glm45", "deepseek_v3", "mistral", "kimi_k2", "gemma4", "deepseek_v32"]
)
def test_every_way_to_cut_a_reply_into_tokens_and_chunks_gives_the_same(name: str, marked: bool) -> None:
    """As clients see it: what the deltas of a stream add up to."""
    syntax = KNOWN[name]
    assert syntax.tools is not None and syntax.reasoning is not None
    tokenizer = marked_tokenizer(markers_of(syntax) if marked else [])
    texts = {"weather": dict.fromkeys(("city", "unit"), ()), "weather_note": {"text": ()}}
    form = ReplyForm(syntax, tools=texts, in_reasoning=True)
    calls = [
        ("weather", {"city": 'A "b"\\ \né→', "days": 3, "unit": "C", "where": [1.5, -2]}),
        ("weather_note", {"text": "} , ] 🙂"}),
    ]
    written = "".join(written_call(syntax.tools, number, *call) for number, call in enumerate(calls)) + syntax.tools.end
    text = f"Hm… 🙂 é\n{syntax.reasoning.end}\n\nLet me look: ±.\n\n{written}"

    def joined(luck: random.Random) -> tuple[Any, ...]:
        parser = ReplyParser(form, tokenizer.special_texts)
        detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
        ids, told, sent = _tokens(tokenizer, text, luck), [], 0
        while ids:
            size = luck.choice((1, 1, 2, 5, 50))
            detokenizer.push(ids[:size])
            ids = ids[size:]
            if not ids:
                detokenizer.finish()
            told += deltas(parser.events[sent:])
            sent = len(parser.events)
        content, reasoning = ("".join(one.get(key, "") for one in told) for key in ("content", "reasoning"))
        arguments, names = ["", ""], []
        for one in told:
            for call in one.get("tool_calls", ()):
                names += [call["function"]["name"]] if "name" in call["function"] else []
                arguments[call["index"]] += call["function"]["arguments"]
        return content, reasoning, names, arguments

    whole = joined(random.Random(0))
    assert whole[:3] == ("Let me look: ±.", "Hm… 🙂 é", ["weather", "weather_note"])
    assert [json.loads(one) for one in whole[3]] == [arguments for _, arguments in calls]
    assert all(joined(random.Random(seed)) == whole for seed in range(1, 30))


def test_a_tool_that_is_not_there_is_never_called() -> None:
    """A model that insists: its marker may come, and then one of the tools."""
    syntax = template("hermes").reply_syntax
    made = reply_grammar(ReplyForm(syntax, reasoned=True), ReplyRequest(tools=TOOLS))
    tokenizer = marked_tokenizer()
    grammars = grammars_of(tokenizer)
    assert made.structured is not None

    def taken(text: str) -> bool:
        matcher = grammars.matcher(made.structured, [0])  # type: ignore[arg-type]
        ids = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
        return int(matcher._matcher.validate_tokens(ids)) == len(ids)

    head = 'Well. <tool_call>\n{"name": "'
    assert taken(head + 'weather", "arguments": {"city": "</tool_call>"')
    assert taken(head + 'weather_note", "arguments": {')
    assert not taken(head + "other")
    assert not taken(head + 'weather", "arguments": {"town"')
    assert taken("Well. <tool_call") and not taken("Well. <tool_call> ")


def test_reasoning_comes_before_a_form_and_calls_and_is_free() -> None:
    syntax = template("hermes").reply_syntax
    tokenizer = marked_tokenizer()
    grammars = grammars_of(tokenizer)
    wanted = StructuredOutputsParams(choice=["yes", "no"])

    def taken(form: ReplyForm, request: ReplyRequest, text: str) -> bool:
        structured = reply_grammar(form, request).structured
        assert structured is not None
        matcher = grammars.matcher(structured, [0])
        ids = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
        return int(matcher._matcher.validate_tokens([*ids, matcher.vocab_size])) == len(ids) + 1

    answers, calls = ReplyRequest(structured=wanted), ReplyRequest(tools=TOOLS, tool_choice="required")
    start, within, after = ReplyForm(syntax), ReplyForm(syntax, in_reasoning=True), ReplyForm(syntax, reasoned=True)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert taken(start, answers, "yes") and taken(start, answers, "<think>\nno <tool_call>\n</think>\n\nyes")
    assert taken(within, answers, "no?</think>no") and not taken(within, answers, "no")
    assert taken(after, answers, "no") and not taken(after, answers, "<think></think>no")
    assert taken(start, calls, f"<think> {call[:8]}</think>{call}") and taken(start, calls, f"{call}\n{call}")
    assert taken(start, calls, f"<think>{call}") and not taken(start, calls, f"<think>{call[:20]}</think>{call}")
    one = ReplyRequest(tools=TOOLS, tool_choice="required", parallel=False)
    assert taken(start, one, call) and not taken(start, one, f"{call}\n{call}")
    both = ReplyRequest(tools=TOOLS, structured=wanted)
    assert taken(after, both, call) and taken(after, both, "yes") and not taken(after, both, "maybe")


def test_what_cannot_be_enforced_of_a_tool_is_refused_where_it_is_strict_and_told_otherwise() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = ReplyForm(template("hermes").reply_syntax)

    def made(strict: bool) -> ReplyGrammar:
        function = {"name": "f", "parameters": odd, "strict": strict}
        return reply_grammar(form, ReplyRequest(tools=[{"type": "function", "function": function}]))

    assert "uniqueItems" in made(False).loosened["f"]
    with pytest.raises(SamplingParamsError, match="uniqueItems"):
        made(True)


def test_a_form_of_a_chat_that_cannot_be_enforced_is_refused_by_its_field() -> None:
    wanted = ReplyRequest(structured=StructuredOutputsParams(json={"type": "array", "uniqueItems": True}))
    with pytest.raises(SamplingParamsError, match="uniqueItems") as refused:
        reply_grammar(ReplyForm(ReplySyntax()), wanted)
    assert refused.value.param == "structured_outputs"


def test_known_formats_are_those_of_the_option() -> None:
    assert {*get_args(get_type_hints(EngineConfig)["tool_format"])} == {"auto", "off", *KNOWN}
    plain = ChatTemplate(PLAIN)
    assert in_format(plain.reply_syntax, "hermes").tools == KNOWN["hermes"].tools
    assert in_format(template("hermes").reply_syntax, "off").tools is None


# -- arguments that are written as Python's ---


FLAGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "dry": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "more": {"type": ["array", "null"], "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["unit"],
}


def python_calls(parameters: dict[str, Any], strict: bool = True) -> ReplyGrammar:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return reply_grammar(ReplyForm(template("lfm2").reply_syntax), ReplyRequest(tools=tools, tool_choice="required"))


@pytest.mark.parametrize(
    ("arguments", "may_come"),
    [
        ('unit="C"', True),
        ('dry=True, unit="C"', True),
        ('dry=False, unit="F", days=3, more=[true]', True),
        ('unit="F", more=null', True),
        ("", False),
        ("dry=True", False),
        ('dry=true, unit="C"', False),
        ('unit="C", dry=True', False),
        ('unit="C",days=3', False),
        ('unit="C", ', False),
        ('unit="K"', False),
        ('"C"', False),
    ],
)
def test_arguments_come_in_the_schemas_order_with_commas_between_and_those_required(
    arguments: str, may_come: bool
) -> None:
    tokenizer = marked_tokenizer()
    made = python_calls(FLAGS)
    assert made.structured is not None
    matcher = grammars_of(tokenizer).matcher(made.structured, [0])
    text = f"<|tool_call_start|>[f({arguments})]<|tool_call_end|>"
    ids = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
    assert (matcher._matcher.validate_tokens(ids) == len(ids)) == may_come


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a='it\\'s \"so\"', b=[True, None, {'k': 'True'}]", {"a": 'it\'s "so"', "b": [True, None, {"k": "True"}]}),
        ('a="), b=1", b=-1.5e3', {"a": "), b=1", "b": -1500.0}),
        (" a = 'x\n\\x41\\d' , b = true ", {"a": "x\nA\\d", "b": True}),
        ('a="\\ud83d\\ude42\\n\\\\", b={}', {"a": "🙂\n\\", "b": {}}),
        ("", {}),
    ],
)
def test_what_python_would_take_is_read_as_json(written: str, meant: dict[str, Any]) -> None:
    form = ReplyForm(KNOWN["lfm2"], tools={"f": {}}, reasoned=True)
    text = f"So: <|tool_call_start|>[f({written}), f()]<|tool_call_end|>"
    for cuts in ([text], [*text], [text[:30], text[30:]]):
        parser = ReplyParser(form)
        for piece in cuts:
            parser.text(piece)
        parser.finish()
        reply = Reply.of(parser.events)
        assert reply.content == "So:"
        assert [json.loads(call.arguments) for call in reply.tool_calls] == [meant, {}]


def test_a_name_that_python_would_not_take_is_refused_where_it_is_strict() -> None:
    odd = {"type": "object", "properties": {"a-b": {"type": "string"}}}
    assert "'a-b' cannot be written" in python_calls(odd, strict=False).loosened["f"]
    with pytest.raises(SamplingParamsError, match="'a-b' cannot be written"):
        python_calls(odd)


# -- parameters that say whether they are texts ---


@pytest.mark.parametrize(
    ("told", "value", "allowed"),
    [("true", "3", True), ("false", "3", False), ("false", '"3"', False), ("maybe", "3", False)],
)
def test_a_text_says_that_it_is_one_and_no_other_value_does(told: str, value: str, allowed: bool) -> None:
    form = ReplyForm(template("deepseek_v32").reply_syntax, reasoned=True)
    made = reply_grammar(form, reply_request(TOOLS, NAMED))
    days = {"true": "false", "false": "true"}.get(told, told)
    text = f'''<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="{told}">{value}</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="{days}">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>'''
    assert may_come(marked_tokenizer(), made, text) == allowed
    assert not may_come(marked_tokenizer(), made, text.replace(f'days" string="{days}', f'days" string="{told}'))


# -- texts between quotes of their own ---


MORE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F", 3, None, {"b": "x", "a": [1]}]},
        "dry": {"type": "boolean"},
        "Days": {"type": ["integer", "null"], "minimum": 0, "maximum": 99, "maxLength": 2},
        "code": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"$ref": "#/$defs/point"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "map": {"type": "object", "additionalProperties": {"type": "number"}},
        "any": {"description": "Whatever."},
    },
    "required": ["unit"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def quoted_calls(parameters: dict[str, Any], strict: bool = True, name: str = "f") -> ReplyGrammar:
    function = {"name": name, "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return reply_grammar(ReplyForm(template("gemma4").reply_syntax), ReplyRequest(tools=tools, tool_choice="required"))


QUOTED = [
    ('unit:<|"|>C<|"|>', {"unit": "C"}),
    ("unit:3", {"unit": 3}),
    ('unit:{a:[1],b:<|"|>x<|"|>}', {"unit": {"b": "x", "a": [1]}}),
    ("Days:3,dry:true,unit:null", {"Days": 3, "dry": True, "unit": None}),
    ('code:<|"|>abc<|"|>,unit:3', {"code": "abc", "unit": 3}),
    ("code:{x:-1.5e2},unit:3", {"code": {"x": -150.0}, "unit": 3}),
    ("code:{x:1,y:2},unit:3", {"code": {"x": 1, "y": 2}, "unit": 3}),
    ('tags:[<|"|>}]"<|"|>,<|"|>\\\n<<|"|>],unit:3', {"tags": ['}]"', "\\\n<"], "unit": 3}),
    ("map:{a-b:1,c:2},unit:3", {"map": {"a-b": 1, "c": 2}, "unit": 3}),
    ("map:{},unit:3", {"map": {}, "unit": 3}),
    (
        'any:[{k:<|"|>a:1,{b<|"|>,true:[]},null,[false,-2]],unit:3',
        {"any": [{"k": "a:1,{b", "true": []}, None, [False, -2]], "unit": 3},
    ),
    ('any:<|"|><tool_call|>é"\\ <|"<|"|>,unit:3', {"any": '<tool_call|>é"\\ <|"', "unit": 3}),
]


@pytest.mark.parametrize(("arguments", "meant"), QUOTED)
def test_what_may_stand_between_quotes_and_braces_is_read_as_json(
    arguments: str, meant: dict[str, Any], marked: bool
) -> None:
    tokenizer = marked_tokenizer(markers_of(KNOWN["gemma4"]) if marked else [])
    made, text = quoted_calls(MORE), f"<|tool_call>call:f{{{arguments}}}<tool_call|>"
    jsonschema.validate(meant, MORE)
    assert not made.loosened and may_come(tokenizer, made, text)
    ids = quoted_ids(tokenizer, text * 2)
    assert may_come(tokenizer, made, text * 2)
    for size in (1, 7, len(ids)):
        parser = ReplyParser(made.form, tokenizer.special_texts)
        detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
        for at in range(0, len(ids), size):
            detokenizer.push(ids[at : at + size])
        detokenizer.finish()
        reply = Reply.of(parser.events)
        assert reply.content == "" and [json.loads(call.arguments) for call in reply.tool_calls] == [meant, meant]


def quoted_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Within quotes all is spelled, markers too."""
    ids: list[int] = []
    for index, part in enumerate(text.split('<|"|>')):
        ids += tokenizer._controls().encode('<|"|>').ids if index else []
        pieces = [*part] if index % 2 else [part]
        ids += [id for piece in pieces for id in tokenizer._controls().encode(piece).ids]
    return ids


def may_come(tokenizer: Tokenizer, made: ReplyGrammar, text: str) -> bool:
    assert made.structured is not None
    matcher = grammars_of(tokenizer).matcher(made.structured, [0])
    ids = [*quoted_ids(tokenizer, text), matcher.vocab_size]
    return int(matcher._matcher.validate_tokens(ids)) == len(ids)


@pytest.mark.quick(
    "text-unit:K",
    'text-unit:<|"|>C<|"|>,',
    'text-,unit:<|"|>C<|"|>',
    'text-unit: <|"|>C<|"|>',
    'text-unit:<|"|>C<|"|>, dry:true',
    "text-unit:3,dry:true",
    'text-tags:[<|"|>abcd<|"|>],unit:3',
    "special tokens-",
    'special tokens-unit:"C"',
    'special tokens-unit:<|"|>C',
    "special tokens-dry:True,unit:3",
    "special tokens-Days:100,unit:3",
    "special tokens-Days:,unit:3",
    'special tokens-code:<|"|>A<|"|>,unit:3',
    "special tokens-code:{y:1},unit:3",
    "special tokens-code:{y:1,x:2},unit:3",
    "special tokens-tags:[],unit:3",
    'special tokens-tags:[<|"|>a<|"|>,],unit:3',
    "special tokens-any:{:1},unit:3",
    "special tokens-any:a,unit:3",
    "special tokens-other:1,unit:3",
)
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "unit:K",
        'unit:"C"',
        'unit:<|"|>C',
        'unit:<|"|>C<|"|>,',
        ',unit:<|"|>C<|"|>',
        'unit: <|"|>C<|"|>',
        'unit:<|"|>C<|"|>, dry:true',
        "unit:3,dry:true",
        "dry:True,unit:3",
        "Days:100,unit:3",
        "Days:,unit:3",
        'code:<|"|>A<|"|>,unit:3',
        "code:{y:1},unit:3",
        "code:{y:1,x:2},unit:3",
        "tags:[],unit:3",
        'tags:[<|"|>abcd<|"|>],unit:3',
        'tags:[<|"|>a<|"|>,],unit:3',
        "any:{:1},unit:3",
        "any:a,unit:3",
        "other:1,unit:3",
    ],
)
def test_what_a_schema_does_not_allow_never_comes_between_braces(arguments: str, marked: bool) -> None:
    tokenizer = marked_tokenizer(markers_of(KNOWN["gemma4"]) if marked else [])
    assert not may_come(tokenizer, quoted_calls(MORE), f"<|tool_call>call:f{{{arguments}}}<tool_call|>")
    assert not may_come(tokenizer, quoted_calls(MORE), "<|tool_call>call:g{unit:3}<tool_call|>")


@pytest.mark.quick("special tokens")
def test_random_values_between_quotes_meet_their_schema(marked: bool) -> None:
    tokenizer, ends = marked_tokenizer(markers_of(KNOWN["gemma4"]) if marked else []), 0
    for seed in range(12):
        made = quoted_calls(MORE, name="now")
        reply, ended, _ = sampled(tokenizer, made, seed, hints=HINTS)
        for call in reply.tool_calls if ended else ():
            jsonschema.validate(json.loads(call.arguments), MORE)
        ends += ended
    assert ends


@pytest.mark.parametrize("cut", range(1, 60, 3))
def test_a_call_that_was_cut_gives_what_there_is_of_it_and_no_half_marker(cut: int) -> None:
    text = '<|tool_call>call:f{any:[<|"|>x<|"|>],code:<|"|>abc<|"|>,unit:3}<tool_call|>'[:cut]
    parser = ReplyParser(quoted_calls(MORE).form)
    parser.text(text)
    parser.finish()
    whole = json.dumps({"any": ["x"], "code": "abc", "unit": 3})
    reply = Reply.of(parser.events)
    assert reply.content in ("", text if cut < len("<|tool_call>") else "")
    assert all(whole.startswith(call.arguments) for call in reply.tool_calls)


TREE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"a": {"$ref": "#/$defs/t"}}, "levels"),
        ({"a": {"minProperties": 1, "type": "object"}}, "minProperties"),
        ({"a": {"type": "array", "prefixItems": [{}]}}, "prefixItems"),
        ({"a": {"type": "array", "minItems": 20_000}}, "parts"),
        ({"a": {"type": "array", "items": [{}]}}, "a list in 'items'"),
        ({"a": {"$ref": "#/$defs/c0"}}, "without recursion"),
        ({"a": {"allOf": [{"type": "string"}]}}, "allOf"),
        ({"a": {"type": "string", "format": "email"}}, "format"),
        ({"a": {"minLength": 2}}, "without a type"),
        ({"a": {"enum": ['<|"|>']}}, "enum"),
        ({"a": {"const": {"a b": [{"c:": 1}]}}}, "const"),
        ({"a b": {}}, "'a b' cannot be written"),
        ({"a": {"type": "object", "properties": {"b,": {}}}}, "'b,' cannot be written"),
        ({f"a{i}": {"type": "array", "items": {}} for i in range(40)}, "parts"),
        ({"a": {"$ref": "#/$defs/d0"}}, "parts"),
    ],
)
def test_what_cannot_be_enforced_between_quotes_is_refused_or_becomes_any_object(
    properties: dict[str, Any], why: str
) -> None:
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}}
    chain: dict[str, Any] = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(990)} | {"c990": {}}
    more = chain if "c0" in str(properties) else doubling
    schema = {"type": "object", "properties": properties, "$defs": {"t": TREE, **more}}
    with pytest.raises(SamplingParamsError, match=why):
        quoted_calls(schema)
    made = quoted_calls(schema, strict=False)
    assert why in made.loosened["f"]
    value = '{a:[{b:<|"|>c<|"|>},1]}' if "a b" not in properties else "{}"
    assert may_come(marked_tokenizer(), made, f"<|tool_call>call:f{value}<tool_call|>")
    assert may_come(marked_tokenizer(), made, "<|tool_call>call:f{}<tool_call|>")


@pytest.mark.quick("required0-gemma4", "required1-lfm2")
@pytest.mark.parametrize("name", ["gemma4", "lfm2"])
@pytest.mark.parametrize("required", [["p7"], []])
def test_a_tool_may_have_many_parameters_and_values_be_deep(name: str, required: list[str]) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(4):
        deep = {"type": "object", "properties": {"o": {"type": "array", "items": deep}}, "required": ["o"]}
    properties = {f"p{i}": {"type": "integer"} for i in range(10, 40)} | {"p7": {"type": "integer"}, "q": deep}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties, "required": required}}
    tools = [{"type": "function", "function": {**function, "strict": True}}]
    form = ReplyForm(template(name).reply_syntax, reasoned=True)
    made = reply_grammar(form, ReplyRequest(tools=tools, tool_choice="required"))
    numbers = [f"p{i}" for i in range(10, 40, 7)] + ["p7"]
    if name == "gemma4":
        text = "<|tool_call>call:f{" + ",".join(f"{one}:1" for one in numbers) + "}<tool_call|>"
    else:
        text = "<|tool_call_start|>[f(" + ", ".join(f"{one}=1" for one in numbers) + ")]<|tool_call_end|>"
    assert may_come(marked_tokenizer(), made, text)
    assert not may_come(marked_tokenizer(), made, text.replace("p7", "p8"))


# -- parameters that are written as texts --------------------------------------------------------------------------


def text_tool(**text: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"p": {"type": "string", **text}}, "required": ["p"]}
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


TEXTS = [
    {"pattern": r"^a\$"}, {"pattern": r"a\\$"}, {"pattern": r"^\d{2}$"}, {"pattern": r"^[\d_]\W$"}, {"pattern": "x"},
    {"pattern": "^a$|^b$"}, {"minLength": 2, "maxLength": 9.0}, {"minLength": 8}, {"enum": ["a", "b<"]},
]  # fmt: skip


VALUES = [
    "",
    "a",
    "b",
    "a$",
    "xa$",
    "a\\",
    "12",
    "1",
    "1\u0664",
    "\u0663\u0664",
    "_-",
    "_a",
    "xyz",
    "b<",
    "12345678",
    "123456789ab",
]


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_a_text_may_come_where_it_meets_its_schema(text: dict[str, Any]) -> None:
    """Nor may it hold the marker that ends it."""
    syntax, tool, tokenizer = template("qwen3_coder").reply_syntax, text_tool(**text), marked_tokenizer()
    tools, grammars = syntax.tools, grammars_of(tokenizer)
    assert tools is not None and tools.parameters is not None
    made = reply_grammar(ReplyForm(syntax), ReplyRequest(tools=[tool], tool_choice="required", parallel=False))
    assert made.structured is not None
    before = tools.begin + tools.before_name + "f" + tools.before_arguments
    before += tools.parameters.before_name + "p" + tools.parameters.before_value
    after = tools.parameters.after_value + tools.after_arguments + tools.end

    def may_come(value: str) -> bool:
        tokens = tokenizer._controls().encode(before + value + after).ids
        matcher = grammars.matcher(made.structured, [0])._matcher  # type: ignore[arg-type]
        return matcher.validate_tokens(tokens) == len(tokens)

    schema = tool["function"]["parameters"]["properties"]["p"]
    checker = jsonschema.Draft202012Validator(schema | {"pattern": ascii_only(text)} if "pattern" in text else schema)
    expected = {value: checker.is_valid(value) for value in VALUES}
    assert {value: may_come(value) for value in VALUES} == expected and len(set(expected.values())) == 2
    assert not any(may_come(value + tools.parameters.after_value + "x") for value in VALUES)


def ascii_only(text: dict[str, Any]) -> str:
    """Digits and letters are those of ASCII in JSON Schema, and not in Python."""
    return "(?a)" + str(text["pattern"])


@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
@pytest.mark.parametrize(
    "text",
    [
        *({"pattern": 5}, {"minLength": "x"}, {"maxLength": -1}, {"maxLength": 2.5}, {"enum": 5}, {"enum": []}),
        *({"format": {"a": 1}}, {"type": {}}, {"type": [{}]}, {"type": []}),
    ],
    ids=str,
)
def test_what_no_schema_can_say_is_refused_and_loosened_where_a_tool_is_not_strict(name: str, text: Any) -> None:
    form, tool = ReplyForm(template(name).reply_syntax), text_tool(**text)
    with pytest.raises(
        SamplingParamsError, match=f"tool 'f': the JSON Schema at #/properties/p/{next(iter(text))} is "
    ):
        reply_grammar(form, ReplyRequest(tools=[tool], tool_choice="required"))
    for parameters in (tool["function"]["parameters"], {"properties": 5}, {"required": 5}, {"required": [5]}):
        loose = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert list(reply_grammar(form, ReplyRequest(tools=[loose], tool_choice="required")).loosened) == ["f"]


@pytest.mark.parametrize("text", [{"enum": [1, None]}, {"const": 5}, {"enum": ["a"], "const": "a"}], ids=str)
def test_a_text_that_nothing_meets_or_that_is_said_twice_is_refused_or_loosened(text: dict[str, Any]) -> None:
    form, tool = ReplyForm(template("qwen3_coder").reply_syntax), text_tool(**text)
    with pytest.raises(SamplingParamsError, match="'const'"):
        reply_grammar(form, ReplyRequest(tools=[tool], tool_choice="required"))
    del tool["function"]["strict"]
    assert list(reply_grammar(form, ReplyRequest(tools=[tool], tool_choice="required")).loosened) == ["f"]


# -- parameters that are written one by one ----------------------------------------------------------------------------

BARE_TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "date": {"type": "string", "format": "email"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "street": {"$ref": "#/$defs/Street"},
        "url": {"description": "Where.", "allOf": [{"$ref": "#/$defs/Url"}]},
        "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
        "code": {"type": ["string", "integer", "null"], "pattern": "^[A-Z]+$"},
        "tags": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "unique": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        "any": {},
        "days": {"type": "integer"},
        "uuid": {"type": "string", "format": "uuid"},
    },
    "required": ["date"],
    "$defs": {"Street": {"type": "string", "title": "Street"}, "Url": {"type": "string"}},
}
BARE_VALUES: dict[str, list[tuple[str, Any]]] = {
    "date": [("2024-01-01", "2024-01-01"), ("null", "null"), ("5", "5")],
    "note": [
        ("Main St", "Main St"),
        ("null", None),
        ("nullable", "nullable"),
        (" null", " null"),
        ("5", "5"),
        ("", ""),
    ],
    "street": [("null", "null"), ("[1]", "[1]")],
    "url": [("http://a.b/c", "http://a.b/c")],
    "unit": [("C", "C"), ("null", None)],
    "code": [("AB", "AB"), ("12", 12), ("null", None)],
    "tags": [("a, b", "a, b"), ('["a", "b"]', ["a", "b"]), ("null", "null")],
    "unique": [("[1, 1]", [1, 1])],
    "any": [
        ("2024-01-01", "2024-01-01"),
        ("2024", 2024),
        ('{"a": [1]}', {"a": [1]}),
        ("[draft] a", "[draft] a"),
        ("true", True),
    ],
    "days": [("3", 3)],
    "uuid": [("6f9619ff-8b86-d011-b42d-00c04fc964ff", "6f9619ff-8b86-d011-b42d-00c04fc964ff")],
}
BARE_CALLS = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n",
        "<parameter={}>\n{}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "glm45": ("<tool_call>f\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
}


def bare_call(name: str, **values: str) -> str:
    begin, one, end = BARE_CALLS[name]
    return begin + "".join(one.format(key, value) for key, value in ({"date": "d"} | values).items()) + end


@functools.cache
def bare_calls(name: str) -> ReplyGrammar:
    function = {"name": "f", "parameters": BARE_TOOL}
    return reply_grammar(
        ReplyForm(KNOWN[name]), reply_request([{"type": "function", "function": function}], "required")
    )


@pytest.mark.parametrize("name", BARE_CALLS)
def test_bare_text_may_come_where_the_schema_admits_text(name: str) -> None:
    made = bare_calls(name)
    for key, values in BARE_VALUES.items():
        for written, meant in values:
            call = bare_call(name, **{key: written})
            assert may_come(marked_tokenizer(), made, call), call
            for size in (1, 3, len(call)):
                reply = read_in_pieces(made, call, size)
                assert json.loads(reply.tool_calls[0].arguments)[key] == meant, (call, size)


def read_in_pieces(made: ReplyGrammar, text: str, size: int) -> Reply:
    parser = ReplyParser(made.form)
    for at in range(0, len(text), size):
        parser.text(text[at : at + size])
    parser.finish()
    return Reply.of(parser.events)


@pytest.mark.parametrize(
    ("key", "value"), [("unit", "K"), ("code", "a"), ("days", "three"), ("tags", "[1]"), ("uuid", "6f")]
)
def test_what_a_schema_says_of_bare_text_holds(key: str, value: str) -> None:
    call = bare_call("qwen3_coder", **{key: value})
    assert not may_come(marked_tokenizer(), bare_calls("qwen3_coder"), call)


def test_what_cannot_be_enforced_affects_its_own_parameter_only() -> None:
    told = bare_calls("qwen3_coder").loosened["f"]
    assert "'date'" in told and "uniqueItems" in told and "note" not in told and "days" not in told
    made = reply_grammar(
        ReplyForm(KNOWN["hermes"]),
        reply_request([{"type": "function", "function": {"name": "f", "parameters": BARE_TOOL}}]),
    )
    assert "uniqueItems" in made.loosened["f"]
    call = '<tool_call>\n{"name": "f", "arguments": {"date": "a@b.cd", "days": %s}}\n</tool_call>'
    assert may_come(marked_tokenizer(), made, call % 3) and not may_come(marked_tokenizer(), made, call % '"3"')


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "lfm2"])
def test_no_argument_is_invented(name: str) -> None:
    """A schema that does not speak of further properties has none in a call."""
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "free": {"type": "object"}}}
    made = reply_grammar(
        ReplyForm(KNOWN[name]),
        reply_request([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required"),
    )
    assert not made.loosened
    if name == "hermes":
        call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
        assert may_come(marked_tokenizer(), made, call % '{"a": {"b": 1}, "free": {"c": 1}}')
        assert not may_come(marked_tokenizer(), made, call % '{"a": {"b": 1, "c": 1}}')
        assert not may_come(marked_tokenizer(), made, call % '{"c": 1}')


HARMLESS: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    {"type": "object", "propertyNames": {"type": "string"}},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ],
        "discriminator": {"propertyName": "k"},
    },
    {"type": "string", "nullable": True},
    *({"type": "integer", "format": name} for name in ("int32", "int64", "uint")),
    {"type": "number", "format": "double"},
    *({"type": "string", "format": name} for name in ("path", "binary", "password")),
]
ZOD_EMAIL = {
    "type": "string",
    "format": "email",
    "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
    "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
}


@pytest.mark.parametrize("value", HARMLESS, ids=str)
def test_keywords_without_effect_are_accepted(value: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"p": value}}
    function = {"name": "f", "parameters": schema, "strict": True}
    made = reply_grammar(ReplyForm(KNOWN["hermes"]), reply_request([{"type": "function", "function": function}]))
    assert not made.loosened and made.structured is not None
    grammars_of(marked_tokenizer()).compile(made.structured)
    grammars_of(marked_tokenizer()).compile(StructuredOutputsParams(json=schema))


def test_a_pattern_that_looks_ahead_is_left_out_of_its_own_property() -> None:
    schema = {"type": "object", "properties": {"mail": ZOD_EMAIL, "n": {"type": "integer"}}, "required": ["mail", "n"]}
    function = {"name": "f", "parameters": schema}
    made = reply_grammar(ReplyForm(KNOWN["hermes"]), reply_request([{"type": "function", "function": function}]))
    assert "properties/mail" in made.loosened["f"] and "/n" not in made.loosened["f"]
    call = '<tool_call>\n{"name": "f", "arguments": {"mail": "a@b.cd", "n": %s}}\n</tool_call>'
    assert may_come(marked_tokenizer(), made, call % 1) and not may_come(marked_tokenizer(), made, call % '"x"')
    with pytest.raises(SamplingParamsError, match="looks ahead"):
        reply_grammar(
            ReplyForm(KNOWN["hermes"]), reply_request([{"type": "function", "function": {**function, "strict": True}}])
        )


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("in_reasoning", [True, False])
def test_a_call_within_reasoning_that_was_not_closed_is_taken(choice: str, in_reasoning: bool, marked: bool) -> None:
    syntax = KNOWN["qwen3_coder"]
    tokenizer = marked_tokenizer(markers_of(syntax) if marked else [])
    made = reply_grammar(ReplyForm(syntax, in_reasoning=in_reasoning), reply_request(TOOLS, choice))
    call = "<tool_call>\n<function=weather_note>\n<parameter=text>\nHi\n</parameter>\n</function>\n</tool_call>"
    start = "" if in_reasoning else "<think>\n"
    for text in (f"{start}Let me look.\n{call}", f"{start}Let me look.\n</think>\n\n{call}"):
        assert may_come(tokenizer, made, text)
        for size in (1, 7, len(text)) if not marked else ():
            reply = read_in_pieces(made, text, size)
            assert [one.name for one in reply.tool_calls] == ["weather_note"] and not reply.content
            assert reply.reasoning.startswith("Let me look.")
    assert may_come(tokenizer, made, f"{start}I am done.") == (choice == "auto")
    assert may_come(tokenizer, made, f"{start}I am.\n</think>\n\nDone.") == (choice == "auto")
    assert not may_come(tokenizer, made, f"{start}Let me look.\n{call[:-30]}")


def test_a_call_ends_what_counts_as_reasoning() -> None:
    form = ReplyForm(KNOWN["qwen3_coder"], tools={"f": {}}, in_reasoning=True)
    budget = form.budget(3)
    assert budget is not None and budget.call == "<tool_call>"
    matcher = grammars_of(marked_tokenizer()).matcher(None, [0], budget=budget)
    for token in marked_tokenizer().encode("<tool_call>\n<function=f>\n", add_special_tokens=False):
        if matcher.only is not None:
            break
        matcher.append(token)
    else:
        assert matcher.only is None


# -- markers ---------------------------------------------------------------------------------------------------------


def allowed(tokenizer: Tokenizer, made: ReplyGrammar, written: str) -> set[str]:
    """The tokens that may come after this text, whose own tokens all may."""
    assert made.structured is not None
    matcher = grammars_of(tokenizer).matcher(made.structured, [0])

    def may() -> set[int]:
        return {*np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()}

    for token in tokenizer.encode(written, add_special_tokens=False, parse_special=True):
        assert token in may(), tokenizer.token_text(token)
        matcher.append(token)
    return {tokenizer.token_text(token) for token in may() if tokenizer.knows(token)}


def test_a_marker_that_is_one_added_token_is_that_token() -> None:
    """Also where it is not special, and what it shares with another one could be spelled (DeepSeek V3.1)."""
    syntax = template("deepseek_v31").reply_syntax
    tokenizer = marked_tokenizer(markers_of(syntax), special=False)
    made = reply_grammar(ReplyForm(syntax, reasoned=True), reply_request(TOOLS))
    call = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    found = allowed(tokenizer, made, "<｜tool▁calls▁begin｜>" + call)
    assert found == {"<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"}
    assert "<｜tool▁calls▁end｜>" in allowed(tokenizer, made, "<｜tool▁calls▁begin｜>" + call + call)


HEADED = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning %}{{- '<|begin|>assistant<|think|>' + m.reasoning + '<|end|>' }}{% endif %}
{%- if m.tool_calls %}{{- '<|begin|>assistant<|calls|>' }}
{%- for c in m.tool_calls %}{{- '<|call|>' + c.function.name + '<|args|>' + c.function.arguments | tojson }}{% endfor %}
{{- '<|done|>' }}
{%- else %}{{- '<|begin|>assistant<|content|>' + m.content + '<|end|>' }}{% endif %}
{%- else %}{{- '<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant' }}{% endif %}
"""
"""Every part of a reply begins with a marker of its own, as in Solar Open."""


def test_content_may_begin_with_the_marker_that_its_template_prints() -> None:
    syntax = ChatTemplate(HEADED, SPECIALS).reply_syntax
    tokenizer = marked_tokenizer(markers_of(syntax))
    made = reply_grammar(ReplyForm(syntax), reply_request(TOOLS))
    for thought in ("", "<|think|>A cloud.<|end|><|begin|>assistant"):
        allowed(tokenizer, made, thought + "<|content|>No rain.")
        allowed(tokenizer, made, thought + "<|calls|><|call|>now<|args|>{}<|done|>")
    parser = ReplyParser(made.form, tokenizer.special_texts)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), parser)
    written = "<|think|>A cloud.<|end|><|begin|>assistant<|content|>No rain."
    detokenizer.push(tokenizer.encode(written, add_special_tokens=False, parse_special=True))
    detokenizer.finish()
    assert Reply.of(parser.events) == Reply(reasoning="A cloud.", content="No rain.")


APART = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}
{%- if m.reasoning %}{{- m.reasoning + '\\n[FINAL]\\n' }}{% endif %}{{- m.content + '\\n<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\nMy steps:\\n' }}{% endif %}
"""
"""Prompts open reasoning in words that histories do not have, as in Apriel 1.6."""


@pytest.mark.parametrize(
    ("source", "start", "end"),
    [
        (APART, "<|assistant|>\nMy steps:", "[FINAL]"),
        (APART.replace("\\nMy steps:", ""), None, None),
        (
            APART.replace("'<|' + m.role + '|>\\n'", "'<|' + m.role + '|>'")
            .replace(
                "{{- m.reasoning + '\\n[FINAL]\\n' }}", "{{- '<|open|>think<|sep|>' + m.reasoning + '<|close|>' }}"
            )
            .replace("{{- m.content", "{{- '<|open|>say<|sep|>' + m.content"),
            "<|open|>think<|sep|>",
            "<|close|><|open|>say<|sep|>",
        ),
    ],
)
def test_reasoning_begins_with_what_does_not_stand_before_content(source: str, start: str, end: str) -> None:
    found = ChatTemplate(source, SPECIALS).reply_syntax.reasoning
    assert (found and (found.start, found.end)) == (start and (start, end))


# -- calls without a marker ------------------------------------------------------------------------------------------

SPELLED = [
    '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}',
    '{"type": "function", "name": "weather", "parameters": {"city": "Rome", "days": 3}}',
    '{"type":"function","name":"weather","parameters":{"city":"Rome","days":3}}',
    '{"name":"weather","parameters":{"city":"Rome","days":3}}',
    '{\n  "name": "weather",\n  "parameters": {\n    "city": "Rome",\n    "days": 3\n  }\n}',
    '{\n    "type": "function",\n    "name": "weather",\n    "parameters": {"city": "Rome", "days": 3}\n}',
]


@pytest.mark.parametrize("written", SPELLED)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_llama_s_calls_in_any_spelling_of_json_are_calls(written: str, choice: str) -> None:
    made = reply_grammar(ReplyForm(template("llama3_json").reply_syntax), reply_request(TOOLS, choice))
    allowed(marked_tokenizer(), made, written)
    assert _read_in_pieces(made.form, written, 1) == _read_in_pieces(made.form, written, 400)
    [call] = _read_in_pieces(made.form, written, 3).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome", "days": 3})


@pytest.mark.parametrize(
    "written", ['{"name": "Ada", "age": 36}', '{"type": "function"}', '{\n  "name": "weathers"\n}', '{"name": "w']
)
def test_json_that_calls_no_tool_is_content(written: str) -> None:
    """Also behind the marks of a call, to the last letter."""
    made = reply_grammar(ReplyForm(template("llama3_json").reply_syntax), reply_request(TOOLS))
    allowed(marked_tokenizer(), made, written)
    reply = _read_in_pieces(made.form, written, 1)
    assert reply.content == written and not reply.tool_calls


def test_a_call_without_a_marker_is_to_a_tool_as_it_is() -> None:
    made = reply_grammar(ReplyForm(template("llama3_json").reply_syntax), reply_request(TOOLS))
    found = allowed(marked_tokenizer(), made, '{"type":"function","name":"weather",')
    assert found and all('"parameters"'.startswith(one.strip()) for one in found)


def _read_in_pieces(form: ReplyForm, text: str, size: int) -> Reply:
    parser = ReplyParser(form)
    for at in range(0, len(text), size):
        parser.text(text[at : at + size])
    parser.finish()
    return Reply.of(parser.events)
