"""Headless Chromium for tests, controlled through two pipes, without a driver and without a port."""

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
# Chromium reads its commands from descriptor 3 and writes its answers to 4.
START = """
import fcntl, os, sys
command_fd, answer_fd = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(command_fd, 3), os.dup2(answer_fd, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
TIMEOUT = 60.0  # seconds to wait for a message


class Browser:
    """Chromium with one tab; its console messages and the URLs of its requests are recorded.

    Args:
        folder: of the browser profile.
    """

    def __init__(self, folder: Path) -> None:
        command_fd, self._command_fd = os.pipe()
        self._answer_fd, answer_fd = os.pipe()
        command = [
            sys.executable,
            "-c",
            START,
            str(command_fd),
            str(answer_fd),
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={folder}",
        ]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(command_fd, answer_fd),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_fd)
        os.close(answer_fd)
        self._last_id, self._buffer, self._session = 0, b"", ""
        self.console_messages: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        (tab,) = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol, and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(self, page: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Open a file in a window of the given size and color scheme (light or dark), and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        assert "errorText" not in self.call("Page.navigate", url=page.absolute().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """Write a PNG screenshot of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """End the browser process."""
        os.close(self._command_fd)  # Chromium exits when this pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answer_fd)

    def _next(self) -> dict[str, Any]:
        """Return the next message, an event or an answer; record requests and console messages."""
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            if not select.select([self._answer_fd], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answer_fd, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        event, params = message.get("method", ""), message.get("params", {})
        self._events.append(event)
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Log.entryAdded":
            self.console_messages.append(params["entry"]["text"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.console_messages.append(json.dumps(params))
        return message
