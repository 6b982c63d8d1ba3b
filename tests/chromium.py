"""Drives a headless Chromium for the page's tests, over the DevTools protocol on a pipe: no port, no other library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import os, sys
read, write = int(sys.argv[1]), int(sys.argv[2])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class PageError(Exception):
    """The browser refused a command, the page threw, or something awaited did not come."""


class Chromium:
    """One browser process. `close` ends it and its children.

    Args:
        profile: an empty folder for its files.
    """

    def __init__(self, path: str, profile: Path) -> None:
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        inherited = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (child_read, child_write)]
        command = [sys.executable, "-c", LAUNCH, *map(str, inherited), path, *FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (child_read, child_write, *inherited):
            os.close(descriptor)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._targets: dict[str, str] = {}  # of each page, by its session
        self._free: list[str] = []
        self._lock = threading.Lock()
        self._number = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def open(self, width: int = 1280, height: int = 800, *, dark: bool = False, touch: bool = False) -> Page:
        """A fresh page, in a tab that is empty: a new one costs a process, and more than what most tests do with it.
        All pages that are open at once share what they store."""
        target = self._free.pop() if self._free else self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        self._targets[session] = target
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        return page

    def close_pages(self) -> None:
        """Empty all tabs, and forget what their pages stored, did and asked for."""
        for session, page in self._pages.items():
            page.leave()
            self.call("Target.detachFromTarget", sessionId=session)
            self._free.append(self._targets.pop(session))
        self._pages.clear()

    def call(self, method: str, session: str | None = None, deadline: float = 60.0, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        with self._lock:
            self._number += 1
            number = self._number
            answers = self._answers[number] = queue.Queue()
            message = {"id": number, "method": method, "params": params}
            if session:
                message["sessionId"] = session
            data = json.dumps(message).encode() + b"\0"
            while data:
                data = data[os.write(self._write, data) :]
        try:
            answer = answers.get(timeout=deadline)
        except queue.Empty:
            raise PageError(f"no answer to {method} in {deadline} s") from None
        if "error" in answer:
            raise PageError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer.get("result", {})
        return result

    def _receive(self) -> None:
        rest = b""
        while data := os.read(self._read, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for raw in messages:
                message = json.loads(raw)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.heard(message["method"], message["params"])
        for waiting in list(self._answers.values()):
            waiting.put({"error": {"message": "the browser has ended"}})

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)


class Page:
    """One page.

    Attributes:
        errors: what the page logged as an error or threw.
        urls: of every request that it made.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.urls: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def leave(self) -> None:
        """Show nothing, and keep nothing."""
        with contextlib.suppress(PageError):  # it has no storage if it has shown nothing
            self.evaluate("sessionStorage.clear()")
        self.go("about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.resetNavigationHistory")
        for origin in {"/".join(url.split("/")[:3]) for url in self.urls if url.startswith("http")}:
            self.call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited if it is a promise)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(f"{expression}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait(self, expression: str, deadline: float = 40.0) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + deadline
        while True:
            try:
                if self.evaluate(f"Boolean({expression})"):
                    return
                problem = ""
            except PageError as error:  # the page may be between two documents
                problem = str(error)
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText.slice(0, 600)")
                raise PageError(f"not true in {deadline} s: {expression} {problem}\nerrors: {self.errors}\n{text}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Put `text` into a field, as typing does."""
        field = f"document.querySelector({json.dumps(selector)})"
        event = "new Event('input', {bubbles: true})"
        self.evaluate(f"{field}.value = {json.dumps(text)}; {field}.dispatchEvent({event}); 0")

    def screenshot(self, path: Path, format: str = "png", quality: int | None = None) -> None:
        """`quality`: of jpeg and webp, to 100."""
        chosen = {"format": format} | ({} if quality is None else {"quality": quality})
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **chosen)["data"]))
