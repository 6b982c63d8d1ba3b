"""Draw the pictures of README.md and docs/ from what there is today: `make pictures`.

usage: python scripts/draw_pictures.py [demo] [chat] [live]

`demo.svg` is what `make demo` shows at its end. `chat.webp` and `live-view.webp` are the page of a real server with the
embedded model, in a headless Chromium. Texts come from seeds, so they are the same each time; times are the machine's.
"""

from __future__ import annotations

import inspect
import io
import itertools
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire import LLM
from quire.cli.generate import DEMO_PROMPTS, DEMO_SAMPLING
from quire.cli.inputs import text_jobs
from quire.cli.report import closing_rows
from quire.cli.views import Panels, ProgressBar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.chromium import Chromium, Page, find_chromium  # noqa: E402
from tests.http_tools import ServeProcess  # noqa: E402

DOCS = ROOT / "docs"
SCALE = 1.5
"""Pixels of a picture to one of the page, so that text is sharp on most screens."""
QUALITY = 75
"""Of WebP, at which text shows no traces of it."""
READY = "document.querySelector('#send') && !document.querySelector('#send').disabled"
ENDED = "document.querySelectorAll('.message').length === {} && !document.querySelector('.message.running')"


def main(names: list[str]) -> None:
    """Draw those, or all."""
    for name in names or PICTURES:
        path = PICTURES[name]()
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size:,} bytes")


# -- the terminal -------------------------------------------------------------------------------------------------


def draw_demo() -> Path:
    """Complete the demo's prompts, and draw the last picture with the closing table under it."""
    jobs = text_jobs(DEMO_PROMPTS, DEMO_SAMPLING, chat=False)
    console = Console(record=True, width=96, height=34, file=io.StringIO(), force_terminal=True)
    panels = Panels(jobs, console, ProgressBar(jobs, console))
    with LLM("demo", threads=1) as llm:
        begun = time.monotonic()
        index_of = {llm.add_request(job.prompt, job.params): index for index, job in enumerate(jobs)}
        ended = []
        while not llm.idle:
            for output in llm.step():
                panels.take(index_of[output.request_id], output)
                ended += [output] if output.finished else []
        rows = closing_rows(ended, llm.stats, time.monotonic() - begun)
    console.print(panels.picture())
    table = Table(show_header=False, border_style="dim")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    svg = console.export_svg(title="make demo")
    path = DOCS / "demo.svg"
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")  # no fonts from elsewhere
    return path


# -- the page -----------------------------------------------------------------------------------------------------


@contextmanager
def opened(width: int, height: int, view: str) -> Iterator[tuple[Page, ServeProcess]]:
    """A view of the page of a server."""
    path = find_chromium()
    if path is None:
        sys.exit("no Chromium here: install Debian's package chromium to draw the page")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        ServeProcess("--tool-format", "hermes") as server,
    ):
        browser = Chromium(path, Path(profile))
        try:
            page = browser.open(width, height)
            resize(page, width, height)
            page.go(f"{server.url}/#{view}")
            page.wait(READY)
            yield page, server
        finally:
            browser.close()


def resize(page: Page, width: int, height: int) -> None:
    size = {"width": width, "height": height, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=SCALE)


def draw_chat() -> Path:
    """A conversation in which a tool is called, with the tools beside it."""
    with opened(1280, 800, "chat") as (page, _):
        page.click(".composer [data-value=completion]")
        say(page, "class Stack:\n    def push(self, item):\n", 2, 1)
        page.click(".side .new")
        page.click(".composer [data-value=chat]")
        say(page, "Write a function that adjusts the words of a sentence.", 4, 2)
        page.evaluate("[...document.querySelectorAll('.settings details')].at(-1).open = true")
        page.evaluate("[...document.querySelectorAll('.settings .link')].at(-1).click()")  # the example of a tool
        choice = "document.querySelector('[data-name=toolChoice]')"
        page.evaluate(f"{choice}.value = 'function:weather'; {choice}.dispatchEvent(new Event('change'))")
        say(page, "How warm is it in Rome?", 10, 4)
        page.type(".tool-result textarea", '{"temperature": 21, "sky": "clear"}')
        page.evaluate("document.querySelector('[data-name=tools]').scrollTop = 0; document.activeElement.blur()")
        page.evaluate("document.querySelector('.settings').scrollTop = 9999")
        page.evaluate("document.querySelector('.scroller').scrollTop = 9999")
        return picture(page, "chat.webp")


def say(page: Page, text: str, seed: int, messages: int) -> None:
    """Send it, and wait for the answer that makes so many messages."""
    page.type("[data-name=seed]", str(seed))
    page.type("[data-name=max_tokens]", "96")
    page.type("#prompt", text)
    page.click("#send")
    page.wait(ENDED.format(messages))


def draw_live() -> Path:
    """The live view, down to where one request's times begin, while eight clients write."""
    with opened(1280, 1400, "live") as (page, server):
        ended = threading.Event()
        threads = [threading.Thread(target=write, args=(server, number, ended)) for number in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(12)  # the timeline shows ten seconds
        page.wait("document.querySelectorAll('#requests tbody tr').length >= 5")
        for _ in range(2):  # what is above moves when the window's height does
            resize(page, 1280, int(page.evaluate("document.querySelector('#waterfall').getBoundingClientRect().top")))
            time.sleep(0.7)
        path = picture(page, "live-view.webp")
        ended.set()
        for thread in threads:
            thread.join()
        return path


def write(server: ServeProcess, client: int, ended: threading.Event) -> None:
    """Request after request: one of three long beginnings, and lines that some of the others have."""
    text = inspect.getsource(textwrap)
    for number in itertools.count():
        if ended.is_set():
            return
        head = text[(start := 2500 * (number * client % 3)) : start + 1200]
        tail = text[(start := 700 * (number % 8)) : start + 60 * (client + 2)]
        body: dict[str, Any] = {"model": "demo", "max_tokens": 40 + 30 * ((client + number) % 5), "seed": number}
        server.json("/v1/completions", body | {"prompt": head + tail})


def picture(page: Page, name: str) -> Path:
    path = DOCS / name
    page.screenshot(path, "webp", QUALITY)
    return path


PICTURES: dict[str, Callable[[], Path]] = {"demo": draw_demo, "chat": draw_chat, "live": draw_live}

if __name__ == "__main__":
    main(sys.argv[1:])
