"""A router's page in a headless Chromium: who holds what, and a request's life as one waterfall."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.fleet.cached_prompts import CachedPrompts
from quire.fleet.prompt import read_prompt
from tests.chromium import Chromium, find_chromium
from tests.router_fakes import FakeServer, Loop, RouterThread

PROMPT = "what was asked before " * 40
TOLD: dict[str, Any] = {
    "num_blocks": 100,
    "held_blocks": 3,
    "cached_blocks": 40,
    "prompt_tokens": 400,
    "cached_tokens": 100,
    "kv_tiers": {"host": {"stored": 7, "loaded": 5}},
    "prefill_tokens_per_second": 1e5,
}
LIFE: dict[str, Any] = {
    "choice": 0,
    "prompt": 220,
    "cached": 208,
    "output": 9,
    "arrived": 100.0,
    "queue_seconds": 0.5,
    "ttft_seconds": 0.6,
    "total_seconds": 1.0,
    "preemptions": 0,
    "fetches": [{"source": "peer", "tokens": 208, "begin": 100.1, "seconds": 0.4, "moving": 0.1}],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: install Debian's package chromium to run the tests of the router's page")
    one = Chromium(path, tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


@pytest.mark.slow
def test_the_page_shows_who_holds_what_and_where_a_requests_time_went(loop: Loop, browser: Chromium) -> None:
    told = {"told": TOLD, "lives": [LIFE | {"id": "mine"}]}
    servers = [FakeServer(loop, cached=[CachedPrompts("1")], **told) for _ in range(2)]
    with RouterThread(servers) as router:
        names = read_prompt(b'{"prompt": "%b"}' % PROMPT.encode()).hashes
        for one in servers:
            one.cached[0].computed(b"".join(names), [b"x"], lambda block: True)
        router.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "mine"})
        page = browser.open(width=390, dark=True)
        page.go(router.thread.url)
        page.wait("document.querySelectorAll('#map tbody .held').length === 2")
        page.wait("document.querySelector('#map tbody tr').textContent.match(/87 %.*87 %/)")  # both were heard
        assert "3 in use, 40 cached, of 100" in page.text("#caches") and "25.0 %" in page.text("#caches")
        assert "host 7 stored, 5 loaded" in page.text("#caches")
        page.click("#requests button")
        page.wait("document.querySelectorAll('#life .span').length === 6")
        shown = page.text("#life")
        for what in ("router, to", "queue at", "prefill at another engine, 208 tokens", "transfer of its blocks"):
            assert what in shown
        assert "prefill, 12 of 220 tokens" in shown and "decode, 9 tokens" in shown
        left = page.evaluate("[...document.querySelectorAll('#life i')].map((bar) => parseFloat(bar.style.left))")
        assert left[2] < left[3] < left[4] < left[5], "one after the other"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.errors == []
    for one in servers:
        one.stop()


def test_a_life_that_nobody_remembers_is_404_and_one_of_others_servers_has_the_routers_times_alone(loop: Loop) -> None:
    server = FakeServer(loop, quire=False)
    with RouterThread([server]) as router:
        router.http.post("/v1/completions", json={"prompt": "p", "stream": True}, headers={"x-request-id": "a/b"})
        [stay] = router.http.get("/router/requests/a/b").json()["stays"]
        assert 0 <= stay["sent"] <= stay["first"] <= stay["ended"] and stay["choices"] == []
        assert router.http.get("/router/requests/nobody").status_code == 404
    server.stop()
    with RouterThread(api_key=["k", "k2"]) as router:
        other = {"authorization": "Bearer k2"}
        assert router.http.get("/router/requests/x", headers=other).status_code == 403
