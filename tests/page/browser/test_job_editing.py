"""A job is edited as a form and as YAML: both agree, and mistakes are shown at their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from served_page import JOB, TRAINING, View, write_job

# A browser, and verbs in processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]


def test_form_and_yaml_edit_the_same_job(view: View) -> None:
    write_job(view)
    page = view.open("#/start/job?lang=en")
    expect(page.locator("#start-training")).to_be_enabled()
    page.locator("#key-train-batch").fill("8")
    page.locator("#key-train-batch").press("Tab")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^# A job for the tests.*\n  batch: 8\n", re.DOTALL))
    page.locator("#yaml").fill(JOB.replace("batch: 4", "batch: 16"))
    expect(page.locator("#key-train-batch")).to_have_value("16")
    expect(page.get_by_text("The job is valid.")).to_be_visible()


def test_what_is_typed_stays_when_an_answer_comes(view: View) -> None:
    write_job(view)
    page = view.open("#/start/job?lang=en")
    expect(page.locator("#start-training")).to_be_enabled()
    page.locator("#key-train-batch").fill("8")
    page.locator("#key-train-batch").press("Tab")
    rate = page.locator("#key-train-lr")
    rate.press("Control+A")
    page.keyboard.type("0.00")
    expect(page.locator("#yaml")).to_have_value(re.compile("batch: 8"))
    expect(page.locator("#start-training")).to_be_enabled()
    expect(rate).to_have_value("0.00")
    page.keyboard.type("05")
    page.keyboard.press("Tab")
    expect(page.locator("#yaml")).to_have_value(re.compile("lr: 0.0005"))
    expect(rate).to_have_value("0.0005")
    expect(page.locator("#start-training")).to_be_enabled()
    rate.fill("-1")
    rate.press("Tab")
    expect(page.locator(".field.wrong", has=rate)).to_be_visible()
    expect(rate).to_have_value("-1")
    rate.fill("0.0005")  # the value of the last valid job
    rate.press("Tab")
    expect(page.locator(".field.wrong")).to_have_count(0)
    expect(page.locator("#start-training")).to_be_enabled()


def test_a_job_starts_with_what_was_just_typed(view: View) -> None:
    write_job(view)
    page = view.open("#/start/job?lang=en")
    expect(page.get_by_text("The job is valid.")).to_be_visible()
    started = []
    page.route("**/api/jobs", lambda route: (started.append(route.request.post_data_json), route.abort()))
    page.locator("#key-train-batch").fill("8")
    page.locator("#job-name").fill("typed")
    page.locator("#key-train-batch").fill("16")
    page.locator("#start-training").click()
    expect(page.get_by_text("The page's server does not answer.").first).to_be_visible()
    assert [(job["name"], "batch: 16" in job["yaml"]) for job in started] == [("typed", True)]


def test_a_mistake_is_shown_at_its_line_and_its_field(view: View) -> None:
    write_job(view)
    page = view.open("#/start/job?lang=en")
    page.locator("#yaml").fill(JOB.replace("steps: 12", "steps: none\nstep: 3"))
    line = JOB.split("\n").index("steps: 12") + 1
    expect(page.locator(".gutter .wrong").first).to_have_text(re.compile(f"{line}"))
    expect(page.locator("#start-training")).to_be_disabled()
    expect(page.locator("#yaml-problems")).to_contain_text("steps")
    page.get_by_role("button", name=f"line {line}", exact=True).first.click()
    assert page.evaluate("() => document.activeElement.id") == "yaml"
    page.locator("#yaml").fill(JOB.replace("batch: 4", "batch: -4"))
    field = page.locator(".field.wrong")
    expect(field).to_contain_text("train.batch")


def test_another_tools_file_becomes_a_job(view: View, tmp_path: Path) -> None:
    axolotl = tmp_path / "axolotl.yml"
    source = "datasets:\n  - path: a.jsonl\n    type: alpaca\n"
    axolotl.write_text(f"base_model: llama-3m\nadapter: lora\nlora_r: 8\n{source}")
    page = view.open("#/start?lang=en")
    page.set_input_files("#import-file", axolotl)
    page.get_by_role("button", name="Take this job", exact=True).click()
    expect(page.locator("#yaml")).to_have_value(re.compile("rank: 8"))


def test_errors_are_in_chinese_on_a_chinese_page(view: View) -> None:
    page = view.open("#/train/0123456789abcdef?lang=zh")
    expect(page.locator("main .empty")).to_contain_text("这里没有这个训练运行")
    write_job(view, JOB.replace("batch: 4", "batchh: 4"))
    page = view.open("#/start/job?lang=zh")
    problem = page.locator("#yaml-problems .problem")
    expect(problem).to_contain_text("未知的键 `train.batchh`", timeout=TRAINING)
    expect(problem).to_contain_text("请写 `batch`")
    expect(page.locator("main [lang=en]")).to_have_count(0)
