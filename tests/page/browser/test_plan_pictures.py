"""A plan's pictures: lanes of passes and of communication, prices, and the stages of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from browsing import make_run
from playwright.sync_api import expect
from served_page import TRAINING, ServedPage, View, run_id
from test_accessibility import violations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a browser
LARGE = """\
task: pretrain
model: llama3-70b
data: data/texts.jsonl
steps: 1000
train: {batch: 64, seq_len: 4096}
"""
CHAIN = ("sft", "sft", []), ("judge", "reward", ["sft"]), ("tuned", "ppo", ["judge", "sft"])


def test_lanes_of_communication_and_prices(view: View, served: ServedPage) -> None:
    (served.base / "data/texts.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    page = view.open("#/start?lang=en")
    page.evaluate("(yaml) => localStorage.setItem('stoker.page', JSON.stringify({yaml, name: 'large'}))", LARGE)
    page.reload()
    (served.base / "data/ours.yaml").write_text("device: H100\nnodes: 4\nnetwork: 50 Gb/s\nprice: 30\ncurrency: EUR\n")
    page = view.open("#/plan?lang=en&device=data/ours.yaml")
    lane = page.locator(".talk .lane").first
    expect(lane).to_be_visible(timeout=TRAINING)
    said = r"Communication of Process 1: tensor-parallel exchange .*send to another process .*makes the step longer"
    expect(lane).to_have_attribute("aria-label", re.compile(said))
    expect(lane.locator(".k-tensor").first).to_have_attribute("title", re.compile("micro-batch 1: .* exposed"))
    expect(page.locator(".talk")).to_have_count(page.locator(".process").count())
    high, low = (lane.locator(kind).first.bounding_box() for kind in (".k-send", ".k-tensor"))
    assert high and low and 2 <= low["height"] < high["height"]
    assert not violations(page)
    view.shots("lanes", "#time-title")
    expect(page.locator("main .table", has_text="EUR").first).to_be_visible()
    view.shots("alternatives", "main h2:has(+ .table)")


def test_the_stages_of_a_job_are_a_graph(served: ServedPage, open_view: Callable[..., View]) -> None:
    job = served.base / "runs/align"
    for name in ("sft", "judge"):
        run = make_run(job / name, steps=60, task=name if name == "sft" else "reward")
        (run / "environment.json").write_text(json.dumps({"command": ["stoker", "train", "align.yaml"]}))
    record = [{"name": name, "run": f"runs/align/{name}", "task": task, "needs": needs} for name, task, needs in CHAIN]
    (job / "stages.json").write_text(json.dumps(record))
    view = open_view(served)
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'judge')}?lang=en")
    expect(page.locator(".chain > li")).to_have_count(3)
    expect(page.locator('[data-stage="tuned"]')).to_contain_text("after judge, sft")
    expect(page.locator('[data-stage="judge"] [aria-current]')).to_have_text("judge")
    assert not violations(page)
    view.shots("chain")
