"""Lists of hundreds of runs, long names, and runs with more marks than a curve has pixels for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browsing import make_run
from playwright.sync_api import expect
from served_page import ServedPage, View

# A browser, and a page in a process of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]

LONG = "x" * 240


@pytest.fixture
def many(tmp_path: Path) -> Iterator[ServedPage]:
    """A page over 210 runs, of which one has a long name and one 400 saves."""
    own = ServedPage(tmp_path / "own")
    for i in range(208):
        make_run(own.base / f"runs/sweep-{i:03d}")
    make_run(own.base / f"runs/{LONG}")
    saved = make_run(own.base / "runs/saved", steps=400)
    with (saved / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 1.0, "event": "saved", "step": i}) + "\n" for i in range(1, 401))
    yield own
    own.stop()


def test_many_runs_with_long_names(many: ServedPage, open_view: Callable[..., View]) -> None:
    page = open_view(many).open("#/train?lang=en")
    page.locator("#find-run").fill("xxx")
    row = page.get_by_role("row", name=LONG)
    expect(row.get_by_text("done")).to_be_in_viewport(ratio=1)
    page.locator("#find-run").fill("saved")
    page.get_by_role("link", name="saved", exact=True).click()
    plot = page.locator('[data-metric="loss"] .plot')
    expect(plot.locator("canvas")).to_be_visible()
    plot.focus()
    plot.press("+")
    page.wait_for_url("**zoom=**")
    page.locator(".rail a", has_text="Train").click()
    expect(page.locator("#find-run")).to_have_value("saved")
    page.locator("#find-run").fill("sweep-000")
    page.get_by_role("link", name="sweep-000").click()
    expect(page.locator('[data-metric="loss"] canvas')).to_be_visible()
    assert "zoom" not in page.url
    page.go_back()
    expect(page.locator("#find-run")).to_have_value("sweep-000")


def test_runs_to_compare_are_found(many: ServedPage, open_view: Callable[..., View]) -> None:
    page = open_view(many).open("#/compare?lang=en")
    expect(page.get_by_text("10 more runs")).to_be_visible()
    for name in ("sweep-000", "xxx"):
        page.locator("#find-run").fill(name)
        found = page.locator("input[id^=pick-]")
        expect(found).to_have_count(1)
        found.check()
    page.get_by_role("link", name="Differences of the jobs").click()
    expect(page.get_by_role("columnheader", name="sweep-000")).to_be_in_viewport(ratio=1)
