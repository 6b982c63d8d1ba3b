# ruff: noqa: F811  # fixtures of another file
"""The page's tools: what the model may call, its calls, and the results that the user gives."""

from __future__ import annotations

import json
from typing import Any

from tests.chromium import Chromium, Page
from tests.page_stand_in import StandIn
from tests.test_server_page import (  # noqa: F401  # fixtures
    ANSWER,
    IDLE,
    KEPT,
    READY,
    answered,
    ask,
    browser,
    chromium,
    opened,
    server,
    settle,
)
from tests.test_server_page_chat import choose, press, talk

FIELDS = ".tool-result textarea"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


TOOLS = [tool("weather"), tool("clock")]


def call(index: int, name: str, arguments: str, id: str = "") -> dict[str, Any]:
    """A delta of a stream that holds a whole call."""
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": id or f"id_{index}", "type": "function", "function": function}]}


def calls(server: StandIn, *deltas: str | dict[str, Any], finish: str = "tool_calls") -> None:
    """What the next answers are."""
    server.script.pieces, server.script.finish_reason = list(deltas), finish


def says(server: StandIn, text: str) -> None:
    server.script.pieces, server.script.finish_reason = [text], "stop"


def give_tools(page: Page, choice: str = "auto") -> None:
    page.type("[data-name=tools]", json.dumps(TOOLS))
    pick(page, choice)


def pick(page: Page, choice: str) -> None:
    field = "document.querySelector('[data-name=toolChoice]')"
    page.evaluate(f"{field}.value = {json.dumps(choice)}; {field}.dispatchEvent(new Event('change')); 0")


def called(page: Page, server: StandIn, question: str = "Will it rain?") -> None:
    """Ask, and be answered by one call."""
    calls(server, call(0, "weather", '{"city": "Rome"}'))
    ask(page, question)
    page.wait(f"{IDLE} && document.querySelectorAll('{FIELDS}').length === 1")


def has_ended(page: Page, messages: int) -> None:
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === {messages}")


def sent(server: StandIn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = server.script.bodies[-1][1]["messages"]
    return messages


def called_as(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ROME = called_as("weather", '{"city": "Rome"}', "id_0")


# -- which tools ---------------------------------------------------------------------------------------------


def test_tools_and_which_of_them_are_called_are_sent(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    for number, choice in enumerate(("auto", "none", "required", "function:clock"), start=1):
        give_tools(page, choice)
        ask(page, "Hi")
        has_ended(page, 2 * number)
        body = server.script.bodies[-1][1]
        named = {"type": "function", "function": {"name": "clock"}}
        assert (body["tools"], body["tool_choice"]) == (TOOLS, named if "clock" in choice else choice)
    page.type("[data-name=tools]", "")
    pick(page, "auto")
    ask(page, "Hi")
    has_ended(page, 10)
    assert not {"tools", "tool_choice"} & set(server.script.bodies[-1][1])
    settle(server, page)


def test_what_is_no_list_of_tools_is_told_and_nothing_is_sent(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    for text, why in {
        '[{"type": "function"': "Not valid: Expected",
        '{"type": "function"}': "must be a list",
        "[1]": "tool 1 must be",
        '[{"type": "web_search"}]': "tool 1 must be",
        '[{"type": "function", "function": {"parameters": {}}}]': "tool 1 has no name",
        json.dumps([tool("a"), tool("a b")]): 'tool 2 has the name "a b"',
        json.dumps([tool("a"), tool("a")]): 'tool 2 has the name "a", which another one has',
    }.items():
        page.type("[data-name=tools]", text)
        assert why in page.text("#setting-tools-help")
        assert page.evaluate("document.querySelector('[data-name=tools]').ariaInvalid") == "true"
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')")
    assert "Nothing was sent" in page.text(".error-card") and not server.script.bodies
    page.evaluate("document.querySelector('#chat-view').classList.remove('with-settings')")
    press(page, "Change the tools")
    assert page.evaluate("document.activeElement.dataset.name") == "tools"
    page.type("[data-name=tools]", json.dumps(TOOLS))
    press(page, "Try again")
    answered(page, "Hello")
    assert server.script.bodies[-1][1]["tools"] == TOOLS
    settle(server, page)


def test_a_tool_that_must_be_called_and_was_taken_out_is_told(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page, "function:clock")
    page.type("[data-name=tools]", json.dumps(TOOLS[:1]))
    assert page.evaluate("document.querySelector('[data-name=toolChoice]').value") == "function:clock"
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')?.textContent.includes('\"clock\" must be called')")
    assert not server.script.bodies


def test_what_the_server_says_against_tools_stands_beside_them(browser: Chromium, server: StandIn) -> None:
    server.script.refusal = (400, {"message": "no way to call tools could be found", "param": "tools", "code": None})
    page = opened(browser, server)
    give_tools(page)
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')?.textContent.includes('no way to call tools')")
    assert "no way to call tools" in page.text("#setting-tools-help")
    server.script.refusal = None
    page.type("[data-name=tools]", "")
    assert "no way to call tools" not in page.text("#setting-tools-help")
    press(page, "Try again")
    answered(page, "Hello")


def test_a_schema_that_is_not_enforced_is_told(browser: Chromium, server: StandIn) -> None:
    server.script.headers = {"x-quire-loosened": "tool weather: any JSON object"}
    page = opened(browser, server)
    give_tools(page)
    ask(page, "Hi")
    answered(page, "arguments were any JSON")


# -- calls and results ---------------------------------------------------------------------------------------


def test_results_become_tool_messages_and_the_model_goes_on(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page, "required")
    calls(server, "Let me see.", call(0, "weather", '{"city": "Rome"}'), call(1, "clock", "{}"))
    ask(page, "Will it rain?")
    page.wait(f"{IDLE} && document.querySelectorAll('{FIELDS}').length === 2")
    labels = page.evaluate(f"[...document.querySelectorAll('{FIELDS}')].map((one) => one.ariaLabel)")
    assert labels == ["Result of call 1 of weather", "Result of call 2 of clock"]
    said = page.evaluate("document.querySelector('#spoken').lastChild.textContent")
    assert said == "The model calls weather, clock. It goes on when it has the results."
    says(server, "It will.")
    page.evaluate(
        f"document.querySelector('{FIELDS}').focus()"
    )  # the rest with the keyboard alone; the second is empty
    page.call("Input.insertText", text='{"rain": true}')
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, modifiers=2)
    answered(page, "It will.")
    assert server.script.bodies[-1][1]["tool_choice"] == "auto"  # it has been called
    assert sent(server) == [
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [ROME, called_as("clock", "{}", "id_1")]},
        {"role": "tool", "tool_call_id": "id_0", "content": '{"rain": true}'},
        {"role": "tool", "tool_call_id": "id_1", "content": ""},
    ]
    told = page.evaluate(
        "[...document.querySelectorAll('.tool-result')].map((one) => one.innerText.split('\\n').at(-1))"
    )
    assert told == ['{"rain": true}', "Empty"]
    assert page.evaluate("document.activeElement.id") == "prompt"
    says(server, "Bye.")
    ask(page, "Thanks")
    answered(page, "Bye.")
    assert server.script.bodies[-1][1]["tool_choice"] == "required"
    assert [one["role"] for one in sent(server)] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    settle(server, page)


def test_a_model_may_call_again_when_it_has_a_result(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page)
    called(page, server)
    calls(server, call(0, "clock", "{}", id="second"))
    press(page, "Send the result")
    has_ended(page, 3)
    assert page.evaluate(f"document.querySelectorAll('{FIELDS}').length") == 1
    says(server, "It will.")
    press(page, "Send the result")
    answered(page, "It will.")
    assert [one.get("tool_call_id") for one in sent(server)] == [None, None, "id_0", None, "second"]


def test_a_call_that_was_cut_off_is_none(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page)
    calls(server, "Well.", call(0, "weather", '{"ci'), finish="length")
    ask(page, "Will it rain?")
    answered(page, "Cut off")
    assert page.evaluate(f"document.querySelector('{FIELDS}')") is None
    says(server, " It will.")
    press(page, "Go on")
    answered(page, "Well. It will.")
    assert page.evaluate("document.querySelector('.tool-call')") is None
    ask(page, "Thanks")
    has_ended(page, 4)
    assert sent(server)[1] == {"role": "assistant", "content": "Well. It will."}


def test_a_question_may_come_in_place_of_a_result(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page)
    called(page, server)
    page.type(FIELDS, "not sent")
    says(server, "Never mind.")
    ask(page, "Forget it")
    answered(page, "Never mind.")
    assert [one["role"] for one in sent(server)] == ["user", "assistant", "user"]
    assert "None given" in page.text(".tool-result")


# -- turns ---------------------------------------------------------------------------------------------------


def rained(browser: Chromium, server: StandIn) -> Page:
    """A page with a question, a call with its result, and an answer."""
    page = opened(browser, server)
    give_tools(page)
    called(page, server)
    page.type(FIELDS, "rain")
    says(server, "It will.")
    press(page, "Send the result")
    answered(page, "It will.")
    return page


def test_a_result_can_be_changed_and_sent_beside_the_first(browser: Chromium, server: StandIn) -> None:
    page = rained(browser, server)
    press(page, "Edit the results")
    assert page.evaluate(f"document.activeElement === document.querySelector('{FIELDS}')")
    assert page.evaluate(f"document.querySelector('{FIELDS}').value") == "rain"
    page.type(FIELDS, "sun")
    says(server, "It will not.")
    press(page, "Send the result")
    answered(page, "It will not.")
    assert [one["content"] for one in sent(server)] == ["Will it rain?", None, "sun"]
    press(page, "Previous version")
    page.wait(f"[...document.querySelectorAll('{ANSWER}')].at(-1).textContent.includes('It will.')")
    assert page.text(".tool-result pre") == "rain"
    settle(server, page)


def test_a_result_can_be_changed_as_it_stands(browser: Chromium, server: StandIn) -> None:
    page = rained(browser, server)
    press(page, "Edit the results")
    page.type(FIELDS, "sun")
    press(page, "Cancel")
    assert page.text(".tool-result pre") == "rain"
    assert page.evaluate("document.activeElement.title") == "Edit the results"
    press(page, "Edit the results")
    page.type(FIELDS, "sun")
    press(page, "Save")
    assert page.text(".tool-result pre") == "sun"
    assert page.evaluate("document.activeElement.ariaLabel") == "Thread"
    ask(page, "Thanks")
    has_ended(page, 5)
    assert [one["content"] for one in sent(server)] == ["Will it rain?", None, "sun", "It will.", "Thanks"]


def test_another_answer_to_a_result_keeps_it_and_another_call_has_none(browser: Chromium, server: StandIn) -> None:
    page = rained(browser, server)
    says(server, "Surely.")
    press(page, "Another answer")
    answered(page, "Surely.")
    assert [one["content"] for one in sent(server)] == ["Will it rain?", None, "rain"]
    calls(server, call(0, "clock", "{}"))
    page.click(f"{ANSWER} [title='Another answer']")
    has_ended(page, 2)
    assert [one["role"] for one in sent(server)] == ["user"]
    assert page.evaluate(f"document.querySelector('{FIELDS}').value") == ""


def test_a_turn_is_deleted_and_brought_back_with_its_calls(browser: Chromium, server: StandIn) -> None:
    page = rained(browser, server)
    ask(page, "Thanks")
    has_ended(page, 5)
    choose(page, "Delete this turn", "document.querySelector('.message.user')")
    has_ended(page, 2)
    ask(page, "Again")
    has_ended(page, 4)
    assert [one["role"] for one in sent(server)] == ["user", "assistant", "user"]
    choose(page, "Delete this turn", "[...document.querySelectorAll('.message')].at(-1)")
    press(page, "Undo")
    assert page.evaluate("document.querySelectorAll('.message').length") == 4


def test_a_failed_answer_to_a_result_can_be_tried_again(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page)
    called(page, server)
    server.script.refusal = (500, {"message": "no", "code": None})
    press(page, "Send the result")
    page.wait("document.querySelector('.error-card')")
    server.script.refusal = None
    says(server, "It will.")
    press(page, "Try again")
    answered(page, "It will.")
    assert [one["role"] for one in sent(server)] == ["user", "assistant", "tool"]


HISTORIES = """(async () => {
  const thread = await import('/static/js/thread.js');
  const { history } = await import('/static/js/generate.js');
  const { checkedConversation, newConversation } = await import('/static/js/store.js');
  let state = %d;
  const draw = (n) => ((state = (state * 1103515245 + 12345) %% 2147483648), Math.floor(state / 65536) %% n);
  let conversation = newConversation();
  const found = [];
  const reply = () => {
    const toolCalls = Array.from({ length: draw(3) }, (_, i) =>
      ({ id: `call_${found.length}_${i}`, name: 'f', arguments: draw(4) ? '{"a": 1}' : '{"a' }));
    return { role: 'assistant', content: draw(3) ? 'text' : '', error: draw(6) ? null : { status: 500 }, toolCalls };
  };
  const answer = (parent) => {
    const message = thread.add(conversation, { role: 'assistant', content: '', running: true }, parent);
    found.push(history(conversation, message, ''));
    Object.assign(message, reply(), { running: false });
  };
  const last = () => thread.path(conversation).at(-1) ?? null;
  const one = (all) => (all.length ? all[draw(all.length)] : null);
  const any = (is) => one(conversation.messages.filter(is));
  const operations = [
    () => answer(thread.add(conversation, { role: 'user', content: 'question' }, last())),
    () => { const old = any((one) => one.role === 'assistant'); // another answer
      if (old) answer(conversation.messages.find((one) => one.key === old.parent)); },
    () => { const one = any((one) => thread.callsOf(one).length && !one.error); // results, or others
      const results = thread.callsOf(one ?? {}).map(() => (draw(2) ? 'result' : ''));
      if (one) answer(thread.giveResults(conversation, one, results)); },
    () => { const one = any((one) => thread.callsOf(one).length); // saved as they stand
      if (one) thread.setResults(one, thread.callsOf(one).map(() => 'other')); },
    () => { const one = any(() => true); if (one) thread.showThrough(conversation, one.key); },
    () => { const one = any((one) => one.role === 'user'); if (one && !draw(3)) thread.removeTurn(conversation, one); },
    () => { if (last() && !draw(3)) conversation = thread.branch(conversation, one(thread.path(conversation))); },
    () => { if (!draw(4)) thread.leaveOutOldest(conversation); },
    () => { const isEnd = ({ key }) => !conversation.messages.some((other) => other.parent === key);
      const one = any((one) => thread.callsOf(one).length > 1 && isEnd(one)); // a file that somebody has changed
      if (one) delete thread.callsOf(one)[draw(2)].result; },
    () => { conversation = checkedConversation(JSON.parse(JSON.stringify(conversation))); }, // reload
  ];
  for (let step = 0; step < 1500; step += 1) operations[draw(operations.length)]();
  return found;
})()"""


def test_whatever_is_done_with_turns_every_result_stands_behind_its_call(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    results = 0
    for seed in (1, 2, 3):
        for messages in page.evaluate(HISTORIES % seed):
            calls: list[str] = []
            given: list[str] = []
            for message in [*messages, {"role": "end"}]:
                if message["role"] == "tool":
                    assert isinstance(message["content"], str)
                    given.append(message["tool_call_id"])
                    continue
                assert given in ([], calls), messages  # all of them, in order, or none
                assert given or not calls or message["role"] in ("user", "end"), messages  # nobody answers before them
                results += len(given)
                calls, given = [one["id"] for one in message.get("tool_calls", ())], []
                assert all(
                    json.loads(one["function"]["arguments"]) == {"a": 1} for one in message.get("tool_calls", ())
                )
    assert results > 500


# -- what is kept --------------------------------------------------------------------------------------------


def test_tools_calls_and_unsent_results_are_a_conversations_own_and_outlive_the_page(
    browser: Chromium, server: StandIn
) -> None:
    page = opened(browser, server)
    give_tools(page, "function:clock")
    called(page, server)
    page.type(FIELDS, "half a res")
    page.evaluate(f"document.querySelector('{FIELDS}').dispatchEvent(new Event('change'))")
    page.click(".side .new")
    chosen = (
        "[document.querySelector('[data-name=tools]').value, document.querySelector('[data-name=toolChoice]').value]"
    )
    assert page.evaluate(chosen) == [json.dumps(TOOLS), "function:clock"]  # the last used settings
    page.type("[data-name=tools]", "")
    pick(page, "auto")
    talk(page, "Without")
    assert "tools" not in server.script.bodies[-1][1]
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait(f"!window.isOld && {READY} && document.querySelectorAll('.conversation').length === 2")
    page.click("li:nth-child(2) .conversation")
    assert page.evaluate(chosen) == [json.dumps(TOOLS), "function:clock"]
    assert page.evaluate(f"document.querySelector('{FIELDS}').value") == "half a res"
    says(server, "It will.")
    press(page, "Send the result")
    answered(page, "It will.")
    assert [one["content"] for one in sent(server)] == ["Will it rain?", None, "half a res"]
    choose(page, "New conversation from here", "[...document.querySelectorAll('.message')].at(-1)")
    assert page.evaluate(chosen) == [json.dumps(TOOLS), "function:clock"]
    press(page, "Reset")
    assert page.evaluate(chosen) == ["", "auto"]
    press(page, "Undo")
    assert page.evaluate(chosen) == [json.dumps(TOOLS), "function:clock"]
    settle(server, page)


def test_tools_outlive_the_page_before_anything_is_said(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    give_tools(page)
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait(f"!window.isOld && {READY}")
    assert page.evaluate("document.querySelector('[data-name=tools]').value") == json.dumps(TOOLS)
    assert page.evaluate("document.querySelectorAll('.conversation').length") == 0
    assert page.evaluate(f"{KEPT}.then((all) => all.length)") == 0


def test_exports_have_tools_calls_and_results(browser: Chromium, server: StandIn) -> None:
    page = rained(browser, server)
    texts = page.evaluate("""(async () => {
      const { asMarkdown, importJson } = await import('/static/js/export.js');
      const { loadConversations } = await import('/static/js/store.js');
      const conversations = await loadConversations();
      const text = JSON.stringify({ format: 'quire.conversations', conversations });
      const refused = ['1', '[1]', '[{"name": "f"}]'].map((calls) => {
        try {
          return importJson(text.replace(/"toolCalls":\\[.*?\\]/, `"toolCalls":${calls}`));
        } catch (error) {
          return error.message;
        }
      });
      return [asMarkdown(importJson(text)[0], 'model'), importJson(text)[0].settings.tools, ...refused];
    })()""")
    assert texts[0] == (
        "# Will it rain?\n\n## You\n\nWill it rain?\n\n## model\n\nCalls `weather`:\n\n"
        '```json\n{"city": "Rome"}\n```\n\nResult:\n\n```\nrain\n```\n\n## model\n\nIt will.\n'
    )
    assert texts[1] == json.dumps(TOOLS)
    assert all("has no exported conversations" in text for text in texts[2:])
