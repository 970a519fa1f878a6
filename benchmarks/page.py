"""How fast the page is: first paint, transferred bytes, opening a run of 200,000 steps, and zooming into its curve.

Starts `stoker ui` in a folder of its own with one made-up run, and Debian's Chromium. Prints a line of JSON. With
``--beside PAIRS`` what an open page costs a run that trains meanwhile; with ``--first-model FILE`` the way from a file
to a model that answers.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from page_beside_training import beside
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/page/browser"))
from served_page import ARGUMENTS, CHROMIUM, ServedPage

POINTS = 200_000
LONGEST = 1_800_000  # ms that training may take
LOADS = 5  # of the start page, each in a fresh context
ZOOMS = 60  # wheel events, half of them in and half out
VIEWED = """new MutationObserver((_, watch) => {
  if (!document.querySelector('.card[data-recipe]')) return;
  watch.disconnect();
  requestAnimationFrame(() => performance.mark('viewed'));
}).observe(document, {childList: true, subtree: true})"""
ZOOM = """async (count) => {
  const plot = document.querySelector('[data-metric="loss"] .plot');
  const over = plot.querySelector('.u-over').getBoundingClientRect();
  const place = {clientX: over.left + over.width * 0.4, clientY: over.top + 80, ctrlKey: true, bubbles: true};
  const work = [], frames = [];
  let last = await new Promise(requestAnimationFrame);
  for (let i = 0; i < count; i += 1) {
    const begun = performance.now();
    plot.dispatchEvent(new WheelEvent('wheel', {...place, deltaY: i < count / 2 ? -100 : 100, cancelable: true}));
    await Promise.resolve();
    await new Promise((done) => queueMicrotask(done));
    work.push(performance.now() - begun);
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return {work, frames};
}"""


@dataclass(frozen=True)
class PageSpeed:
    """Figures of the page; times in milliseconds, sizes in bytes.

    Attributes:
        first_paint: first contentful paint of the start page on loopback, median of `LOADS` cold loads.
        first_view: from the beginning of the load to the drawn recipes, median of the same loads.
        transferred: over the network, headers included, for the start page.
        transferred_all: for a visit of all places, the curves among them.
        curve: from opening a run of `POINTS` steps to its drawn curve, the server's first read of it included.
        curve_again: the same after a restart of the server, with its folder of state.
        zoom_work: script and drawing of one zoom step, 95 of 100 below it.
        zoom_frame: time between two frames while zooming, median; a display with 60 Hz has 16.7.
        zoom_refined: from the end of zooming to finer points from the server.
    """

    first_paint: float
    first_view: float
    transferred: int
    transferred_all: int
    curve: float
    curve_again: float
    zoom_work: float
    zoom_frame: float
    zoom_refined: float


def make_long_run(folder: Path, steps: int = POINTS) -> None:
    """A run with a noisy loss over many steps."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: rows.jsonl\n")
    begun = {"time": 1.0, "event": "started", "task": "sft", "model": "llama-3m", "steps": steps}
    ends = {"time": 1.0 + steps, "event": "done", "step": steps}
    (folder / "events.jsonl").write_text(f"{json.dumps(begun)}\n{json.dumps(ends)}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 6 / math.sqrt(step) + math.sin(step * 12.9898) * 0.2
            line = {"step": step, "loss": loss, "grad_norm": 1 + 0.1 * math.cos(step), "lr": 1e-4, "tokens": 512}
            line |= {"seconds": 1.0, "time": 1.0 + step, "tokens_per_s": 512.0, "memory_gib": 2.0, "data_seconds": 0.0}
            line |= {"stall": 0.0}
            file.write(json.dumps(line) + "\n")


def transferred(page: Page) -> list[int]:
    """A list that grows by the bytes of every answer."""
    found: list[int] = []
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    client.on("Network.loadingFinished", lambda event: found.append(int(event["encodedDataLength"])))
    return found


def cold_load(browser: Browser, url: str) -> tuple[float, float, int]:
    """Milliseconds to the first contentful paint and to the recipes, and the bytes, of a cold load."""
    context = browser.new_context()
    page = context.new_page()
    sizes = transferred(page)
    page.add_init_script(VIEWED)
    page.goto(url)
    page.locator(".grid .card[data-recipe]").first.wait_for()
    page.wait_for_load_state("networkidle")
    viewed = page.evaluate("() => performance.getEntriesByName('viewed')[0].startTime")
    paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
    context.close()
    return float(paint), float(viewed), sum(sizes)


def opening(page: Page, run: str) -> float:
    """Milliseconds from a click on a run in the list to its drawn curve of the loss."""
    link = page.get_by_role("link", name=run, exact=True)
    link.wait_for()
    begun = page.evaluate("() => performance.now()")
    link.click()
    page.locator('[data-metric="loss"] canvas').wait_for()
    return float(page.evaluate("() => performance.now()") - begun)


def measured(browser: Browser, served: ServedPage, run: str) -> PageSpeed:
    """All figures; the run is the name of a long one."""
    loads = [cold_load(browser, served.url) for _ in range(LOADS)]
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    sizes = transferred(page)
    page.goto(served.url)
    page.locator(".grid .card").first.wait_for()
    for place in ("data", "plan", "compare", "use", "train"):
        page.goto(f"{served.url}#/{place}")
        page.locator("main h1").first.wait_for()
    curve = opening(page, run)
    page.wait_for_timeout(1500)  # the other curves
    found = page.evaluate(ZOOM, ZOOMS)
    begun = page.evaluate("() => performance.now()")
    with page.expect_response(lambda answer: "/metrics" in answer.url and "from=" in answer.url):
        pass
    refined = page.evaluate("() => performance.now()") - begun
    context.close()
    served.stop()
    served.start()
    page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
    page.goto(f"{served.url}#/train")
    curve_again = opening(page, run)
    return PageSpeed(
        first_paint=statistics.median(paint for paint, _, _ in loads),
        first_view=statistics.median(viewed for _, viewed, _ in loads),
        transferred=max(size for _, _, size in loads),
        transferred_all=sum(sizes),
        curve=curve,
        curve_again=curve_again,
        zoom_work=sorted(found["work"])[int(0.95 * ZOOMS)],
        zoom_frame=statistics.median(found["frames"]),
        zoom_refined=refined,
    )


@dataclass(frozen=True)
class FirstModel:
    """From a file to a model that answers, without YAML.

    Attributes:
        clicks: after the upload.
        seconds: from the upload to the end of the first answers, of the tuned model and of the one before tuning.
        train_seconds: of them, from the start of the job to its end.
    """

    clicks: int
    seconds: float
    train_seconds: float


def first_model(browser: Browser, served: ServedPage, file: Path) -> FirstModel:
    """Drops a file, takes the recipe `sft-lora` as it is, trains it, and asks a question."""
    page = browser.new_context().new_page()
    page.set_default_timeout(LONGEST)
    page.goto(f"{served.url}#/start?lang=en")
    begun = time.monotonic()
    page.set_input_files("#file", file)
    page.get_by_text(f"{file.name} is here").wait_for()
    page.locator('[data-recipe="sft-lora"]').click()
    page.locator("#start-training:not([disabled])").click()
    started = time.monotonic()
    page.locator(".status.ok").wait_for()
    trained = time.monotonic() - started
    page.locator("#talk").click()
    page.locator("#question").click()
    page.locator("#question").fill("What is 12 plus 12?")
    page.locator("#send").click()
    page.locator("#send[disabled]").wait_for()
    page.locator("#send:not([disabled])").wait_for()
    seconds = time.monotonic() - begun
    for side in (0, 1):
        print(page.locator(f'[data-answer="{side}"]').inner_text(), file=sys.stderr)
    return FirstModel(clicks=5, seconds=seconds, train_seconds=trained)


def main() -> None:
    """Measures once and prints; see above."""
    if sys.argv[1:2] == ["--beside"]:
        with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
            served = ServedPage(Path(folder))
            try:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                found = beside(Path(folder), served, browser, int(sys.argv[2]))
                print(json.dumps({name: asdict(each) for name, each in found.items()}))
            finally:
                served.stop()
        return
    if sys.argv[1:2] == ["--first-model"]:
        with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
            served = ServedPage(Path(folder))
            try:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                print(json.dumps(asdict(first_model(browser, served, Path(sys.argv[2])))))
            finally:
                served.stop()
        return
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        make_long_run(Path(folder) / "runs/long")
        served = ServedPage(Path(folder))
        try:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            figures = asdict(measured(browser, served, "long"))
            print(json.dumps({key: round(value, 1) for key, value in figures.items()}))
            browser.close()
        finally:
            served.stop()


if __name__ == "__main__":
    main()
