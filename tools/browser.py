"""Chromium, driven through its own protocol: a page is opened, asked, and photographed."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A headless Chromium with one page. `errors` is what its console said that is no good news.

    RuntimeError where an answer does not come, or the page's code fails.
    """

    def __init__(self, seconds=60):
        self.seconds, self.errors, self.number, self.unread = seconds, [], 0, b""
        self.folder = tempfile.mkdtemp()
        to_browser, self.to_browser = os.pipe()
        self.from_browser, from_browser = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
        flags += ["--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={self.folder}"]
        # It reads commands from file 3 and writes answers to file 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, EXECUTABLE, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.session = None
        attached = self.call("Target.attachToTarget", targetId=self.first_page(), flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
        shutil.rmtree(self.folder, ignore_errors=True)

    def first_page(self):
        """Its id. A slow browser answers before it has opened it."""
        until = time.monotonic() + self.seconds
        while True:
            for target in self.call("Target.getTargets")["targetInfos"]:
                if target["type"] == "page":
                    return target["targetId"]
            if time.monotonic() > until:
                raise RuntimeError(f"no page of {EXECUTABLE} in {self.seconds} seconds")
            time.sleep(0.1)

    def call(self, method, **params):
        """The result of a command of Chromium's protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.seconds
        while True:
            answer = self.read(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def read(self, until):
        """The next message. What a console has to complain of is kept in `errors`."""
        while b"\0" not in self.unread:
            if not select.select([self.from_browser], [], [], max(0, until - time.monotonic()))[0]:
                raise RuntimeError(f"no answer of {EXECUTABLE} in {self.seconds} seconds")
            part = os.read(self.from_browser, 1 << 20)
            if not part:
                raise RuntimeError(f"{EXECUTABLE} has ended")
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error"):
            self.errors.append(str(params["args"]))
        return message

    def open(self, address):
        """Opens a page, and waits until it is loaded."""
        self.call("Page.navigate", url="about:blank")  # else another #part of it loads nothing
        self.call("Page.navigate", url=address)
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' && location.href !== "
            "'about:blank' ? done() : addEventListener('load', () => done()))"
        )

    def evaluate(self, code):
        """The value of an expression of JavaScript in the page; of a promise, what it becomes."""
        flags = dict(returnByValue=True, awaitPromise=True, userGesture=True)
        found = self.call("Runtime.evaluate", expression=code, **flags)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def press(self, key, text=""):
        """Presses a key, such as Tab; text: what it writes."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
        code = dict(key=key, code="Space" if key == " " else key, windowsVirtualKeyCode=codes[key])
        down = dict(text=text) if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def look(self, width, height, dark=False, language="en-US", scale=1):
        """Sets the window's size in CSS pixels, and what the visitor's system has; then open."""
        size = dict(width=width, height=height, deviceScaleFactor=scale, mobile=width < 500)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])
        agent = self.call("Runtime.evaluate", expression="navigator.userAgent")["result"]["value"]
        self.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)

    def photograph(self, whole=False):
        """A PNG of what is in view, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])
