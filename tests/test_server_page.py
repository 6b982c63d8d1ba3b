"""The web page: in a headless Chromium where there is one, and by its files everywhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import Chromium, Page, find_chromium
from tests.page_stand_in import STATIC, STEP, StandIn

READY = "document.querySelector('#send') && !document.querySelector('#send').disabled"
KEPT = "import('/static/js/store.js').then((store) => store.loadConversations())"
IDLE = "!document.querySelector('.message.running')"
ANSWER = ".message.assistant"
CANVASES = ("timeline", "pool", "tree")
OWN = [path for path in sorted(STATIC.rglob("*")) if path.suffix in (".js", ".css", ".html", ".svg")]
OWN = [path for path in OWN if not {"vendor", "docs"} & set(path.relative_to(STATIC).parts)]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: install Debian's package chromium to run the tests of the web page")
    chromium = Chromium(path, tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    yield chromium
    chromium.close_pages()


@pytest.fixture
def server() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()


def opened(browser: Chromium, server: StandIn, path: str = "/", until: str = READY, **size: Any) -> Page:
    page = browser.open(**size)
    page.go(server.url + path)
    page.wait(until)
    return page


def ask(page: Page, text: str) -> None:
    page.type("#prompt", text)
    page.click("#send")


def answered(page: Page, text: str) -> None:
    """Wait until the last answer is complete and holds `text`."""
    page.wait(f"{IDLE} && [...document.querySelectorAll('{ANSWER}')].at(-1)?.textContent.includes({text!r})")


def ink(name: str) -> str:
    """JavaScript: how many different colours the picture of a card shows."""
    return f"""(() => {{
      const canvas = document.querySelector('#{name} canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const colors = new Set();
      for (let i = 0; i < data.length; i += 4) {{
        if (data[i + 3]) colors.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
      }}
      return colors.size;
    }})()"""


def point(page: Page, name: str, share: float, down: float, says: str) -> None:
    """Point at the picture of a card, at a share of its width, until the tooltip says so.

    Again and again: the page may move under the pointer while it fills, and what is drawn moves too.
    """
    place = f"""(() => {{
      const canvas = document.querySelector('#{name} canvas');
      canvas.scrollIntoView({{ block: 'center' }});
      const {{ x, y, width }} = canvas.getBoundingClientRect();
      return [x + 2 + {share} * width, y + {down}];
    }})()"""
    end = time.monotonic() + 40
    while not page.evaluate(f"Boolean(document.querySelector('.tooltip')?.textContent.match({says}))"):
        assert time.monotonic() < end, f"the tooltip of {name} does not say {says}"
        x, y = page.evaluate(place)
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)


def settle(server: StandIn, page: Page) -> None:
    """What every test of a page that met no error ends with."""
    assert page.errors == []
    assert {url.split("/")[2] for url in page.urls if not url.startswith(("data:", "about:"))} == {server.url[7:]}


# -- chat ----------------------------------------------------------------------------------------------------


def test_an_answer_is_streamed_and_shown_as_markdown(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    ask(page, "Say hello")
    answered(page, "Hello, world")
    assert page.evaluate(f"document.querySelector('{ANSWER} strong').textContent") == "world"
    path, body = server.script.bodies[-1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Say hello"}]
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert not {"temperature", "top_p", "top_k", "max_tokens", "seed"} & set(body)
    settle(server, page)


def test_tokens_cached_tokens_and_times_stand_under_an_answer(browser: Chromium, server: StandIn) -> None:
    server.script.pause = 0.05
    page = opened(browser, server)
    ask(page, "Say hello")
    answered(page, "to first")
    shown = page.text(f"{ANSWER} .statistics")
    assert "1,234 prompt, 1,024 cached" in shown
    assert "56 tokens" in shown
    assert re.search(r"[\d,.]+ tok/s", shown)
    assert re.search(r"\d (ms|s) to first", shown)
    settle(server, page)


def test_an_answer_appears_while_it_is_written_and_stop_ends_it(browser: Chromium, server: StandIn) -> None:
    server.script.pieces, server.script.pause = ["word "] * 4000, 0.02
    page = opened(browser, server)
    ask(page, "Go on for ever")
    page.wait(f"document.querySelector('{ANSWER}.running')?.textContent.includes('word word')")
    page.click("#send")
    answered(page, "stopped")
    assert server.script.hung_up.wait(20)
    ask(page, "Once more")
    page.wait(f"document.querySelectorAll('{ANSWER}.running').length === 1")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
    page.wait(f"{IDLE} && document.querySelectorAll('{ANSWER}').length === 2")
    settle(server, page)


def test_parameters_and_the_system_message_are_sent(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    chosen = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 77, "seed": 12}
    for name, value in chosen.items():
        page.type(f"[data-name={name}]", str(value))
    page.type(".settings textarea", "Be brief.")
    ask(page, "Hi")
    answered(page, "Hello")
    body = server.script.bodies[-1][1]
    assert {name: body[name] for name in chosen} == chosen
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    settle(server, page)


def test_a_number_out_of_range_is_marked_and_not_sent(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    page.type("[data-name=top_p]", "7")
    assert page.evaluate("document.querySelector('[data-name=top_p]').classList.contains('wrong')")
    ask(page, "Hi")
    answered(page, "Hello")
    assert "top_p" not in server.script.bodies[-1][1]


def test_a_message_can_be_sent_again_changed_and_its_answer_replaced(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    ask(page, "First")
    answered(page, "Hello")
    page.click(f"{ANSWER} [title='Another answer']")
    page.wait("document.querySelectorAll('.message').length === 2")
    answered(page, "Hello")
    page.click(".message.user [title='Edit']")
    page.type(".edit-area", "Second")
    page.click(".message.user .primary")
    page.wait("document.querySelector('.message.user')?.textContent.includes('Second')")
    answered(page, "Hello")
    asked = [[message["content"] for message in body["messages"]] for _, body in server.script.bodies]
    assert asked == [["First"], ["First"], ["Second"]]
    settle(server, page)


def test_an_answer_that_reached_its_limit_goes_on_where_it_ended(browser: Chromium, server: StandIn) -> None:
    server.script.finish_reason = "length"
    page = opened(browser, server)
    ask(page, "Hi")
    answered(page, "length limit")
    server.script.pieces = [" And more."]
    page.click(f"{ANSWER} [title='Go on']")
    answered(page, "Hello, world. And more.")
    body = server.script.bodies[-1][1]
    assert body["messages"][-1] == {"role": "assistant", "content": "Hello, **world**."}
    assert body["continue_final_message"] and not body["add_generation_prompt"]
    settle(server, page)


def test_conversations_are_kept_in_the_browser_and_can_be_deleted(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    for title in ("Apples", "Pears"):
        page.click(".side .new")
        ask(page, title)
        answered(page, "Hello")
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait("!window.isOld && document.querySelectorAll('.conversation').length === 2")
    page.wait("document.querySelector('.message.user')?.textContent.includes('Pears')")
    page.click("li:nth-child(2) .conversation")
    page.wait("document.querySelector('.message.user')?.textContent.includes('Apples')")
    page.click("li:nth-child(2) .item-menu")
    page.click(".menu [role=menuitem]:last-child")
    page.wait("document.querySelectorAll('.conversation').length === 1")
    assert page.evaluate(f"{KEPT}.then((all) => all.length)") == 1


def test_no_conversation_makes_room_for_others(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    kept = page.evaluate("""(async () => {
      const { newConversation, saveConversation, loadConversations } = await import('/static/js/store.js');
      for (let i = 0; i < 70; i += 1) {
        const messages = [{ role: 'user', content: 'x'.repeat(i < 65 ? 10 : 700000) }];
        await saveConversation({ ...newConversation(), updated: i, title: `t${i}`, messages });
      }
      return (await loadConversations()).map((one) => one.title);
    })()""")
    assert kept == [f"t{i}" for i in range(69, -1, -1)]


def test_a_conversation_that_cannot_be_kept_is_told(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    page.evaluate("""IDBObjectStore.prototype.put = () => {
      throw new DOMException('', 'QuotaExceededError');
    }; 0""")
    ask(page, "Hi")
    page.wait("document.querySelector('.toast')?.textContent.includes('the browser\\'s storage is full')")
    answered(page, "Hello")


def test_markup_in_an_answer_stays_text_and_loads_nothing(browser: Chromium, server: StandIn) -> None:
    server.script.pieces = [
        "<img src=x onerror='document.title=1'> <script>document.title=1</script> ![x](http://127.0.0.2/leak.png) ",
        "[go](javascript:alert(1)) [fine](https://example.org/)",
    ]
    page = opened(browser, server)
    ask(page, "Attack me")
    answered(page, "onerror=")
    body = f"document.querySelector('{ANSWER} .message-body')"
    assert page.evaluate(f"{body}.querySelectorAll('img, script, [onerror]').length") == 0
    assert "x (image, not loaded)" in page.text(f"{ANSWER} .message-body")
    links = page.evaluate(f"[...{body}.querySelectorAll('a')].map((a) => a.href + ' ' + a.rel)")
    assert all(link.startswith(("http://127.0.0.2/", "https://example.org/")) and "noopener" in link for link in links)
    settle(server, page)


def test_a_model_without_a_chat_template_is_offered_as_plain_text(browser: Chromium, server: StandIn) -> None:
    server.script.refusal = (400, {"message": "this model has no chat template", "code": None})
    page = opened(browser, server)
    ask(page, "Once upon a time")
    page.wait("document.querySelector('.error-card .primary')")
    server.script.refusal = None
    page.click(".error-card .primary")
    answered(page, "Once upon a timeHello, **world**.")
    path, body = server.script.bodies[-1]
    assert path == "/v1/completions"
    assert body["prompt"] == "Once upon a time"


def test_an_embedded_model_is_introduced_and_is_given_text_to_complete(browser: Chromium, server: StandIn) -> None:
    server.script.description = "the embedded model; it is no assistant"
    page = opened(browser, server)
    assert page.text(".welcome .about") == "This is the embedded model; it is no assistant."
    page.click(".examples button")
    page.click("#send")
    answered(page, "def fibonacci(n):")
    assert server.script.bodies[-1][0] == "/v1/completions"


def test_whoever_chose_to_chat_with_an_embedded_model_goes_on_so(browser: Chromium, server: StandIn) -> None:
    server.script.description = "the embedded model; it is no assistant"
    page = opened(browser, server)
    page.click(".composer [data-value=chat]")
    page.go(server.url + "/?again")
    page.wait(READY)
    ask(page, "Hi")
    answered(page, "Hello")
    assert server.script.bodies[-1][0] == "/v1/chat/completions"


def test_other_models_are_not_introduced(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    assert page.evaluate("document.querySelector('.about').hidden")
    assert page.text(".welcome h1") == "Talk to stand-in"


@pytest.mark.quick("429-queue_full-busy")
@pytest.mark.parametrize(
    ("status", "code", "title"),
    [
        (400, "context_length_exceeded", "no longer fits"),
        (429, "queue_full", "busy"),
        (500, None, "failed on this request"),
    ],
)
def test_an_error_is_explained_and_can_be_tried_again(
    browser: Chromium, server: StandIn, status: int, code: str | None, title: str
) -> None:
    server.script.refusal = (status, {"message": "the server's own words", "code": code})
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')")
    card = page.text(".error-card")
    assert title in card and "the server's own words" in card and "req-stand-in" in card
    server.script.refusal = None
    page.click(".error-card button")
    answered(page, "Hello")


def test_a_stream_that_breaks_off_is_told(browser: Chromium, server: StandIn) -> None:
    server.script.breaks_off = True
    page = opened(browser, server)
    ask(page, "Hi")
    page.wait("document.querySelector('.error-card')?.textContent.includes('before the answer was complete')")
    assert "Hello" in page.text(f"{ANSWER} .message-body")


def test_events_are_parsed_wherever_the_stream_is_cut(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    assert page.evaluate("""(async () => {
      const { EventParser } = await import('/static/js/api.js');
      const text = ['data: one', '', ': alive', '', 'data:two\\r', '\\r', 'data: a', 'data: b', '', 'event: x', '',
        'data: [DONE]', '', ''].join('\\n');
      const found = new Set();
      for (let cut = 0; cut <= text.length; cut += 1) {
        const parser = new EventParser();
        found.add(JSON.stringify([...parser.push(text.slice(0, cut)), ...parser.push(text.slice(cut))]));
      }
      return [...found];
    })()""") == ['["one","two","a\\nb","[DONE]"]']


# -- the server's state --------------------------------------------------------------------------------------


def test_the_loading_screen_tells_phase_and_percent_and_goes_by_itself(browser: Chromium, server: StandIn) -> None:
    server.script.health = {"status": "loading", "phase": "reading the weights", "percent": 42}
    page = opened(browser, server, until="document.querySelector('#loading-phase')?.textContent")
    shown = page.text("#loading")
    assert "reading the weights" in shown and "42 %" in shown
    server.script.health = {"status": "ok"}
    page.wait("document.querySelector('#loading').hidden")
    page.wait(READY)


def test_a_key_is_asked_for_sent_and_kept_for_the_tab(browser: Chromium, server: StandIn) -> None:
    server.script.key = "sesame"
    page = opened(browser, server, until="document.querySelector('#key-dialog')?.open")
    page.type("#key-dialog .field", "wrong")
    page.click("#key-dialog .primary")
    page.wait("document.querySelector('#key-dialog')?.textContent.includes('not accepted')")
    page.type("#key-dialog .field", "sesame")
    page.click("#key-dialog .primary")
    page.wait(READY)
    ask(page, "Hi")
    answered(page, "Hello")
    assert page.evaluate("[sessionStorage.getItem('quire.key'), localStorage.getItem('quire.key')]") == ["sesame", None]


def test_a_key_can_still_be_given_after_the_question_was_dismissed(browser: Chromium, server: StandIn) -> None:
    server.script.key = "sesame"
    page = opened(browser, server, until="document.querySelector('#key-dialog')?.open")
    page.evaluate("document.querySelector('#key-dialog').close()")  # as the Escape key does
    page.click("#banner")
    page.wait("document.querySelector('#key-dialog[open]')")
    page.type("#key-dialog[open] .field", "sesame")
    page.click("#key-dialog[open] .primary")
    page.wait(READY)
    assert page.evaluate("document.querySelector('#banner').hidden")


def test_a_server_that_comes_back_with_another_model_is_asked_for_that_one(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server)
    server.script.model, server.script.health = "other", {"status": "loading", "phase": "x", "percent": 1}
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # do not wait for the next look
    page.wait("!document.querySelector('#loading').hidden")
    server.script.health = {"status": "ok"}
    page.wait(READY)
    ask(page, "Hi")
    answered(page, "Hello")
    assert server.script.bodies[-1][1]["model"] == "other"
    assert page.text("#status-text") == "other"


@pytest.mark.quick("draining")
@pytest.mark.parametrize("status", ["restarting", "stalled", "failed", "draining"])
def test_a_server_in_trouble_says_so_and_takes_no_message(browser: Chromium, server: StandIn, status: str) -> None:
    server.script.health = {"status": status}
    page = opened(browser, server, until="!document.querySelector('#banner').hidden")
    assert len(page.text("#banner")) > 30
    assert page.evaluate("document.querySelector('#send').disabled")


# -- the live view -------------------------------------------------------------------------------------------


def live(browser: Chromium, server: StandIn, **size: Any) -> Page:
    return opened(browser, server, "/#live", until="document.querySelectorAll('#requests tbody tr').length > 3", **size)


@pytest.mark.quick("1400-False")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1400, False)])
def test_every_picture_of_the_live_view_is_drawn(browser: Chromium, server: StandIn, width: int, dark: bool) -> None:
    page = live(browser, server, width=width, height=900, dark=dark)
    for name in CANVASES:
        page.wait(f"{ink(name)} >= 3")
    page.wait("document.querySelectorAll('.chart canvas').length === 4")
    page.wait("document.querySelector('.tile strong').textContent.match(/^[1-9]/)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelector('#live-view').scrollWidth <= innerWidth")
    settle(server, page)


def test_steps_are_asked_for_once_and_polling_stops_when_nobody_looks(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server)
    page.wait("document.querySelector('#timeline .card-note').textContent")
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/view')).length"
    page.wait(f"{asked} >= 3")
    since = [int(url.rpartition("=")[2]) for url in page.urls if "/view?since=" in url]
    assert since[0] == 0 and since[1] > 0 and since == sorted(since)
    page.evaluate("location.hash = '#chat'")
    page.wait("document.querySelector('#live-view').hidden")
    before = page.evaluate(asked)
    time.sleep(1.2)
    assert page.evaluate(asked) <= before + 1
    page.evaluate("location.hash = '#live'")
    page.wait(f"{asked} > {before} + 1")
    settle(server, page)


def test_a_paused_view_stands_still_until_it_goes_on(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server)
    page.click(".live-head .button")
    page.wait("document.querySelector('.live-head .button').textContent === 'Go on'")
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/view')).length"
    before = page.evaluate(asked)
    time.sleep(1.2)
    assert page.evaluate(asked) <= before + 1
    page.click(".live-head .button")
    page.wait(f"{asked} > {before} + 1")
    settle(server, page)


def test_a_finished_request_shows_where_its_time_went(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server)
    page.click("#finished tbody tr:nth-child(3)")
    page.wait("document.querySelector('#finished tbody tr.chosen')")
    names = page.evaluate("[...document.querySelectorAll('#waterfall .fall-name')].map((one) => one.textContent)")
    assert names == ["Tokenize", "Queue", "Match prefix", "Prefill 1", "Prefill 2", "Decode", "Detokenize"]
    bars = page.evaluate(
        "[...document.querySelectorAll('#waterfall .fall-track i')].map((i) => parseFloat(i.style.left))"
    )
    assert bars[:6] == sorted(bars[:6])
    settle(server, page)


def test_ranks_with_experts_of_their_own_show_how_even_their_work_is(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server, width=1400, height=1000)
    page.wait("document.querySelector('#tile-kv strong').textContent.includes('%')")
    assert page.evaluate("document.querySelector('#tile-experts').hidden")
    server.script.imbalance = 1.254
    page.wait("!document.querySelector('#tile-experts').hidden")
    assert page.text("#tile-experts strong") == "1.25 x"
    assert page.text("#tile-experts small") == "3 moves"
    server.script.imbalance = 0.0
    page.wait("document.querySelector('#tile-experts').hidden")
    settle(server, page)


def test_an_engine_that_speculates_shows_what_its_drafts_bring(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server, width=1400, height=1000)
    page.wait("document.querySelector('#tile-kv strong').textContent.includes('%')")
    assert page.evaluate("document.querySelector('#tile-drafts').hidden")
    assert "drafts" not in page.text("#waterfall .facts")
    server.script.speculates, server.script.boot = True, 2
    page.wait("!document.querySelector('#tile-drafts').hidden")
    assert page.text("#tile-drafts strong") == "4.00"
    assert page.text("#tile-drafts small") == "75 % accepted"
    gap = "document.querySelectorAll('.chart .legend b')[2].textContent"  # a step takes 20 ms, and gives 4 tokens
    page.wait(f"{gap}.match(/^5\\.\\d ms/)")
    page.wait("document.querySelector('#requests td[title$=\"drafts accepted\"]')")
    page.click("#finished tbody tr:nth-child(3)")
    page.wait("document.querySelector('#waterfall .facts').textContent.includes('drafts accepted')")
    page.wait(f"{ink('timeline')} >= 3")
    point(page, "timeline", share=0.9, down=54, says="/of them drafts/")
    settle(server, page)


def test_an_address_names_a_request_and_one_that_is_gone_is_explained(browser: Chromium, server: StandIn) -> None:
    page = opened(browser, server, "/#live/chatcmpl-unknown", until="document.querySelector('#waterfall .empty')")
    page.wait("document.querySelector('#waterfall').textContent.includes('chatcmpl-unknown is still running')")
    settle(server, page)


def test_the_pool_tells_what_lies_under_the_pointer(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server, width=1400, height=1000)
    page.wait(f"{ink('pool')} >= 3")
    point(page, "pool", share=0.0, down=2, says=r"/^Block 1\nheld by nine or more$/")


def test_a_large_pool_says_how_many_blocks_a_square_stands_for(browser: Chromium, server: StandIn) -> None:
    server.script.num_blocks = 100_000
    page = live(browser, server)
    page.wait("document.querySelector('#pool .card-note').textContent.includes('100,000 blocks')")
    assert "13 a square" in page.text("#pool .card-note")
    settle(server, page)


def test_another_engine_begins_a_new_picture(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server)
    page.wait(f"{ink('timeline')} >= 3")
    server.script.first_step = int(time.monotonic() / STEP)  # it has run nothing when the page first asks
    server.script.boot = 2
    views = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/view'))"
    asked_last = f"Number({views}.at(-1).name.split('since=')[1])"
    page.wait(f"{asked_last} > 0 && {asked_last} < 1000")
    page.wait(f"{ink('timeline')} >= 3")
    settle(server, page)


def test_one_of_several_engines_can_be_looked_at(browser: Chromium, server: StandIn) -> None:
    page = live(browser, server)
    assert page.evaluate("document.querySelector('#engines').hidden")
    server.script.engines = ["ready", "restarting"]
    page.wait("document.querySelectorAll('#engines option').length === 2")
    assert page.evaluate("document.querySelector('#engines').innerText.includes('1: restarting')")
    page.evaluate("document.querySelector('#engines').value = 1")
    page.evaluate("document.querySelector('#engines').dispatchEvent(new Event('change'))")
    page.wait("performance.getEntriesByType('resource').some((one) => one.name.endsWith('engine=1'))")
    server.script.engines = ["ready", "ready"]
    page.wait("document.querySelector('#engines').innerText.includes('1: ready')")
    assert page.evaluate("document.querySelector('#engines').value") == "1"
    settle(server, page)


@pytest.mark.quick("404-No live view here")
@pytest.mark.parametrize(("status", "title"), [(403, "Only for the operator"), (404, "No live view here")])
def test_a_live_view_that_is_refused_says_why(browser: Chromium, server: StandIn, status: int, title: str) -> None:
    server.script.view_status = status
    page = opened(browser, server, "/#live", until="document.querySelector('.notice h2')")
    assert page.text(".notice h2") == title
    assert page.evaluate("Boolean(document.querySelector('.notice .button'))") == (status == 403)


@pytest.mark.quick("refused at once")
@pytest.mark.parametrize("late", [0.0, 1.0], ids=["refused at once", "the old key's refusal comes late"])
def test_another_key_can_be_given_where_the_live_view_wants_the_first(
    browser: Chromium, server: StandIn, late: float
) -> None:
    server.script.view_status, server.script.late = 403, late
    page = opened(browser, server, "/#live", until="document.querySelector('.notice .button')")
    page.click(".notice .button")
    page.wait("document.querySelector('#key-dialog')?.open")
    server.script.key, server.script.view_status = "first", 200  # not before: the page asks again by itself
    page.type("#key-dialog .field", "first")
    page.click("#key-dialog .primary")
    page.wait("document.querySelectorAll('#requests tbody tr').length > 3")


# -- the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_of_the_page_names_another_host(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w{2,}/?", re.sub(r"(?m)^\s*//.*$", "", text))


def test_every_file_that_the_page_names_is_there() -> None:
    for path in OWN:
        text = path.read_text()
        for name in re.findall(r"[\"']/?static/([^\"']+)[\"']", text):
            assert (STATIC / name).is_file(), f"{path.name} names {name}"
        for name in re.findall(r"from \"(\.[^\"]+)\"", text):
            assert (path.parent / name).is_file(), f"{path.name} imports {name}"


def test_the_page_has_no_inline_script_and_builds_no_code() -> None:
    page = (STATIC / "index.html").read_text()
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    assert not re.search(r"\son\w+=", page)
    for path in OWN:
        assert not re.search(r"\beval\(|new Function\(|document\.write\(", path.read_text()), path.name
