"""One browser and one `stoker ui` for all tests here, with two small runs that were really trained."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from served_page import ARGUMENTS, CHROMIUM, JOB, PATIENCE, ServedPage, View, rows

from warm_process import warm_processes


@pytest.fixture(scope="module")  # its loop runs as long as it does, and other tests cannot start one then
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, stoker_cache: None) -> Iterator[ServedPage]:
    """A page with the runs ``first`` and ``second``, which differ in their learning rate."""
    base = tmp_path_factory.mktemp("page")
    with warm_processes():
        page = ServedPage(base)
        rows(base / "data/sums.jsonl")
        (base / "job.yaml").write_text(JOB)
        for name, rate in (("first", "1e-3"), ("second", "2e-3")):
            command = [sys.executable, "-m", "stoker", "train", "job.yaml", f"output=runs/{name}", f"train.lr={rate}"]
            subprocess.run(command, cwd=base, check=True, capture_output=True)
    yield page
    page.stop()


@pytest.fixture
def view(served: ServedPage, browser: Browser) -> Iterator[View]:
    """A tab of its own."""
    found = View(served, browser)
    yield found
    found.close()


@pytest.fixture
def open_view(browser: Browser) -> Iterator[Callable[..., View]]:
    """Opens further tabs, with options of Playwright's contexts."""
    opened: list[View] = []

    def make(served: ServedPage, **options: Any) -> View:
        opened.append(View(served, browser, options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
