"""axe-core finds nothing wrong in any place, in both languages and both themes, and every place works by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from served_page import JOB, TRAINING, ServedPage, View, run_id, write_job

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


MOST_TABS = 150


def tab_to(page: Page, what: str) -> None:
    """Presses Tab until an element has the focus."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        if page.evaluate("(what) => document.activeElement.matches(what)", what):
            return
    raise AssertionError(f"{what} is not reached")


def test_a_run_is_started_and_asked_by_keyboard_alone(view: View) -> None:
    write_job(view, JOB.replace("steps: 12", "steps: 2"), "keys")
    page = view.open("#/start?lang=en")
    tab_to(page, 'a[href*="start/job"]')
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()  # the link is gone
    expect(page.locator("#start-training")).to_be_enabled()
    tab_to(page, "#start-training")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/train/**", timeout=TRAINING)
    expect(page.locator("#main")).to_be_focused()
    expect(page.locator(".status").first).to_have_text("done", timeout=TRAINING)
    tab_to(page, "#talk")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_visible()
    page.locator("#max").fill("4")
    tab_to(page, "#question")
    page.keyboard.type("What is 2 plus 2?")
    tab_to(page, "#send")
    page.keyboard.press("Enter")
    expect(page.locator('[data-answer="0"]')).not_to_have_text("", timeout=TRAINING)
    expect(page.locator("#send")).to_be_enabled(timeout=TRAINING)
    expect(page.locator("#send")).to_be_focused()


def test_escape_takes_back_what_is_to_be_confirmed(view: View) -> None:
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'first')}?lang=en")
    button = page.locator("#delete")
    label = button.inner_text()
    for key in ("Escape", "Tab Enter"):  # the second one is Cancel
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_text("Yes, put it aside")
        for each in key.split():
            page.keyboard.press(each)
        expect(button).to_have_text(label)
        expect(button).to_be_focused()


COVERED = """() => {
  const shown = document.activeElement;
  const box = shown.getBoundingClientRect();
  const middle = Math.min(innerHeight - 1, box.top + Math.min(box.height, 40) / 2);
  const top = document.elementFromPoint(box.left + box.width / 2, middle);
  return shown.closest(".rail") || !top?.closest(".rail") ? "" : shown.outerHTML.slice(0, 100);
}"""


def test_the_rail_of_a_narrow_screen_covers_nothing_that_has_the_focus(
    served: ServedPage, open_view: Callable[..., View]
) -> None:
    view = open_view(served, viewport={"width": NARROW, "height": 700})
    write_job(view)
    page = view.open("#/start/job?lang=en")
    expect(page.locator("#key-steps")).to_be_enabled()
    for _ in range(40):
        page.keyboard.press("Tab")
        assert not page.evaluate(COVERED)


def test_an_entry_does_not_cover_its_term(view: View) -> None:
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'first')}?lang=en")
    terms = page.locator(".term button")
    expect(terms.nth(4)).to_be_visible()
    for term in terms.all():
        term.focus()
        entry, own = page.locator(".entry").bounding_box(), term.bounding_box()
        assert entry and own
        assert entry["y"] >= own["y"] + own["height"] or entry["y"] + entry["height"] <= own["y"]
