"""A run is deployed, asked through a key, counted, and retired, while the page is killed and started again."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Locator, Page, expect
from served_page import TRAINING, ServedPage, View, run_id

from stoker.page.processes.detached_process import DetachedProcess

# A browser, and servers of models.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]


@pytest.fixture
def own(tmp_path: Path, served: ServedPage) -> Iterator[ServedPage]:
    """A page with two LoRA runs over one base; servers that are left are ended."""
    page = ServedPage(tmp_path / "own")
    for name in ("data", "runs/first", "runs/second"):
        shutil.copytree(served.base / name, page.base / name, dirs_exist_ok=True)
    yield page
    page.stop()
    for place in (page.base / "state/servers").glob("*"):
        DetachedProcess(place).stop(signal.SIGKILL)


def open_tab(own: ServedPage, view: View, run: str) -> Page:
    view.open("#/train?lang=en")
    return view.open(f"#/use/{run_id(view, run)}/deploy?lang=en")


def deploy(page: Page, name: str) -> Locator:
    """Serves the run at hand on a server of its own, and waits until it answers."""
    page.locator("#served-name").fill(name)
    page.locator("#deploy").click()
    panel = page.locator("[data-server]")
    expect(panel.locator("h2 .status")).to_have_text("running", timeout=TRAINING)
    return panel


def ask(address: str, key: str, model: str) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "What is 2 plus 2?"}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{address}/chat/completions", json=body, headers=headers, timeout=120)


def test_a_run_is_deployed_asked_counted_and_retired(own: ServedPage, open_view: Callable[..., View]) -> None:
    view = open_view(own)
    page = open_tab(own, view, "first")
    panel = deploy(page, "sums")
    panel.get_by_label("Name of the key").fill("shop")
    panel.get_by_role("button", name="Make a key", exact=True).click()
    key = panel.locator('[data-key="shop"]').inner_text()
    address = panel.locator(".hint code").inner_text()
    own.stop()  # killed; the server goes on
    assert ask(address, key, "sums").status_code == 200
    assert ask(address, "wrong" * 8, "sums").status_code == 401
    own.start()
    page = open_tab(own, view, "first")
    count = panel.locator('[data-answers="shop"]')
    expect(count).to_have_text("1", timeout=TRAINING)
    assert ask(address, key, "sums").status_code == 200
    expect(count).to_have_text("2")  # without a reload
    view.shots("deploy", "[data-server]")

    page = open_tab(own, view, "second")  # another adapter, over the same base
    page.locator("#served-where").select_option(index=1)
    page.locator("#served-name").fill("more")
    page.locator("#deploy").click()
    expect(panel.get_by_role("button", name="Retire more", exact=True)).to_be_visible(timeout=TRAINING)
    assert ask(address, key, "more").status_code == 200
    panel.get_by_role("button", name="Retire sums", exact=True).click()
    models = panel.get_by_role("group", name="Models", exact=True)
    expect(models.get_by_role("cell", name="sums", exact=True)).to_have_count(0, timeout=TRAINING)
    assert ask(address, key, "sums").status_code == 404
    assert ask(address, key, "more").status_code == 200

    panel.get_by_role("button", name="Revoke shop", exact=True).click()
    expect(panel.get_by_text("No caller has a key yet.")).to_be_visible()
    assert ask(address, key, "more").status_code == 401
    panel.get_by_role("button", name="Stop the server", exact=True).click()
    panel.get_by_role("button", name="Yes, stop it", exact=True).click()
    expect(panel.locator("h2 .status")).to_have_text("stopped", timeout=TRAINING)
    with pytest.raises(httpx2.ConnectError):
        ask(address, key, "more")
    panel.get_by_role("button", name="Start again", exact=True).click()
    expect(panel.locator("h2 .status")).to_have_text("running", timeout=TRAINING)
    expect(panel.locator(".hint code")).to_have_text(address)
    expect(panel.locator("h2")).to_have_text(re.compile("^more"))


def test_what_cannot_be_served_says_why(own: ServedPage, open_view: Callable[..., View]) -> None:
    shutil.rmtree(own.base / "runs/second/checkpoints")
    page = open_tab(own, open_view(own), "second")
    page.locator("#deploy").click()
    panel = page.locator("[data-server]")
    expect(panel.locator("h2 .status")).to_have_text("failed", timeout=TRAINING)
    expect(panel.get_by_role("alert")).to_contain_text("checkpoint")
    panel.get_by_role("button", name="Take off the list", exact=True).click()
    expect(page.get_by_text("No server was started yet.")).to_be_visible()
