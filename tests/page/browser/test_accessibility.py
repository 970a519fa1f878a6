"""axe-core finds nothing wrong in any place, in both languages and both themes, and every place works by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from served_page import JOB, TRAINING, ServedPage, View, run_id

AXE = Path(__file__).parent / "vendor/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PLACES = (
    "start",
    "start/job",
    "start/users",
    "data//files",
    "data//audit",
    "data//rows?packed=1",
    "plan",
    "train",
    "compare",
    "use",
)
OF_RUN = (
    "train/{}",
    "train/{}/events",
    "train/{}/plan",
    "train/{}/seen",
    "train/{}/logs",
    "train/{}/job",
    "compare/{}",
    "use/{}",
    "use/{}/deploy",
)

# A browser, in 60 views.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("warm_processes")]


def violations(page: Page) -> list[str]:
    """What axe-core finds, a line each."""
    page.evaluate(AXE.read_text())
    found: dict[str, Any] = page.evaluate(
        "(tags) => axe.run(document, {runOnly: tags}).then((result) => result)", RULES
    )
    assert len(found["passes"]) > 10
    return [f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]]


def settle(page: Page) -> None:
    """Waits until nothing is being waited for."""
    expect(page.locator("main h1, main h2").first).to_be_visible()
    expect(page.locator(".waiting")).to_have_count(0, timeout=TRAINING)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.often("en", "dark")
def test_no_violations(served: ServedPage, open_view: Callable[..., View], language: str, theme: str) -> None:
    view = open_view(served, color_scheme=theme, locale={"en": "en-GB", "zh": "zh-CN"}[language])
    page = view.open("#/start")
    expect(page.locator("html")).to_have_attribute("lang", {"en": "en", "zh": "zh-CN"}[language])
    page.evaluate("(yaml) => localStorage.setItem('stoker.page', JSON.stringify({yaml, name: 'a'}))", JOB)
    page.reload()
    first = run_id(view, "first")
    places = [*PLACES, *(place.format(first) for place in OF_RUN)] if theme == "light" else ["start", f"train/{first}"]
    wrong = []
    for place in places:
        view.open(f"#/{place}")
        settle(page)
        wrong += [f"{place}: {each}" for each in violations(page)]
        name = {"start": "start", "start/job": "job", f"train/{first}": "run"}.get(place)
        if name and (theme == "light" or (name, language) == ("run", "en")):
            page.wait_for_timeout(500)  # a curve is drawn after its numbers are there
            view.shot(f"{name}-{language}{'-dark' if theme == 'dark' else ''}")
    assert not wrong, "\n".join(wrong)


NARROW = 375  # px
LONG = """() => {
  for (const select of document.querySelectorAll("main select")) select.add(new Option("a long name ".repeat(20)));
  const line = `<code>stoker eval --answers ${"/folder".repeat(20)}</code>`;
  document.querySelector("main").insertAdjacentHTML("beforeend", `<div class="row">${line}</div>`);
}"""


def test_a_narrow_screen_scrolls_only_down(served: ServedPage, open_view: Callable[..., View]) -> None:
    view = open_view(served, viewport={"width": NARROW, "height": 812}, locale="zh-CN")
    page = view.open("#/start")
    page.evaluate("(yaml) => localStorage.setItem('stoker.page', JSON.stringify({yaml, name: 'a'}))", JOB)
    page.reload()
    first = run_id(view, "first")
    for place in (*PLACES, *(place.format(first) for place in OF_RUN)):
        view.open(f"#/{place}")
        settle(page)
        page.evaluate(LONG)
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= NARROW, place
        if place == f"train/{first}":
            page.wait_for_timeout(500)
            view.shot("run-narrow-zh")


def test_by_keyboard_alone(view: View) -> None:
    page = view.open("#/start?lang=en")
    expect(page.locator("[data-recipe]").first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.dataset.recipe ?? document.activeElement.id"))
    assert {"file", "sft-lora"} <= reached
