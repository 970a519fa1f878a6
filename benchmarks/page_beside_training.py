"""What an open page costs a run that trains on the same machine: the server's part and the browser's, one by one.

One real training goes on all the time. Beside it windows of some seconds alternate: nobody looks; a client asks of the
page what a browser asks (the stream, and what it makes the page ask again) and draws nothing; Chromium shows the run.
The seconds of the steps in each window are compared with those of the windows before and after it in which nobody
looked, so that what else the machine does meanwhile is on both sides.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from playwright.sync_api import Browser

WINDOW = 6.0  # seconds
SETTLED = 2.0  # of them at the beginning that do not count: the page is being opened, or closed
CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "seconds", "memory_gib", "effective")
DRIVER = "playwright"  # in the command line of what starts the browser
EVERY, EVERY_DETAIL = 2.0, 5.0  # seconds between two questions of the page for curves, for the rest of the run
JOB = """\
task: sft
model: llama-3m
data: rows.jsonl
steps: 1000000
train: {batch: 4, seq_len: 128}
checkpoint: {every: 1000000}
"""


@dataclass(frozen=True)
class Beside:
    """What a page that is looked at costs.

    Attributes:
        pairs: windows with the page, each compared with those around it without.
        ratio: seconds of a step with the page over those without, median of the pairs.
        low, high: a quarter of the pairs is below, above.
        server: CPU seconds of `stoker ui` for each second.
        looker: the same of the client, or of all processes of the browser.
    """

    pairs: int
    ratio: float
    low: float
    high: float
    server: float
    looker: float


@dataclass(frozen=True)
class _Window:
    step: float  # median seconds
    server: float
    looker: float


def make_job(base: Path) -> None:
    """The job and its rows."""
    rows = [{"prompt": f"What is {i} plus {i}?", "completion": f"It is {2 * i}."} for i in range(400)]
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "job.yaml").write_text(JOB)


@contextmanager
def training(base: Path) -> Iterator[Path]:
    """A run that trains as long as the block, in a process of its own; its file of metrics."""
    command = [sys.executable, "-m", "stoker", "train", "job.yaml", "output=runs/beside"]
    with (base / "train.log").open("w") as log, subprocess.Popen(command, cwd=base, stdout=log, stderr=log) as process:
        metrics = base / "runs/beside/metrics.jsonl"
        try:
            until = time.monotonic() + 120
            while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 50:
                assert process.poll() is None and time.monotonic() < until, (base / "train.log").read_text()
                time.sleep(0.2)
            yield metrics
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a process and of those below it that live."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def window(metrics: Path, server: psutil.Process, looker: Callable[[], float]) -> _Window:
    """What happens within a window, after it has settled."""
    time.sleep(SETTLED)
    begin, offset = time.monotonic(), metrics.stat().st_size
    before = cpu_of(server), looker()
    time.sleep(WINDOW - SETTLED)
    took = time.monotonic() - begin
    after = cpu_of(server), looker()
    with metrics.open("rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")[1:-1]
    seconds = [json.loads(line)["seconds"] for line in lines]
    return _Window(statistics.median(seconds), (after[0] - before[0]) / took, (after[1] - before[1]) / took)


@contextmanager
def follower(url: str, run: str) -> Iterator[Callable[[], float]]:
    """A client that follows a run as the page does; gives its CPU seconds so far."""
    ended = threading.Event()
    path = f"{url}api/runs/{run}"
    asked = [0.0]  # when the run was asked for last

    def ask(client: httpx2.Client) -> None:
        client.get(f"{path}/metrics", params={"keys": ",".join(CURVES), "axis": "step", "points": 800})
        if time.monotonic() - asked[0] >= EVERY_DETAIL:
            client.get(path)
            asked[0] = time.monotonic()

    def follow() -> None:
        with httpx2.Client(timeout=30) as client, httpx2.Client(timeout=30) as other:
            client.get(f"{url}api/me")
            ask(client)
            last = time.monotonic()
            with other.stream("GET", f"{path}/stream") as answer:
                for _ in answer.iter_raw():
                    if ended.is_set():
                        return
                    if time.monotonic() - last >= EVERY:
                        ask(client)
                        last = time.monotonic()

    thread = threading.Thread(target=follow)
    thread.start()
    yield time.process_time
    ended.set()
    thread.join()


@contextmanager
def browsing(browser: Browser, url: str, run: str) -> Iterator[Callable[[], float]]:
    """A tab that shows a run; gives the CPU seconds of the whole browser so far."""
    page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
    page.goto(f"{url}#/train/{run}")
    page.locator('[data-metric="loss"] canvas').wait_for()
    yield lambda: sum(cpu_of(each) for each in psutil.Process().children() if DRIVER in " ".join(each.cmdline()))
    page.context.close()


def beside(base: Path, served: Any, browser: Browser, pairs: int) -> dict[str, Beside]:
    """The cost of a page that a client follows, and of one that a browser shows."""
    make_job(base)
    with training(base) as metrics:
        found = httpx2.get(f"{served.url}api/runs").json()["runs"]
        run = next(each["id"] for each in found if each["name"] == "beside")
        server = psutil.Process(served.process.pid)
        kinds = {
            "client": lambda: follower(served.url, run),
            "browser": lambda: browsing(browser, served.url, run),
        }
        return {name: _compared(metrics, server, look, pairs) for name, look in kinds.items()}


def _compared(metrics: Path, server: psutil.Process, look: Callable[[], Any], pairs: int) -> Beside:
    alone = [window(metrics, server, lambda: 0.0)]
    ratios, opened = [], []
    for _ in range(pairs):
        with look() as looker:
            opened.append(window(metrics, server, looker))
        alone.append(window(metrics, server, lambda: 0.0))
        ratios.append(2 * opened[-1].step / (alone[-1].step + alone[-2].step))
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return Beside(
        pairs=pairs,
        ratio=ratio,
        low=low,
        high=high,
        server=statistics.median(each.server for each in opened),
        looker=statistics.median(each.looker for each in opened),
    )
