"""A real browser for tests: headless Chromium, spoken to through two pipes, without a driver and without a port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
MISSING = "there is no Chromium on this machine: apt-get install chromium"
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
]  # fmt: skip
# Chromium reads its commands from descriptor 3 and answers on 4.
START = """
import fcntl, os, sys
asked, answered = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(asked, 3), os.dup2(answered, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0  # seconds for an answer


class Browser:
    """Chromium with one tab; what it says on the console and what it asks for is kept.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        asked, self._ask = os.pipe()
        self._answers, answered = os.pipe()
        command = [sys.executable, "-c", START, str(asked), str(answered), PROGRAM, *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], pass_fds=(asked, answered), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(asked)
        os.close(answered)
        self._number, self._read, self._session = 0, b"", ""
        self.said: list[str] = []
        self.requests: list[str] = []
        self._seen: list[str] = []
        (tab,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(self, page: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Show a file in a window of some size, in the light or the dark scheme, and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._seen.clear()
        assert "errorText" not in self.call("Page.navigate", url=page.absolute().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._next()

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> Path:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """End it."""
        os.close(self._ask)  # which it takes as a wish to go
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)

    def _next(self) -> dict[str, Any]:
        """Return the next message, an event or an answer; keep what events tell."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._read:
            if not select.select([self._answers], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser is gone"
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        event, told = message.get("method", ""), message.get("params", {})
        self._seen.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Log.entryAdded":
            self.said.append(told["entry"]["text"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(told))
        return message
