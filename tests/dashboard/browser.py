"""A real browser for tests: headless Chromium, driven over its debugging pipe with the standard library alone.

One reader thread hands answers to whoever waits for them and keeps what the page said on its console.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--mute-audio"),
)
ANSWER_S = 30.0


def chromium() -> str | None:
    """The browser on this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A context manager; leaving it ends the browser and removes its profile."""

    def __init__(self, path: str | None = None) -> None:
        found = path or chromium()
        assert found is not None, "no Chromium here"
        self._profile = tempfile.mkdtemp(prefix="meshd-browser-")
        # The browser reads commands from its descriptor 3 and writes answers to 4.
        command_read, self._out = os.pipe()
        self._in, answer_write = os.pipe()
        script = f'exec 3<&{command_read} 4>&{answer_write}; exec "$@"'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "bash",
                found,
                *FLAGS,
                f"--user-data-dir={self._profile}",
                "--remote-debugging-pipe",
            ],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_read)
        os.close(answer_write)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._next = 0
        self.pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._reader.join(10)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def page(self, url: str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> Page:
        """A new tab of that size at ``url``."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        page.send("Page.enable")
        page.send("Runtime.enable")
        page.send("Log.enable")
        page.send("Page.bringToFront")
        page.send("Emulation.setFocusEmulationEnabled", {"enabled": True})
        page.size(width, height)
        page.scheme(dark=dark)
        page.send("Page.navigate", {"url": url})
        return page

    def send(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """One command and its answer."""
        future: Future[Any] = Future()
        with self._lock:
            self._next += 1
            number = self._next
            self._waiting[number] = future
            message = {"id": number, "method": method, "params": params or {}}
            if session is not None:
                message["sessionId"] = session
            os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = future.result(ANSWER_S)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._waiting.pop(message["id"]).set_result(message)
            return
        page = self.pages.get(message.get("sessionId", ""))
        if page is not None:
            page.heard(message["method"], message["params"])


class Page:
    """One tab. ``console``: what it logged; ``dialogs``: the texts of alert, confirm and prompt; ``requests``: what it asked
    for."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.console: list[str] = []
        self.dialogs: list[str] = []

    def send(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return self._browser.send(method, params, self._session)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """An event of the page."""
        if method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(each.get("value", each.get("description"))) for each in params["args"]))

    def size(self, width: int, height: int) -> None:
        """The window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, *, dark: bool) -> None:
        """Light or dark, as the system would say."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"features": [feature]})

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait for an expression to be true; its value."""
        return until(
            lambda: self.js(f"Boolean({expression})"), f"{expression}; console: {self.console[-5:]}", timeout_s
        )

    def text(self, selector: str) -> str:
        """The text of the first match, "" if there is none."""
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """Focus and type as a keyboard would."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", {"text": text})

    def press(self, key: str, code: int) -> None:
        """A key of the keyboard."""
        text = "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                {
                    "type": kind,
                    "key": key,
                    "code": key,
                    "windowsVirtualKeyCode": code,
                    "text": text if kind == "keyDown" else "",
                },
            )

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.send("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._browser.send("Target.closeTarget", {"targetId": self._target})


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Wait for a condition; its value."""
    give_up = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.05)
    return value
