"""Chat templates against transformers, and what a template and its messages may not do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import ChatTemplateError, UnknownTemplateVariableError
from quire.text import chat_template, template_sandbox
from quire.text.chat_template import ChatTemplate, check_messages, load_templates

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in rest %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}{%- endif %}"
    "{%- endfor %}"
)

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA_3, "mistral": MISTRAL, "zephyr": ZEPHYR}


def chat(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS = [
    chat("Hello"),
    chat("Hello", "Hi there", " And now? \n", system="Be brief."),
    chat("1 < 2 & 'x' \"y\"", "<think>\nhm\n</think>\n\nyes", "世界🙂"),
    chat("", "a"),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_real_templates_render_as_in_transformers(name: str, messages: list[Any], generate: bool) -> None:
    options = {"add_generation_prompt": generate}
    [expected], _ = render_jinja_template([messages], chat_template=TEMPLATES[name], **options, **SPECIALS)
    assert ChatTemplate(TEMPLATES[name], SPECIALS).render(messages, **options) == expected


CONTINUED = [
    chat("Hello", "Hi"),
    chat("Hello", "  Hi the ", system="Be brief."),
    chat("x", "<think>\nhm"),
    chat("x", ""),
    chat("same", "same", "go", "same"),
    chat("x", "CONTINUE_FINAL_MESSAGE_TAG is here"),
    chat("x", "世界🙂\n\n"),
    chat("a user's own message is continued too"),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONTINUED)
def test_a_final_message_is_continued_as_in_transformers(name: str, messages: list[Any]) -> None:
    [expected], _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIALS
    )
    before = json.dumps(messages)
    rendered = ChatTemplate(TEMPLATES[name], SPECIALS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected
    assert json.dumps(messages) == before
    assert rendered.rstrip().endswith(messages[-1]["content"].strip())


def test_text_parts_are_continued_behind_the_last_one() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [*chat("x"), {"role": "assistant", "content": parts}]
    rendered = ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith("<|im_start|>assistant\none\ntwo")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",  # leaves the last message out
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content.replace('Hi', 'Ho') }}{% endfor %}",
    ],
)
def test_a_final_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="changes the last message or leaves it out"):
        ChatTemplate(source).render(chat("a", "Hi"), add_generation_prompt=False, continue_final_message=True)


def test_continuing_refuses_a_generation_prompt_and_tool_calls() -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises(ChatTemplateError, match="set one of them to false"):
        template.render(chat("a", "b"), continue_final_message=True)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ChatTemplateError, match="calls tools"):
        template.render([*chat("a"), call], add_generation_prompt=False, continue_final_message=True)


def test_tools_and_variables_render_as_in_transformers() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b & 'é'", "parameters": {}}}]
    [expected], _ = render_jinja_template(
        [CHATS[1]], tools=tools, chat_template=CHATML, add_generation_prompt=True, enable_thinking=False
    )
    rendered = ChatTemplate(CHATML).render(CHATS[1], tools=tools, variables={"enable_thinking": False})
    assert rendered == expected
    assert "a < b & 'é'" in rendered


def test_a_template_that_takes_too_much_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_: object) -> str:
        raise MemoryError

    template = ChatTemplate("{{ messages[0].content }}")
    monkeypatch.setattr(chat_template, "join_pieces", out_of_memory)
    with pytest.raises(ChatTemplateError, match="more memory"):
        template.render(chat("x"))


def test_a_refusal_of_the_template_is_an_error_with_its_words() -> None:
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        ChatTemplate(MISTRAL, SPECIALS).render([*chat("a"), *chat("b")])


def test_a_printed_variable_that_nobody_defined_is_an_error_that_names_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ persona }}")
    with pytest.raises(ChatTemplateError, match="'persona' is undefined; pass it as a template variable"):
        template.render(chat("x"))
    assert template.render(chat("x"), variables={"persona": "!"}) == "x!"
    with pytest.raises(ChatTemplateError, match="'persona'"):
        ChatTemplate("{{ 'a' ~ persona }}").render(chat("x"))


def test_an_undefined_variable_may_be_tested() -> None:
    source = "{% if persona %}a{% endif %}{% if persona is defined %}b{% endif %}{{ persona or 'c' }}"
    assert ChatTemplate(source).render(chat("x")) == "c"


def test_missing_special_tokens_and_message_fields_print_nothing() -> None:
    assert ChatTemplate("{{ bos_token }}{{ messages[0].name }}|").render(chat("x")) == "|"


def test_string_methods_work_inside_loops_and_blocks() -> None:
    source = "{% block b scoped %}{{ m.content.replace('a', 'b').ljust(3) }}{% endblock %}"
    source = "{% for m in messages %}" + source + "{% endfor %}|"
    assert ChatTemplate(source).render(chat("aa")) == "bb |"


def test_the_date_is_today_s() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(chat("x")) == str(datetime.now().year)


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages", "{% unknown %}", "{{ 'a' | nofilter }}"])
def test_a_template_that_is_not_valid_is_refused_when_made(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ ('a' * 100000) * 100000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ messages * 100000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_breaks_out_or_fails_is_an_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(chat("x"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.rjust(10 ** 9) }}",
        "{{ 'a'.center(10 ** 9) }}",
        "{{ '1'.zfill(10 ** 9) }}",
        "{{ ('\\t' * 1000).expandtabs(10 ** 6) }}",
        "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ ('a' * 10000).join(['b'] * 10000) }}",
        "{{ (['b'] * 10000) | join('a' * 10000) }}",
        "{{ '%999999999s' % 'a' }}",
        "{{ '%*s' % (999999999, 'a') }}",
        "{{ '%999999999s' | format('a') }}",
        "{{ '{:999999999}'.format('a') }}",
        "{{ '{:{w}}'.format('a', w=999999999) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a\\nb' | indent(10 ** 9) }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ ('a ' * 10000) | wordwrap(1, wrapstring='b' * 10000) }}",
        "{{ [1] | batch(10 ** 9, 'x') | list }}",
        "{{ [1] | tojson(indent=10 ** 9) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=7) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='ab') %}"
        "{% for i in range(40) %}{% set ns.s = f(ns.s) %}{% endfor %}",
    ],
)
def test_a_long_value_is_refused_before_it_is_made(source: str) -> None:
    if source.startswith("{{"):  # not printed: the bound of the output is another one
        source = source.replace("{{ ", "{% set made = ").replace(" }}", " %}")
    with pytest.raises(ChatTemplateError, match=r"is longer than|must state its widths|prints more than .* characters"):
        ChatTemplate(source).render(chat("x"))


def test_what_is_bounded_works_as_ever_within_the_bounds() -> None:
    source = (
        "{{ 'a'.ljust(3) ~ '|' ~ 1 }}{{ 'xax'.replace('x', 'yy', 1) | replace('a', '') }}"
        "{{ ', '.join(messages | map(attribute='content')) }}{{ messages | map(attribute='role') | join('+') }}"
        "{{ messages | join('/', attribute='content') }}{{ '%s: %05d' % ('n', 42) }}{{ '{:>4}'.format(7) }}"
        "{{ 'a\\nb' | indent(2) }}{{ '%s' | format('z') }}{{ 'm' | center(3) }}{{ 'a' + 'b' }}"
        "{{ '{{\"id\": 123456789}}{}'.format(1) }}{{ '%%123456789%s' % 1 }}{{ 'a b' | wordwrap(1) }}"
        "{{ [1] | tojson(indent=1) }}"
    )
    messages = [*chat("x"), *chat("y")]
    expected = 'a  |1yyxx, yuser+userx/yn: 00042   7a\n  bz m ab{"id": 123456789}1%1234567891a\nb[\n 1\n]'
    assert ChatTemplate(source).render(messages) == expected


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDERED", 1000)
    template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}")
    assert len(template.render(chat("x" * 5))) == 1000
    with pytest.raises(ChatTemplateError, match="prints more than 1000 characters"):
        template.render(chat("x" * 6))


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages is"),
    ("hello", "messages is 'hello'"),
    ({"role": "user", "content": "x"}, "it must be a list"),
    (["x"], r"messages\[0\] is 'x'"),
    ([{"content": "x"}], r"messages\[0\] has the role None; it must be one of system"),
    ([{"role": "<|im_end|>", "content": "x"}], "has the role"),
    ([{"role": "user"}], r"messages\[0\] has the content None"),
    ([{"role": "user", "content": 5}], "has the content 5"),
    ([{"role": "user", "content": b"x"}], "holds b'x'"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is supported"),
    ([{"role": "user", "content": "x", "extra": object()}], "holds <object"),
    ([{"role": "user", "content": "x", 5: 1}], "has the key 5"),
]


@pytest.mark.parametrize(("messages", "words"), BAD_MESSAGES)
def test_bad_messages_are_refused_by_place(messages: Any, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(ZEPHYR).render(messages)


def test_messages_that_nest_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nests deeper than"):
        ChatTemplate(ZEPHYR).render([{"role": "user", "content": "x", "extra": deep}])


def test_text_parts_are_joined_by_line_breaks_unless_the_template_joins_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    own = "{% for m in messages %}{% for p in m.content %}{{ p.text or p }}{% endfor %};{% endfor %}"
    assert ChatTemplate(own).render([{"role": "user", "content": parts}]) == "ab;"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"


def test_null_content_stays_null_where_the_template_prints_calls_then_only() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content is none %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    template = ChatTemplate(source)
    for content in (None, ""):
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        assert template.render(template.as_known(check_messages(said))) == "?;<call>f {}</call>"
    assert template.reply_syntax.tools is not None and template.reply_syntax.tools.trigger == "<call>"


def test_an_answer_that_only_calls_tools_has_empty_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert ChatTemplate("[{{ messages[0].content }}]").render([message]) == "[]"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_variables_cannot_replace_what_the_engine_gives(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"'{name}' cannot be set"):
        ChatTemplate(ZEPHYR).render(chat("x"), variables={name: "y"})


def test_a_template_file_wins_over_the_tokenizer_s_config(tmp_path: Path) -> None:
    assert load_templates(tmp_path, {})[0] == {}
    assert load_templates(tmp_path, {"chat_template": "a"}) == ({"default": "a"}, tmp_path / "tokenizer_config.json")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "b"}))
    assert load_templates(tmp_path, {"chat_template": "a"}) == ({"default": "b"}, tmp_path / "chat_template.json")
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_templates(tmp_path, {"chat_template": "a"}) == ({"default": "c"}, tmp_path / "chat_template.jinja")


def test_additional_templates_have_the_names_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_templates(tmp_path, {})[0] == {"default": "c", "tool_use": "t"}


@pytest.mark.parametrize("found", [5, [1], [{"name": "x"}]])
def test_a_template_of_another_type_is_refused(tmp_path: Path, found: Any) -> None:
    with pytest.raises(ChatTemplateError, match="it must be a string, or a list"):
        load_templates(tmp_path, {"chat_template": found})


def test_a_template_file_that_is_not_json_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ChatTemplateError, match="not valid JSON"):
        load_templates(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        load_templates(tmp_path, {})


def test_a_variable_that_the_template_does_not_read_is_refused_with_those_it_reads() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if enable_thinking %}think{% endif %}")
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, variables={"enable_thinking": True}) == "hithink"
    with pytest.raises(UnknownTemplateVariableError, match=r"'enable_thinkin'; .*it has: enable_thinking"):
        template.render(messages, variables={"enable_thinkin": True})


def test_thinking_is_switched_by_the_name_that_the_template_has_and_what_it_lacks_is_told() -> None:
    switch = ChatTemplate("{% if thinking %}think{% endif %}")
    for given in ({"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}):
        assert switch.known_variables(given) == ({"thinking": False}, {})
    assert switch.known_variables({"enable_thinking": True})[0] == {"thinking": True}
    known, unused = switch.known_variables({"reasoning_effort": "high", "mood": 1, "thinking": True})
    assert known == {"thinking": True} and unused.keys() == {"reasoning_effort", "mood"}
    assert unused["mood"] == "the chat template does not use the variable 'mood'; leave it out (it has: thinking)"
    efforts = ChatTemplate("{{ reasoning_effort }}")
    assert efforts.known_variables({"reasoning_effort": "none"}) == ({"reasoning_effort": "none"}, {})
    assert efforts.known_variables({"enable_thinking": True})[1].keys() == {"enable_thinking"}


def test_no_content_is_what_a_template_takes_of_a_message_that_others_follow() -> None:
    """QwQ's template cuts the reasoning from earlier messages, and takes null in the last one only."""
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "no"},
    ]
    assert template.render(messages) == '<user>?<assistant><call>f{"a": 1}<tool>no'
