# ruff: noqa: F811  # fixtures of another file
"""The page's conversations: turns, versions, what is kept; and that everybody can use it (WCAG)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import Chromium, Page
from tests.page_stand_in import STATIC, StandIn
from tests.test_server_page import (  # noqa: F401  # fixtures
    ANSWER,
    IDLE,
    KEPT,
    READY,
    answered,
    ask,
    browser,
    chromium,
    live,
    opened,
    server,
    settle,
)

AXE = (Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js").read_text()
FULL = (400, {"message": "This model's maximum context length is 4096 tokens.", "code": "context_length_exceeded"})
CALLS: list[str | dict[str, Any]] = [  # two calls of a tool, as a stream has them
    {
        "tool_calls": [
            {
                "index": index,
                "id": f"call_{city}",
                "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'},
            }
        ]
    }
    for index, city in enumerate(("Rome", "Oslo"))
]


def press(page: Page, label: str, within: str = "document") -> None:
    """Press a button by what it says or is labelled, the last such one."""
    page.evaluate(f"""(() => {{
      const says = (one) => (one.title || one.textContent) === {json.dumps(label)};
      [...({within}).querySelectorAll('button')].filter(says).at(-1).click();
    }})()""")


def choose(page: Page, entry: str, within: str) -> None:
    """Open the last menu within an element and choose an entry."""
    page.evaluate(f"[...({within}).querySelectorAll('[aria-haspopup=menu]')].at(-1).click()")
    press(page, entry, "document.querySelector('.menu')")


def sent(server: StandIn) -> list[str]:
    """What the last request's messages said."""
    return [message["content"] for message in server.script.bodies[-1][1]["messages"]]


def shown(page: Page) -> list[str]:
    bodies: list[str] = page.evaluate("[...document.querySelectorAll('.message-body')].map((one) => one.innerText)")
    return bodies


def talk(page: Page, *questions: str) -> None:
    for number, question in enumerate(questions):
        ask(page, question)
        page.wait(f"{IDLE} && document.querySelectorAll('.message').length >= {2 * number + 2}")


# -- turns ---------------------------------------------------------------------------------------------------


def test_a_turn_that_failed_is_not_part_of_the_conversation(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One")
    server.script.refusal = (500, {"message": "no", "code": None})
    ask(page, "Two")
    page.wait("document.querySelector('.error-card')?.textContent.includes('Not part of the conversation')")
    server.script.refusal = None
    ask(page, "Three")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 6")
    assert sent(server) == ["One", "Hello, **world**.", "Three"]


@pytest.mark.quick("Continue from here-Hello, **world**.")
@pytest.mark.parametrize(
    ("button", "then"), [("Keep the text so far", "Hello"), ("Continue from here", "Hello, **world**.")]
)
def test_half_an_answer_can_be_kept_or_written_on(
    browser: Chromium,
    server: StandIn,
    button: str,
    then: str,
) -> None:
    server.script.breaks_off = True
    page = opened(browser, server)
    ask(page, "One")
    page.wait("document.querySelector('.error-card')")
    server.script.breaks_off, server.script.pieces = False, [", **world**."]
    press(page, button)
    page.wait(f"{IDLE} && !document.querySelector('.error-card')")
    ask(page, "Two")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert sent(server) == ["One", then, "Two"]
    assert server.script.bodies[-2][1].get("continue_final_message", False) == (button == "Continue from here")


def test_an_early_turn_is_edited_beside_its_first_version(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One", "Two")
    page.click(".message.user [title=Edit]")
    page.type(".edit-area", "Another one")
    press(page, "Send", "document.querySelector('.message.user')")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
    assert sent(server) == ["Another one"]
    assert page.text(".message.user .versions") == "2 / 2"
    press(page, "Previous version")
    assert shown(page)[::2] == ["One", "Two"]
    settle(server, page)


def test_an_answer_can_be_changed_by_hand_and_the_model_sees_the_change(
    browser: Chromium,
    server: StandIn,
) -> None:
    page = opened(browser, server)
    talk(page, "One")
    page.click(f"{ANSWER} [title='Edit the answer']")
    press(page, "Cancel")
    assert page.evaluate("document.activeElement.title") == "Edit the answer"
    page.click(f"{ANSWER} [title='Edit the answer']")
    page.type(".edit-area", "Good day.")
    press(page, "Save")
    page.wait(f"document.querySelector('{ANSWER} .statistics').textContent.includes('edited')")
    ask(page, "Two")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert sent(server) == ["One", "Good day.", "Two"]


def test_another_answer_in_the_middle_keeps_what_followed_the_first(
    browser: Chromium,
    server: StandIn,
) -> None:
    page = opened(browser, server)
    talk(page, "One", "Two")
    server.script.pieces = ["Other."]
    page.click(f"{ANSWER} [title='Another answer']")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 2")
    assert shown(page) == ["One", "Other."]
    press(page, "Previous version")
    assert shown(page)[::2] == ["One", "Two"]


def test_a_turn_can_be_deleted_and_brought_back(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One", "Two", "Three")
    choose(page, "Delete this turn", "document.querySelectorAll('.message')[2]")
    assert shown(page)[::2] == ["One", "Three"]
    ask(page, "Four")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 6")
    assert sent(server)[::2] == ["One", "Three", "Four"]
    choose(page, "Delete this turn", "[...document.querySelectorAll('.message')].at(-1)")
    press(page, "Undo")
    assert shown(page)[::2] == ["One", "Three", "Four"]
    settle(server, page)


def test_a_branch_is_a_conversation_of_its_own(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One", "Two")
    choose(page, "New conversation from here", f"document.querySelector('{ANSWER}')")
    page.wait("document.querySelectorAll('.conversation').length === 2")
    assert shown(page)[0] == "One" and len(shown(page)) == 2
    assert "One (branch)" in page.text(".conversations .current")
    page.click("li:nth-child(2) .conversation")
    assert shown(page)[::2] == ["One", "Two"]


def test_the_oldest_turns_are_dropped_where_the_context_is_full(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One", "Two", "Three")
    server.script.refusal = FULL
    ask(page, "Four")
    page.wait("document.querySelector('.error-card')")
    server.script.refusal = None
    press(page, "Drop the oldest turns and try again")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 8 && !document.querySelector('.error-card')")
    assert sent(server)[::2] == ["Three", "Four"]
    assert shown(page)[::2] == ["One", "Two", "Three", "Four"]  # still there to read
    press(page, "Send it again")
    ask(page, "Five")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 10")
    assert sent(server)[::2] == ["One", "Two", "Three", "Four", "Five"]


def test_one_message_that_is_too_long_by_itself_is_offered_no_dropping(
    browser: Chromium,
    server: StandIn,
) -> None:
    server.script.refusal = FULL
    page = opened(browser, server)
    ask(page, "x" * 500)
    page.wait("document.querySelector('.error-card')")
    assert "Drop the oldest" not in page.text(".error-card")


# -- conversations -------------------------------------------------------------------------------------------


def test_conversations_are_found_renamed_deleted_and_brought_back(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    for title in ("Apples", "Pears"):
        page.click(".side .new")
        ask(page, title)
        answered(page, "Hello")
    page.type(".search", "appl")
    assert page.evaluate("[...document.querySelectorAll('.conversation .title')].map((one) => one.textContent)") == [
        "Apples"
    ]
    choose(page, "Rename", "document.querySelector('.conversations')")
    page.type(".conversations .field", "Fruit")
    page.evaluate(
        "document.querySelector('.conversations .field').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"
    )
    page.type(".search", "fruit")
    page.wait("document.querySelector('.conversation .title')?.textContent === 'Fruit'")
    choose(page, "Delete", "document.querySelector('.conversations')")
    page.wait("document.querySelector('.no-conversations').textContent === 'Nothing found.'")
    press(page, "Undo")
    page.wait("document.querySelector('.conversation .title')?.textContent === 'Fruit'")
    assert page.evaluate(f"{KEPT}.then((all) => all.length)") == 2
    settle(server, page)


def test_what_is_exported_can_be_imported_with_all_versions(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One")
    page.click(f"{ANSWER} [title='Another answer']")
    page.wait(f"{IDLE} && document.querySelector('{ANSWER} .versions')")
    page.evaluate("""(() => {
      window.files = [];
      const make = URL.createObjectURL.bind(URL);
      URL.createObjectURL = (blob) => (blob.text().then((text) => window.files.push(text)), make(blob));
      HTMLAnchorElement.prototype.click = () => {};
    })()""")
    choose(page, "Export as JSON", "document.querySelector('.conversations')")
    choose(page, "Export as Markdown", "document.querySelector('.conversations')")
    page.wait("window.files.length === 2")
    assert page.evaluate("window.files[1]") == "# One\n\n## You\n\nOne\n\n## stand-in\n\nHello, **world**.\n"
    give = """((text) => {
      const data = new DataTransfer();
      data.items.add(new File([text], 'a.json'));
      const field = document.querySelector('input[type=file]');
      field.files = data.files;
      field.dispatchEvent(new Event('change'));
    })"""
    page.evaluate(f"{give}(window.files[0])")
    page.wait("document.querySelectorAll('.conversation').length === 2")
    assert page.text(f"{ANSWER} .versions") == "2 / 2"
    for text in ("{", "null", '{"format": "quire.conversations", "conversations": [{"id": 1}]}'):
        page.evaluate(f"document.querySelector('.toast')?.remove(); {give}({json.dumps(text)})")
        page.wait("document.querySelector('.toast')?.textContent.includes('has no exported conversations')")
    settle(server, page)


def test_text_files_go_with_a_message_and_stay_with_it(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    page.evaluate("""(() => {
      const data = new DataTransfer();
      data.items.add(new File(['a = "```"\\r\\n'], 'a.py'));
      data.items.add(new File([new Uint8Array([255, 254, 0])], 'b.bin'));
      const field = document.querySelector('.composer input[type=file]');
      field.files = data.files;
      field.dispatchEvent(new Event('change'));
    })()""")
    page.wait("document.querySelector('.toast')?.textContent.includes('\"b.bin\" is not text')")
    assert violations(page) == []
    talk(page, "What is this?")
    assert sent(server) == ['a.py:\n\n````\na = "```"\n````\n\nWhat is this?']
    assert page.evaluate("document.querySelector('.attachments').hidden")
    page.click(".message.user [title=Edit]")
    page.type(".edit-area", "And this?")
    press(page, "Send", "document.querySelector('.message.user')")
    page.wait(f"{IDLE} && document.querySelector('.message.user .versions')")
    assert sent(server) == ['a.py:\n\n````\na = "```"\n````\n\nAnd this?']
    assert page.text(".message.user .attached summary") == "a.py 1 line"
    settle(server, page)


def test_conversations_of_the_earlier_form_are_read(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    answer = {"role": "assistant", "mode": "chat", "content": "Hi", "finish": "stop"}
    old = {
        "id": "a",
        "title": "Old",
        "mode": "chat",
        "tools": "[]",
        "updated": 1,
        "messages": [{"role": "user", "content": "One"}, answer],
    }
    page.evaluate(f"localStorage.setItem('quire.conversation.a', {json.dumps(json.dumps(old))})")
    page.evaluate("localStorage.setItem('quire.conversation.b', '{')")
    page.go(server.url + "/?again")
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait(READY)
    assert page.evaluate("document.querySelector('[data-name=tools]').value") == "[]"
    ask(page, "Two")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert sent(server) == ["One", "Hi", "Two"]
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('quire.conv'))") == [
        "quire.conversation.b"  # what cannot be read is left where it is; the other one is in the database
    ]
    assert page.evaluate(f"{KEPT}.then((all) => all.map((one) => one.messages.length))") == [4]


def test_a_conversation_goes_on_after_the_server_was_started_anew(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    talk(page, "One")
    page.type("#prompt", "Two")
    server.script.gone = True
    server.close()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # do not wait for the next look
    page.wait("document.querySelector('#banner').textContent.includes('cannot be reached')")
    again = StandIn(port=int(server.url.rpartition(":")[2]))
    try:
        page.wait(READY)
        page.click("#send")
        page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
        assert sent(again) == ["One", "Hello, **world**.", "Two"]
    finally:
        again.close()


# -- parameters ----------------------------------------------------------------------------------------------


def fields(page: Page, *names: str) -> list[str]:
    values: list[str] = page.evaluate(
        f"{json.dumps(names)}.map((name) => document.querySelector(`[data-name=${{name}}]`).value)"
    )
    return values


def test_parameters_are_a_conversations_own_and_new_ones_begin_with_the_last_used(
    browser: Chromium, server: StandIn
) -> None:
    page = opened(browser, server)
    page.type("[data-name=temperature]", "0.2")
    page.type("[data-name=system]", "Be brief.")
    talk(page, "One")
    page.click(".side .new")
    assert fields(page, "temperature", "system") == ["0.2", "Be brief."]
    page.type("[data-name=temperature]", "1.5")
    page.type("[data-name=system]", "")
    page.type("[data-name=presence_penalty]", "1")
    talk(page, "Two")
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait(f"!window.isOld && {READY} && document.querySelectorAll('.conversation').length === 2")
    assert fields(page, "temperature", "system", "presence_penalty") == ["1.5", "", "1"]
    assert page.evaluate("document.querySelector('[data-name=presence_penalty]').checkVisibility()")  # unfolded
    page.click("li:nth-child(2) .conversation")
    assert fields(page, "temperature", "system", "presence_penalty") == ["0.2", "Be brief.", ""]
    ask(page, "Three")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    body = server.script.bodies[-1][1]
    assert (body["temperature"], body["messages"][0]["content"]) == (0.2, "Be brief.")
    assert "presence_penalty" not in body
    choose(page, "New conversation from here", f"document.querySelector('{ANSWER}')")
    page.type("[data-name=temperature]", "0.9")
    page.click("li:nth-child(3) .conversation")
    assert fields(page, "temperature") == ["0.2"]
    settle(server, page)


def test_presets_are_saved_chosen_and_deleted(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    preset = "document.querySelector('#preset')"

    def pick(name: str) -> None:
        page.evaluate(f"{preset}.value = {name!r}; {preset}.dispatchEvent(new Event('change')); 0")

    page.type("[data-name=temperature]", "0.2")
    page.type("[data-name=tools]", "[]")
    press(page, "Save as ...")
    assert violations(page) == []
    page.type("#preset-name", "Careful")
    press(page, "Save")
    page.wait(f"{preset}.value === 'Careful' && !document.querySelector('dialog')")
    page.type("[data-name=temperature]", "1")
    assert page.evaluate(f"{preset}.value") == ""  # what is set is no preset any more
    pick("Careful")
    assert fields(page, "temperature", "tools") == ["0.2", "[]"]
    press(page, "Undo")
    assert fields(page, "temperature", "tools") == ["1", "[]"]
    talk(page, "One")
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait(f"!window.isOld && {READY}")
    pick("Careful")
    ask(page, "Two")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert server.script.bodies[-1][1]["temperature"] == 0.2
    press(page, "Delete", "document.querySelector('.settings')")
    assert page.evaluate(f"[...{preset}.options].map((one) => one.textContent)") == ["None saved"]
    assert fields(page, "temperature") == ["0.2"]
    press(page, "Undo")
    assert page.evaluate(f"{preset}.value") == "Careful"
    settle(server, page)


def test_sliders_show_the_models_own_defaults(browser: Chromium, server: StandIn) -> None:
    server.script.defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    page = opened(browser, server)
    for name, value in server.script.defaults.items():
        field = f"document.querySelector('[data-name={name}]')"
        page.wait(f"{field}.placeholder === '{value:g}' && {field}.value === ''")
        assert float(page.evaluate(f"{field}.parentElement.querySelector('[type=range]').value")) == value
    ask(page, "Hi")
    answered(page, "Hello")
    assert not set(server.script.defaults) & set(server.script.bodies[-1][1])


def test_a_small_model_is_sampled_at_the_temperature_that_is_told(browser: Chromium, server: StandIn) -> None:
    server.script.suggestions = {"temperature": 0.7}
    page = opened(browser, server)
    page.wait("document.querySelector('[data-name=temperature]').placeholder === '0.7'")
    assert "0.7 if you set none: the model is small" in page.text("#setting-temperature-help")
    ask(page, "Hi")
    answered(page, "Hello")
    page.type("[data-name=temperature]", "1")
    ask(page, "Hi")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert [body["temperature"] for _, body in server.script.bodies] == [0.7, 1]
    settle(server, page)


def test_penalties_min_p_stop_and_a_schema_are_sent(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    chosen = {"min_p": 0.05, "presence_penalty": -0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    for name, value in chosen.items():
        page.type(f"[data-name={name}]", str(value))
    page.type("[data-name=stop]", "END\n\\n\\n")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    page.type("[data-name=schema]", json.dumps(schema))
    ask(page, "Hi")
    answered(page, "Hello")
    body = server.script.bodies[-1][1]
    assert {name: body[name] for name in chosen} == chosen
    assert body["stop"] == ["END", "\n\n"]
    assert body["response_format"]["json_schema"]["schema"] == schema
    settle(server, page)


def test_how_much_is_reasoned_is_chosen_for_chats(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    ask(page, "Hi")
    answered(page, "Hello")
    assert not {"reasoning_effort", "thinking_token_budget"} & set(server.script.bodies[-1][1])
    effort = "document.querySelector('[data-name=reasoning_effort]')"
    page.evaluate(f"{effort}.value = 'low'; {effort}.dispatchEvent(new Event('change')); 0")
    page.type("[data-name=thinking_token_budget]", "0")
    server.script.refusal = (400, {"message": "does not read it", "param": "chat_template_kwargs", "code": None})
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')")
    body = server.script.bodies[-1][1]
    assert (body["reasoning_effort"], body["thinking_token_budget"]) == ("low", 0)
    press(page, "Change the reasoning")
    assert page.evaluate("document.activeElement.dataset.name") == "reasoning_effort"
    server.script.refusal = None
    page.click(".composer [data-value=completion]")
    page.click(".side .new")
    ask(page, "Hi")
    answered(page, "Hello")
    assert not {"reasoning_effort", "thinking_token_budget"} & set(server.script.bodies[-1][1])


def test_a_schema_that_is_none_is_told_and_nothing_is_sent_without_it(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    page.type("[data-name=schema]", "{nonsense")
    assert page.evaluate("document.querySelector('[data-name=schema]').ariaInvalid") == "true"
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')")
    assert "Nothing was sent" in page.text(".error-card") and not server.script.bodies
    press(page, "Change the schema")
    assert page.evaluate("document.activeElement.dataset.name") == "schema"
    page.type("[data-name=schema]", "{}")
    press(page, "Try again")
    answered(page, "Hello")
    assert server.script.bodies[-1][1]["response_format"]["json_schema"]["schema"] == {}
    settle(server, page)


# -- what answers look like ----------------------------------------------------------------------------------

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="


def test_tables_tasks_and_images_are_shown_as_they_are_read(browser: Chromium, server: StandIn) -> None:
    row = "| 2026-11-28 | 1,234,567.89 | What this measured, in words | -0.001 ms |\n"
    head = "| Date | Amount | Text | Time |\n|-|-:|-|-|\n"
    tasks = f"- [x] one\n- [ ] two\n- three [x]\n\n![dot]({PIXEL}) [![a](https://b.c/d.png)](https://e.f/)"
    server.script.pieces = [f"{head}{row * 2}\n{tasks}"]
    page = opened(browser, server, width=390, height=800, touch=True)
    ask(page, "Hi")
    page.wait(f"{IDLE} && document.querySelector('{ANSWER} .wide')")
    lines = """[...document.querySelectorAll('td')].map((cell) => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return new Set([...range.getClientRects()].map((one) => Math.round(one.top))).size;
    })"""
    assert [page.evaluate(lines)[column] for column in (0, 1, 3)] == [1, 1, 1]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(f"[...document.querySelectorAll('{ANSWER} .task input')].map((one) => one.checked)") == [
        True,
        False,
    ]
    assert page.evaluate(f"[...document.querySelectorAll('{ANSWER} img')].map((one) => one.width)") == [1]
    assert page.evaluate(f"[...document.querySelectorAll('{ANSWER} .message-body a')].map((one) => one.href)") == [
        "https://e.f/"
    ]
    assert violations(page) == []
    settle(server, page)


FORMULAS = (
    r"Inline $e^{i\pi}$ and \(a_1*b_1*c\), \$5 or $6 and $7." "\n\n$$\n\\int_0^1 x\\,dx\n$$\n\nText\n\\[ x^2 \\]\n"
)


def test_mathematics_is_shown_and_prices_are_not_mathematics(browser: Chromium, server: StandIn) -> None:
    server.script.pieces = [FORMULAS]
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait(f"document.querySelectorAll('{ANSWER} math').length === 4")
    assert page.evaluate(f"document.querySelectorAll('{ANSWER} math[display=block]').length") == 2
    assert page.evaluate(f"document.querySelectorAll('{ANSWER} em').length") == 0
    assert "$5 or $6 and $7." in page.text(f"{ANSWER} .message-body")
    settle(server, page)


@pytest.mark.quick("$\\\\href{javascript:alert(1)}{x}$")
@pytest.mark.parametrize(
    "source", [r"$\href{javascript:alert(1)}{x}$", r"$$\frac{1$$", r"$<img src=x onerror=alert(1)>$"]
)
def test_formulas_bring_no_links_and_no_markup_and_errors_show_their_source(
    browser: Chromium,
    server: StandIn,
    source: str,
) -> None:
    server.script.pieces = [f"$x$ {source}"]
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait(f"{IDLE} && document.querySelector('{ANSWER} math')")
    body = f"document.querySelector('{ANSWER} .message-body')"
    assert page.evaluate(f"{body}.querySelectorAll('a, [href], img, [onerror]').length") == 0
    settle(server, page)


def test_code_is_coloured_and_says_its_language(browser: Chromium, server: StandIn) -> None:
    server.script.pieces = ["```python\ndef f(x):\n    return '<b>'\n```\n\n```nonsense\ndef g\n```\n"]
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait(f"document.querySelector('{ANSWER} .hljs-keyword')?.textContent === 'def'")
    assert page.evaluate(f"document.querySelectorAll('{ANSWER} pre b').length") == 0
    assert page.text(f"{ANSWER} .code-head span") == "python"
    assert page.evaluate(f"document.querySelectorAll('{ANSWER} pre')[1].querySelector('span')") is None
    settle(server, page)


def test_reasoning_is_folded_and_tool_calls_are_cards_that_grow(browser: Chromium, server: StandIn) -> None:
    def call(**function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": 0, **({"id": "call_1"} if "name" in function else {}), "function": function}]}

    pieces = [{"reasoning": "First, "}, {"reasoning": "I **look**."}, "Let me see.", call(name="weather", arguments="")]
    slow = [call(arguments=piece) for piece in ('{"city": ', '"Rome', '"}')]
    server.script.pieces, server.script.pause, server.script.finish_reason = [*pieces, *slow], 0.3, "tool_calls"
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait("document.querySelector('.reasoning summary')?.textContent === 'Thinking ...'")
    page.wait(f"document.querySelector('{ANSWER}.running .tool-call code')?.textContent === '{{\"city\": \"Rome'")
    page.wait(IDLE)
    assert page.text(".tool-call strong") == "weather"
    assert page.text(".tool-call code") == '{\n  "city": "Rome"\n}'
    assert not page.evaluate("document.querySelector('.reasoning').open")
    assert page.text(f"{ANSWER} > .message-body").strip() == "Let me see."
    page.click(".reasoning summary")
    page.wait("document.querySelector('.reasoning strong')?.textContent === 'look'")
    assert violations(page) == []
    server.script.pieces, server.script.pause = ["Done."], 0.01
    ask(page, "Go on")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 4")
    assert server.script.bodies[-1][1]["messages"][1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning": "First, I **look**.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    }
    settle(server, page)


# -- everybody -----------------------------------------------------------------------------------------------


def test_readers_of_the_screen_hear_the_answer_once(browser: Chromium, server: StandIn) -> None:
    sentences = [f"This is sentence {number}. " for number in range(60)]
    server.script.pieces, server.script.pause = sentences, 0.05
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait(f"document.querySelector('{ANSWER}.running')")
    page.wait("document.querySelectorAll('#spoken p').length >= 3")
    page.wait(IDLE)
    spoken = page.evaluate("[...document.querySelectorAll('#spoken p')].map((one) => one.textContent)")
    assert spoken[0] == "The answer begins." and spoken[-1] == "The answer is complete."
    assert " ".join(spoken[1:-1]).split() == "".join(sentences).split()
    assert page.evaluate("document.querySelector('#spoken').ariaLive") == "polite"


def violations(page: Page) -> list[str]:
    """What axe-core finds that is serious or critical, one line each."""
    page.evaluate(AXE + ";0")
    options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found: list[dict[str, Any]] = page.evaluate(
        f"axe.run(document, {json.dumps(options)}).then((result) => result.violations.map((one) => "
        "({id: one.id, impact: one.impact, nodes: one.nodes.map((node) => node.html.slice(0, 160))})))"
    )
    return [
        f"{one['id']} ({one['impact']}): {one['nodes']}" for one in found if one["impact"] in ("serious", "critical")
    ]


def test_shortcuts_are_listed_and_can_be_turned_off(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)

    def key(name: str) -> None:
        page.call("Input.dispatchKeyEvent", type="keyDown", key=name, text=name)

    key("?")
    assert page.evaluate("document.querySelector('#prompt').value") == "?"  # it was typed
    page.evaluate("document.activeElement.blur()")
    key("?")
    page.wait("document.querySelector('#shortcuts-dialog[open]')")
    assert violations(page) == []
    page.click("#shortcuts-dialog input")
    page.click("#shortcuts-dialog .primary")
    page.wait("document.querySelector('dialog') === null")
    key("?")
    key("s")
    assert page.evaluate("document.querySelector('dialog') === null && document.activeElement === document.body")
    page.click("#shortcuts")
    page.click("#shortcuts-dialog input")
    page.click("#shortcuts-dialog .primary")
    page.evaluate("document.activeElement.blur()")
    key("s")
    assert page.evaluate("document.activeElement.ariaLabel") == "Search conversations"
    settle(server, page)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (390, True),
        (1400, False),
        *(pytest.param(*view, marks=pytest.mark.slow) for view in ((390, False), (1400, True))),
    ],
)
def test_axe_finds_nothing_serious(browser: Chromium, server: StandIn, width: int, dark: bool) -> None:
    page = opened(browser, server, width=width, height=900, dark=dark, touch=width < 500)
    assert violations(page) == []
    server.script.pieces = [
        "# A\n\n**b** `c` [d](https://example.org)\n\n| a |\n|-|\n| 1 |\n\n```python\ndef f(): # x\n```\n$x$"
    ]
    talk(page, "One")
    page.wait("document.querySelector('.hljs-keyword') && document.querySelector('math')")
    page.click(f"{ANSWER} [title='Another answer']")
    page.wait(f"{IDLE} && document.querySelector('.versions')")
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    press(page, "Insert an example")
    server.script.pieces, server.script.finish_reason = CALLS, "tool_calls"
    ask(page, "Call")
    page.wait(f"{IDLE} && document.querySelectorAll('.tool-result textarea').length === 2")
    assert violations(page) == []
    press(page, "Send the results")
    page.wait(f"{IDLE} && document.querySelectorAll('.tool-result').length === 4")
    server.script.refusal = FULL
    ask(page, "Two")
    page.wait("document.querySelector('.error-card')")
    press(page, "More")
    page.evaluate("document.querySelector('#chat-view').classList.add('with-settings')")
    assert violations(page) == []
    page.evaluate("document.querySelector('.menu').hidePopover(); location.hash = '#live'")
    page.wait("document.querySelectorAll('#requests tbody tr').length > 3")
    assert violations(page) == []


def test_fingers_find_targets_of_44_pixels(browser: Chromium, server: StandIn) -> None:
    page = browser.open(width=390, height=844, touch=True)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    page.go(server.url)
    page.wait(READY)
    talk(page, "One")
    server.script.pieces = CALLS
    talk(page, "Two")
    page.click("[title=Conversations]")
    page.click("[title=Parameters]")
    small = page.evaluate("""[...document.querySelectorAll('button, .tabs a')].filter((one) => one.checkVisibility())
      .map((one) => [one.title || one.textContent, one.getBoundingClientRect().height])
      .filter(([, height]) => height < 43.5)""")
    assert small == []


def test_a_panel_over_the_thread_closes_with_escape(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server, width=390, height=844)
    for label in ("Conversations", "Parameters"):
        page.click(f"[title={label}]")
        assert page.evaluate(f"document.querySelector('[title={label}]').ariaExpanded") == "true"
        assert page.evaluate("document.querySelector('.shade').checkVisibility()")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
        page.wait("!document.querySelector('.shade').checkVisibility()")
        assert page.evaluate("document.activeElement.title") == label
        assert page.evaluate("document.activeElement.ariaExpanded") == "false"


def test_headings_lead_through_the_thread(browser: Chromium, server: StandIn) -> None:
    server.script.pieces = ["# Title\n\n## Part\n"]
    page = opened(browser, server)
    talk(page, "One")
    found = page.evaluate(
        "[...document.querySelectorAll('#chat-view .middle :is(h1, h2, h3, h4)')]"
        ".map((one) => one.tagName + ' ' + one.textContent)"
    )
    assert found == ["H1 One", "H2 You", "H2 stand-in", "H3 Title", "H4 Part"]


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(first: str, second: str) -> float:
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_the_contrast_that_wcag_asks_for(theme: str) -> None:
    parts = (STATIC / "css" / "base.css").read_text().split(':root[data-theme="dark"]', 1)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", parts[0]))
    if theme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6});", parts[1].split("}")[0]))
    grounds = [
        colours[name] for name in ("paper", "surface", "raised", "sunken", "accent-tint", "bad-tint", "warn-tint")
    ]
    for text in ("ink", "soft", "faint", "accent", "good", "warn", "bad", "h-title"):
        assert min(_contrast(colours[text], ground) for ground in grounds) >= 4.5, text
    assert _contrast(colours["accent-ink"], colours["accent"]) >= 4.5
    for part in ("edge", "c-prefill", "c-decode", "c-cached", "c-queue", "c-text"):  # WCAG 1.4.11
        assert _contrast(colours[part], colours["surface"]) >= 3, part
