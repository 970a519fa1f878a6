"""From a file to a tuned model that talks, without YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect
from served_page import TRAINING, View, rows

MOST_CLICKS = 9

pytestmark = pytest.mark.slow  # trains a real model of 135 million parameters


@pytest.mark.timeout(900)
def test_from_a_file_to_a_model_that_talks(view: View, tmp_path: Path) -> None:
    page = view.open("#/start?lang=en")
    page.set_input_files("#file", rows(tmp_path / "answers.jsonl"))
    expect(page.get_by_text("answers.jsonl is here")).to_be_visible()
    view.click('[data-recipe="sft-lora"]')
    view.click("#key-steps")
    page.locator("#key-steps").fill("2")
    page.locator("#key-steps").press("Tab")
    page.wait_for_function("() => document.getElementById('yaml').value.includes('steps: 2\\n')")
    expect(page.locator("#start-training")).to_be_enabled()
    view.click("#start-training")
    expect(page.locator("h1")).to_have_text("answers", timeout=TRAINING)
    expect(page.locator(".status").first).to_have_text("done", timeout=TRAINING)
    view.click("#talk")
    view.click("#question")
    page.locator("#max").fill("12")
    page.locator("#question").fill("What is 2 plus 2?")
    view.click("#send")
    for side in (0, 1):
        answer = page.locator(f'[data-answer="{side}"]')
        expect(answer).not_to_have_text("", timeout=TRAINING)
    expect(page.locator("#send")).to_be_enabled(timeout=TRAINING)
    for side in (0, 1):
        assert "loaded" not in page.locator(f'[data-answer="{side}"]').inner_text()
    assert view.clicks <= MOST_CLICKS
