"""The page keeps its budgets of bytes; its times depend on the machine, and `benchmarks/page.py` prints them."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser
from served_page import ServedPage

from page import POINTS, make_long_run, measured

MOST_BYTES = 250_000

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]  # a run of 200,000 steps


def test_budgets(tmp_path: Path, browser: Browser) -> None:
    make_long_run(tmp_path / "runs/long", POINTS)
    served = ServedPage(tmp_path)
    try:
        found = measured(browser, served, "long")
    finally:
        served.stop()
    assert found.transferred < MOST_BYTES
    assert found.transferred_all < 2 * MOST_BYTES
    assert 0 < found.first_paint <= found.first_view
    assert found.curve_again > 0 and found.zoom_work > 0
