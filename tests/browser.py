"""A real browser for tests of pages. Where there is no Chromium they are skipped.

Chromium is driven through its own pipe (``--remote-debugging-pipe``: JSON messages, each ended by a zero byte), so no
package is needed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 30

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None, reason="no Chromium on this machine: `apt-get install -y chromium` installs it on Debian"
)


class Browser:
    """A headless Chromium with one page; ``heard`` holds what it complained of, ``requests`` what it loaded."""

    def __init__(self, profile: Path, dark: bool = False) -> None:
        assert EXECUTABLE is not None
        ours, theirs = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        # The shell puts the pipes at the numbers that Chromium reads and writes.
        command = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        arguments = [EXECUTABLE, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._rest, self._number, self._session = b"", 0, ""
        self.heard: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.size(1440, 900)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command -> its result; what else is heard meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium says nothing for {SECONDS} s"
            part = os.read(self._from, 1 << 20)
            assert part, f"Chromium has ended: {self._process.poll()}"
            self._rest += part
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.heard.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.heard.append(json.dumps(parameters["args"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.heard.append(json.dumps(parameters["entry"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        page = json.dumps(url.split("#")[0])  # a page may change its own fragment
        self.wait(f"document.readyState === 'complete' && location.href.split('#')[0] === {page}")

    def wait(self, expression: str) -> None:
        """Until an expression holds: some events come a moment later."""
        until = time.monotonic() + SECONDS
        while not self.ask(expression):
            assert time.monotonic() < until, f"never: {expression}"
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, *keys: str) -> None:
        """Keys by name: ``/``, ``Tab``, ``ArrowRight``, ``Enter``, ``Escape``."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "/": 191}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for key in keys:
            text = {"text": key} if key == "/" else {"text": "\r"} if key == "Enter" else {}
            what = {"key": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", type="keyDown", **what, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    def click(self, selector: str) -> None:
        where = f"document.querySelector({json.dumps(selector)})"
        box = self.ask(
            f"(() => {{ const n = {where}; n.scrollIntoView({{block: 'center'}}); "
            "const b = n.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)


def count(browser: Browser, selector: str) -> int:
    return int(browser.ask(f"document.querySelectorAll({json.dumps(selector)}).length"))


def words(browser: Browser, selector: str) -> str:
    return str(browser.ask(f"document.querySelector({json.dumps(selector)}).textContent"))


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.ask(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"
    )
    return found
