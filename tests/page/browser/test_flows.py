"""Plans, runs and what is done with them, end to end, on runs that were really trained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from served_page import JOB, TRAINING, ServedPage, View, run_id, write_job

GRPO = """\
task: grpo
model: llama-3m
data: data/questions.jsonl
tune: lora
grpo: {rewards: numeric, prompts: 2, answers: 4, max_tokens: 6, kl: 0.01}
steps: 2
"""
# A browser, and verbs in processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]


def test_a_plan_for_here_and_for_a_cluster(view: View) -> None:
    write_job(view)
    page = view.open("#/plan?lang=en")
    expect(page.locator(".stack").first).to_be_visible(timeout=TRAINING)
    expect(page.get_by_text("it fits")).to_be_visible()
    page.locator("#device").fill("H100")
    page.evaluate("() => dispatchEvent(new HashChangeEvent('hashchange'))")  # the page is drawn again
    expect(page.locator("#device")).to_have_value("H100")
    page.locator("#device").press("Enter")
    page.locator("#devices-n").fill("8")  # the ninth of its numbers
    expect(page.get_by_text("16 devices")).to_be_visible()
    expect(page.locator(".command").first).to_contain_text("--on 2x8xH100", timeout=TRAINING)
    assert "devices=16" in page.url
    expect(page.get_by_text("No layout fits")).to_be_visible()  # a batch of 4 has no row for each of 16 devices
    expect(page.get_by_text("train.batch=16")).to_be_visible()
    page.locator("#devices-n").fill("3")
    expect(page.locator(".command").first).to_contain_text("--on 1x4xH100", timeout=TRAINING)
    page.get_by_role("button", name="Take it", exact=True).first.click(timeout=TRAINING)
    page.wait_for_function("() => JSON.parse(localStorage.getItem('stoker.page')).yaml.includes('parallel:')")


def test_a_view_is_restored_from_its_address(view: View, served: ServedPage, open_view: Callable[..., View]) -> None:
    page = view.open("#/train?lang=en")
    page.get_by_role("link", name="first", exact=True).click()
    plot = page.locator('[data-metric="loss"] .plot')
    expect(plot.locator("canvas")).to_be_visible()
    page.locator("#smooth").fill("0.5")
    plot.focus()
    plot.press("+")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    assert "smooth=0.5" in page.url
    first, last = map(float, page.url.partition("zoom=")[2].split("&")[0].replace("%7E", "~").split("~"))
    assert last - first < 11  # steps: it is narrower than the whole curve
    other = open_view(served).page
    other.goto(page.url)
    expect(other.locator("#smooth")).to_have_value("0.5")
    expect(other.get_by_role("button", name="Show all")).to_be_visible()
    expect(other.locator('[data-metric="loss"] canvas')).to_be_visible()
    other.get_by_role("button", name="Show all").click()
    expect(other.get_by_role("button", name="Show all")).to_have_count(0)


def test_a_finished_run_and_its_tabs(view: View, served: ServedPage) -> None:
    view.open("#/train?lang=en")
    run = run_id(view, "first")
    page = view.open(f"#/train/{run}?lang=en")
    expect(page.locator(".health")).to_contain_text("rows")
    expect(page.locator('[data-metric="loss"] canvas')).to_be_visible()
    page.locator(".term button").first.focus()
    expect(page.get_by_role("tooltip")).to_contain_text("Unit")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)
    page.locator('[data-metric="loss"]').get_by_role("button", name="Numbers").click()
    expect(page.locator('[data-metric="loss"] tbody tr')).not_to_have_count(0)
    expect(page.get_by_role("link", name="Rollouts")).to_have_count(0)
    for tab, words in {
        "events": "held-out evaluation|evaluated",
        "samples": "What is",
        "seen": "It",
        "plan": "Measured",
        "logs": "step|no log|rank|the command",
        "job": "task: sft",
        "files": "metrics.jsonl",
    }.items():
        view.open(f"#/train/{run}/{tab}?lang=en")
        expect(page.locator("main")).to_contain_text(re.compile(words), timeout=TRAINING)
        expect(page.locator("main [role=alert]")).to_have_count(0)


def advance(page: Page) -> None:
    """Waits until another step is shown, without a reload."""
    step = page.locator(".figure", has_text="Step").first.locator(".number")
    before = step.inner_text()
    expect(step).not_to_have_text(before, timeout=TRAINING)
    second = step.inner_text()
    expect(step).not_to_have_text(second, timeout=TRAINING)


def test_a_run_is_started_stopped_and_goes_on(view: View) -> None:
    write_job(view, JOB.replace("steps: 12", "steps: 400"), "long")
    page = view.open("#/start/job?lang=en")
    expect(page.locator("#start-training")).to_be_enabled()
    page.locator("#start-training").click()
    expect(page.locator(".status").first).to_have_text("running", timeout=TRAINING)
    expect(page.locator('[data-metric="loss"] canvas')).to_be_visible(timeout=TRAINING)
    last = page.locator('[data-metric="lr"] .head strong')
    before = last.inner_text()
    expect(last).not_to_have_text(before, timeout=TRAINING)  # the stream was refused before the run had begun
    expect(page.locator(".lost")).to_have_count(0)
    advance(page)
    page.reload()
    page.locator("#stop").click()
    expect(page.locator(".status").first).to_have_text("stopped", timeout=TRAINING)
    expect(page.locator(".command").last).to_contain_text("stoker stop")
    page.locator("#resume").click()
    expect(page.locator(".status").first).to_have_text("running", timeout=TRAINING)
    advance(page)  # a stop while processes start ends them without a checkpoint
    page.locator("#stop").click()
    expect(page.locator(".status").first).to_have_text("stopped", timeout=TRAINING)


def test_a_finished_run_goes_on_with_more_steps(view: View, served: ServedPage) -> None:
    shutil.copytree(served.base / "runs/first", served.base / "runs/longer")
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'longer')}?lang=en")
    page.locator("#resume-changes summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("train.lr=5e-3")
    found, go = page.locator("#changes-found"), page.locator("#resume-with")
    expect(found).to_contain_text("train.lr: 0.001 → 0.005", timeout=TRAINING)
    expect(found).to_contain_text("that run starts over")
    expect(go).to_be_disabled()
    page.locator("#changes").fill("stps=14")
    expect(found.get_by_role("alert")).to_contain_text("steps", timeout=TRAINING)
    expect(go).to_be_disabled()
    page.locator("#changes").fill("steps=14")
    expect(found).to_contain_text("steps: 12 → 14", timeout=TRAINING)
    go.click()
    expect(page.locator(".figure", has_text="Step").first).to_contain_text("14", timeout=TRAINING)
    expect(page.locator(".status").first).to_have_text("done", timeout=TRAINING)
    expect(page.locator(".command").first).to_contain_text("steps=14")


def test_the_list_of_runs_to_compare_stays_open(view: View, served: ServedPage) -> None:
    page = view.open("#/compare?lang=en")
    for name in ("first", "second"):
        page.get_by_label(name, exact=True).check()
        page.wait_for_function("(id) => location.hash.includes(id)", arg=run_id(view, name))
        expect(page.get_by_label("first", exact=True)).to_be_visible()
    expect(page.locator('[data-metric="loss"] canvas')).to_be_visible()
    page.locator(".pick summary").click()
    expect(page.get_by_label("first", exact=True)).to_be_hidden()


def test_a_lost_connection_is_named(tmp_path: Path, open_view: Callable[..., View], served: ServedPage) -> None:
    own = ServedPage(tmp_path / "own")
    try:
        shutil.copytree(served.base / "runs/first", own.base / "runs/first")
        view = open_view(own)
        view.open("#/train?lang=en")
        page = view.open(f"#/train/{run_id(view, 'first')}?lang=en")
        expect(page.locator(".health")).to_be_visible()
        own.stop()
        expect(page.locator(".lost")).to_contain_text("is lost since")
        page.locator(".rail a", has_text="Compare").click()  # a place whose module has not been loaded
        expect(page.get_by_role("alert")).to_have_text("The page's server does not answer.")
        own.start()
        expect(page.locator("h1")).to_have_text("Compare", timeout=TRAINING)
        page.go_back()
        expect(page.locator(".health")).to_be_visible()
        expect(page.locator(".lost")).to_have_count(0, timeout=TRAINING)
    finally:
        own.stop()


def test_a_run_is_forked_put_aside_and_brought_back(
    tmp_path: Path, open_view: Callable[..., View], served: ServedPage
) -> None:
    own = ServedPage(tmp_path / "own")
    try:
        shutil.copytree(served.base / "runs/first", own.base / "runs/first")
        shutil.copytree(served.base / "data", own.base / "data", dirs_exist_ok=True)
        view = open_view(own)
        view.open("#/train?lang=en")
        first = run_id(view, "first")
        page = view.open(f"#/train/{first}?lang=en")
        page.locator("#fork").click()
        expect(page.locator("h1")).to_have_text("Job: first-fork")
        expect(page.locator("#yaml")).to_have_value(re.compile("llama-3m"))
        page = view.open(f"#/train/{first}?lang=en")
        page.locator("#delete").click()
        assert (own.base / "runs/first").is_dir()  # not before it was confirmed
        page.get_by_role("button", name="Yes, put it aside").click()
        expect(page.locator("summary", has_text="1 run was put aside")).to_be_visible()
        assert not (own.base / "runs/first").exists()
        page.locator("summary", has_text="1 run was put aside").click()
        page.get_by_role("button", name="Bring back", exact=True).click()
        expect(page.get_by_role("link", name="first", exact=True)).to_be_visible()
        assert (own.base / "runs/first/metrics.jsonl").is_file()
    finally:
        own.stop()


def test_two_runs_are_compared(view: View, served: ServedPage) -> None:
    page = view.open("#/compare?lang=en")
    page.get_by_label("first", exact=True).check()
    page.get_by_label("second", exact=True).check()
    expect(page.locator('[data-metric="loss"] .legend span')).to_have_count(2)
    page.get_by_role("link", name="Differences of the jobs").click()
    expect(page.get_by_role("cell", name="train.lr")).to_be_visible()
    row = page.get_by_role("row", name=re.compile("train.lr"))
    expect(row).to_contain_text("0.001")
    expect(row).to_contain_text("0.002")


def test_rollouts_are_heat_strips_the_worst_first(view: View, served: ServedPage) -> None:
    lines = [json.dumps({"prompt": f"What is {i} plus {i}?", "expected": str(2 * i)}) for i in range(8)]
    (served.base / "data/questions.jsonl").write_text("\n".join(lines) + "\n")
    (served.base / "grpo.yaml").write_text(GRPO)
    command = [sys.executable, "-m", "stoker", "train", "grpo.yaml", "output=runs/policy"]
    subprocess.run(command, cwd=served.base, check=True, capture_output=True)
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'policy')}/rollouts?lang=en")
    expect(page.locator(".panel .tokens").first).to_be_visible(timeout=TRAINING)
    scores = [float(text) for text in re.findall(r"Score (-?[\d.]+)", page.locator("main").inner_text())]
    assert scores == sorted(scores)
    assert len(scores) == 8
    page.locator(".panel .token").first.click()
    expect(page.locator(".panel").first).to_contain_text("Advantage")
    page.locator("#rollout-by").select_option("kl")
    assert "by=kl" in page.url
    expect(page.locator(".heat-scale")).to_be_visible()
    page.locator("#rollout-by").select_option("old")
    expect(page.locator(".panel").first).to_contain_text("Log-probability: -")


def test_runs_without_rollouts_say_so(view: View, served: ServedPage) -> None:
    view.open("#/compare?lang=en")
    page = view.open(f"#/compare/{run_id(view, 'first')}/rollouts?lang=en")
    expect(page.get_by_text("This run has no rollouts")).to_be_visible()


def test_an_export_is_replayed(view: View, served: ServedPage) -> None:
    view.open("#/use?lang=en")
    page = view.open(f"#/use/{run_id(view, 'first')}/export?lang=en")
    page.locator("#export").click()
    expect(page.locator(".panel .status")).to_have_text("done", timeout=TRAINING)
    expect(page.locator(".panel dl")).to_contain_text(re.compile("replayed \\d+ held-out rows"))
    page = view.open(f"#/use/{run_id(view, 'first')}/actions?lang=en")
    expect(page.get_by_text("stoker export").first).to_be_visible()
    expect(page.locator("pre")).to_contain_text("stoker export")


def test_an_evaluation_says_who_is_better(view: View, served: ServedPage) -> None:
    view.open("#/use?lang=en")
    page = view.open(f"#/use/{run_id(view, 'first')}/evaluate?lang=en")
    page.locator("#evaluate").click()
    expect(page.locator(".panel .status")).to_have_text("done", timeout=TRAINING)
    expect(page.locator(".panel table")).to_contain_text(re.compile("Perplexity"))


def test_a_token_is_asked_for(tmp_path: Path, open_view: Callable[..., View]) -> None:
    (tmp_path / "own").mkdir()
    token = "correct-horse-battery-staple-0123456789"
    (tmp_path / "own/token").write_text(token + "\n")
    (tmp_path / "own/token").chmod(0o600)
    own = ServedPage(tmp_path / "own", ["--token", "token"])
    try:
        page = open_view(own).open("?#/start?lang=en")
        page.locator("#token").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_be_visible()
        page.locator("#token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".rail")).to_be_visible()
    finally:
        own.stop()
