# ruff: noqa: F811  # fixtures of another file
"""The page with a real server, and the model that ships with Quire."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.chromium import Chromium
from tests.http_tools import ServeProcess
from tests.test_server_page import ANSWER, IDLE, READY, answered, ask, browser, chromium, ink  # noqa: F401  # fixtures


@pytest.fixture(scope="module")
def demo(chromium: Chromium) -> Iterator[ServeProcess]:
    with ServeProcess("--tool-format", "hermes") as server:
        yield server


@pytest.mark.slow
def test_chat_completion_and_live_view_work_with_a_real_server(browser: Chromium, demo: ServeProcess) -> None:
    page = browser.open(1400, 900)
    page.go(demo.url)
    page.wait(READY)
    page.wait("document.querySelector('.about').textContent.includes('4 million parameters')")
    page.click(".composer [data-value=chat]")
    page.type("[data-name=max_tokens]", "12")
    page.type("[data-name=temperature]", "0")
    ask(page, "What is a generator?")
    answered(page, "to first")
    page.click(".side .new")
    page.click(".composer [data-value=completion]")
    ask(page, "def add(a, b):")
    answered(page, "to first")
    continuation = page.evaluate("document.querySelector('.continuation').textContent")
    body = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    assert continuation == demo.json("/v1/completions", body)["choices"][0]["text"]
    page.click(f"{ANSWER} [title=More]")
    page.click(".menu [role=menuitem]:nth-child(2)")
    page.wait("document.querySelectorAll('#waterfall .fall').length >= 5")
    page.wait("document.querySelectorAll('#finished tbody tr').length >= 3")
    for name in ("pool", "tree"):
        page.wait(f"{ink(name)} >= 2")
    assert page.errors == []
    assert all(url.startswith(demo.url) for url in page.urls)


def test_a_real_model_calls_a_tool_and_goes_on_from_its_result(browser: Chromium, demo: ServeProcess) -> None:
    page = browser.open(1400, 900)
    page.go(demo.url)
    page.wait(READY)
    page.click(".composer [data-value=chat]")
    page.type("[data-name=max_tokens]", "120")
    page.type("[data-name=temperature]", "0")
    page.evaluate("[...document.querySelectorAll('.settings .link')].at(-1).click()")  # the example
    page.evaluate("document.querySelector('[data-name=toolChoice]').value = 'function:weather'")
    page.evaluate("document.querySelector('[data-name=toolChoice]').dispatchEvent(new Event('change'))")
    ask(page, "How warm is it?")
    page.wait(f"{IDLE} && document.querySelector('.tool-result textarea')")
    told = json.loads(page.text(".tool-call code"))
    assert told["city"] in ("Rome", "Oslo") and told["unit"] in ("celsius", "fahrenheit") and len(told) == 2
    page.evaluate("window.isOld = true")
    page.call("Page.reload")
    page.wait(f"!window.isOld && {READY} && document.querySelector('.tool-result textarea')")
    page.type(".tool-result textarea", "21")
    page.click(".tool-row .primary")
    page.wait(f"{IDLE} && document.querySelectorAll('.message').length === 3")
    assert "to first" in page.evaluate("[...document.querySelectorAll('.statistics')].at(-1).textContent")
    assert page.evaluate("[...document.querySelectorAll('.message-body')].at(-1).textContent.length") > 20
    assert page.errors == []
