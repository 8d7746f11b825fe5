"""Headless Chromium over its debugging pipe: opens a page and tells what it asked for and complained about."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The browser reads commands from descriptor 3 and answers on 4.
_LAUNCHER = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_WIDTHS = "({page: document.documentElement.scrollWidth, window: window.innerWidth})"


def find_chromium() -> str | None:
    """The program, where one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Visit:
    """What happened when a page was opened.

    Attributes:
        requests: URLs that were asked for, that of the page first.
        complaints: errors and messages of the console.
        page_width, window_width: in CSS pixels; a page that is wider than its window scrolls sideways.
        picture: the whole page as PNG.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    page_width: int = 0
    window_width: int = 0
    picture: bytes = b""


class Chromium:
    """A browser without windows, until it is closed.

    Args:
        program: from `find_chromium`.
    """

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._commands = os.pipe()
        self._replies, to_write = os.pipe()
        launcher = [sys.executable, "-S", "-c", _LAUNCHER, str(to_read), str(to_write)]
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        options += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(
            [*launcher, program, *options, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._buffer, self._events = 0, b"", list[dict[str, Any]]()

    def visit(self, path: Path, *, width: int, dark: bool = False, picture: bool = False) -> Visit:
        """Opens a file in a window of some width."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", session, features=scheme)
        self._events.clear()
        self._call("Page.navigate", session, url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())
        found = self._call("Runtime.evaluate", session, expression=_WIDTHS, returnByValue=True)["result"]["value"]
        visit = Visit(page_width=found["page"], window_width=found["window"])
        if picture:
            shot = self._call("Page.captureScreenshot", session, captureBeyondViewport=True)
            visit.picture = base64.b64decode(shot["data"])
        for event in self._events:
            _note(event, visit)
        self._call("Target.closeTarget", targetId=target)
        return visit

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._commands)
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._replies)
        self._folder.cleanup()

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while "id" not in (answer := self._receive()):
            self._events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            got = os.read(self._replies, 1 << 20)
            assert got, "the browser ended"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _note(event: dict[str, Any], visit: Visit) -> None:
    method, about = event["method"], event.get("params", {})
    if method == "Network.requestWillBeSent":
        visit.requests.append(about["request"]["url"])
    elif method == "Log.entryAdded":
        visit.complaints.append(about["entry"]["text"])
    elif method == "Runtime.consoleAPICalled":
        visit.complaints.append(f"console.{about['type']}")
    elif method == "Runtime.exceptionThrown":
        visit.complaints.append(about["exceptionDetails"]["text"])
