"""A report opens without a server, shows the run, and asks nothing of anybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from served_page import ServedPage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]  # a browser


def test_a_report_of_two_runs(served: ServedPage, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    command = [sys.executable, "-m", "stoker", "report", "runs/first", "runs/second", "-o", str(file)]
    subprocess.run([*command, "--language", "en"], cwd=served.base, check=True, capture_output=True)
    context = browser.new_context()
    report = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    report.on("pageerror", lambda error: errors.append(str(error)))
    report.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    report.on("request", lambda request: requests.append(request.url))
    report.goto(file.as_uri())
    expect(report.locator('[data-metric="loss"] canvas')).to_be_visible()
    expect(report.locator('[data-metric="loss"] .legend span')).to_have_count(2)
    report.get_by_role("link", name="first", exact=True).click()
    expect(report.locator(".health")).to_contain_text("rows")
    expect(report.locator("#stop, #resume, #fork, #delete")).to_have_count(0)
    report.get_by_role("link", name="中文").click()
    expect(report.locator("h2").first).to_be_visible()
    expect(report.locator("html")).to_have_attribute("lang", "zh-CN")
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
