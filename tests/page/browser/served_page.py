"""A real `stoker ui` in folders of its own, and a browser that looks at it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox"]  # tests run as root in containers
IMAGES = Path(__file__).parents[3] / "docs/images"
SCREENSHOTS = "STOKER_SCREENSHOTS"  # set to 1 in the environment, the tests write docs/images
PATIENCE = 120_000  # ms for what the server computes in a process of its own
JOB = """\
# A job for the tests of the page.
task: sft
model: llama-3m
data: data/sums.jsonl
tune: lora
steps: 12
train:
  batch: 4
  seq_len: 64
evaluate:
  fraction: 0.2
  every: 4
  samples: 2
"""
TRAINING = 480_000  # ms for a small run on a busy machine


@dataclass
class ServedPage:
    """A `stoker ui` process.

    Attributes:
        base: the folder it was started in, with ``runs`` and ``data`` below.
    """

    base: Path
    options: list[str] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        for name in ("runs", "data"):
            (self.base / name).mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Starts the process, on the same port as before where there was one."""
        command = [sys.executable, "-m", "stoker", "ui", "--port", str(self.port), "--state", "state"]
        command += ["--runs", "runs", "--data", "data", *self.options]
        log = (self.base / "ui.log").open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=self.base, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + PATIENCE / 1000
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)", self.log())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.1)
        self.port = int(found[1])

    def log(self) -> str:
        """What the process has printed."""
        return (self.base / "ui.log").read_text()

    def stop(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.port}/"


@dataclass
class View:
    """A tab of the browser, in which every click is counted and no error of a script goes unseen."""

    served: ServedPage
    browser: Browser
    options: dict[str, Any] = field(default_factory=dict)
    clicks: int = 0

    def __post_init__(self) -> None:
        self.context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **self.options})
        self.context.set_default_timeout(PATIENCE)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str = "") -> Page:
        """Goes to an address of the page."""
        self.page.goto(self.served.url + address)
        expect(self.page.locator("#main")).to_be_visible()
        expect(self.page.locator("#app > :not(.skip, .shell:has(#main), #main)")).to_have_count(0)  # the first frame
        return self.page

    def click(self, what: str) -> None:
        """Clicks, and counts it."""
        self.page.locator(what).click()
        self.clicks += 1

    def shot(self, name: str) -> None:
        """A picture for the docs, where they are asked for."""
        if os.environ.get(SCREENSHOTS) == "1":
            IMAGES.mkdir(exist_ok=True)
            self.page.screenshot(path=IMAGES / f"{name}.png", animations="disabled")

    def shots(self, name: str, part: str = "") -> None:
        """A picture in each language, where they are asked for, of the page from ``part`` on; then English again."""
        if os.environ.get(SCREENSHOTS) != "1":
            return
        for language in ("zh", "en"):
            self.page.locator(f".languages a[lang={language}]").click()
            expect(self.page.locator(f".languages a[lang={language}]")).to_have_attribute("aria-current", "true")
            expect(self.page.locator(".waiting")).to_have_count(0, timeout=TRAINING)
            if part:
                self.page.locator(part).first.evaluate("(node) => { node.scrollIntoView(); scrollBy(0, -16); }")
            self.page.mouse.move(2, 400)
            self.page.wait_for_timeout(500)  # a curve is drawn after its numbers are there
            self.shot(f"{name}-{language}")

    def close(self) -> None:
        """Closes the tab; raises where a script failed or something was asked of another host."""
        self.context.close()
        elsewhere = [url for url in self.requests if not url.startswith((self.served.url, "data:", "blob:"))]
        assert not self.errors, self.errors
        assert not elsewhere, elsewhere


def rows(path: Path, count: int = 60) -> Path:
    """Questions with answers."""
    lines = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}."} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_id(view: View, name: str) -> str:
    """The id of a run; the server looks for new runs once a second."""
    asked = "async (name) => (await (await fetch('/api/runs')).json()).runs.find((run) => run.name === name)?.id"
    return str(view.page.wait_for_function(asked, arg=name).json_value())


def write_job(view: View, yaml: str = JOB, name: str = "third") -> Page:
    """Makes a job the one at hand, as picking a recipe and typing it would."""
    page = view.open("#/start?lang=en")
    page.evaluate("([yaml, name]) => localStorage.setItem('stoker.page', JSON.stringify({yaml, name}))", [yaml, name])
    page.reload()
    return page
