"""A headless Chromium that tests drive over its own pipe, so that no driver package is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BINARY = next((found for name in NAMES if (found := shutil.which(name))), None)
_SECONDS = 60


class Chromium:
    """One page; `problems` holds what console and uncaught exceptions said, `requests` what was fetched."""

    def __init__(self, folder: Path):
        assert BINARY
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads its pipe on descriptor 3 and writes to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
        flags += " --no-first-run --remote-debugging-pipe"
        command = [BINARY, *flags.split(), f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._id, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self._send("Browser.close")
        self._process.wait(timeout=_SECONDS)
        os.close(self._out)
        os.close(self._in)

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> float:
        """Loads a file from the disk and waits until its script is through; returns the seconds that took."""
        self.problems, self.requests = [], []
        self._send("Emulation.setScriptExecutionDisabled", value=not scripts)
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **window)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        start = time.monotonic()
        self._send("Page.navigate", url=path.absolute().as_uri())
        ready = "document.documentElement?.dataset.ready"
        while True:
            state = self(f"document.readyState + location.protocol + ({ready} || '')")
            if state == ("completefile:true" if scripts else "completefile:"):
                return time.monotonic() - start
            assert time.monotonic() - start < _SECONDS, (state, self.problems)
            time.sleep(0.05)

    def __call__(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key on the focused element."""
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key)

    def move(self, x: float, y: float) -> None:
        """The mouse, in pixels of the window."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """The window as a PNG."""
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._id += 1
        session = {"sessionId": self._session} if self._session else {}
        command = json.dumps({"id": self._id, "method": method, "params": parameters, **session})
        os.write(self._out, command.encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._id:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.problems.append(json.dumps(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
