"""Data is audited, shown token by token, and changed in new versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect
from served_page import JOB, TRAINING, ServedPage, View, rows, run_id, write_job
from test_accessibility import violations

# A browser, and verbs in processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]


def test_data_is_audited_and_shown_token_by_token(view: View, served: ServedPage) -> None:
    write_job(view)
    page = view.open("#/data//audit?lang=en")
    expect(page.get_by_text("60 rows can be trained on")).to_be_visible(timeout=TRAINING)
    expect(page.locator(".figure", has_text="Rows read").locator(".number")).to_have_text("60")
    page.get_by_role("link", name="Tokens").click()
    expect(page.locator(".sample").nth(40)).to_be_attached(timeout=TRAINING)
    trained = page.locator(".sample").first.locator(".token.trained")
    assert "It is" in "".join(trained.all_inner_texts())
    untrained = page.locator(".sample").first.locator(".token:not(.trained)").all_inner_texts()
    assert "What is" in "".join(untrained)
    trained.first.click()
    expect(page.locator(".sample").first).to_contain_text(re.compile(r"Token \d+: .*, id \d+ · trained"))
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token.picked")).to_have_count(1)


def test_foreign_columns_are_named_and_lines_lead_to_the_job(view: View, served: ServedPage) -> None:
    lines = [f"Was ist {n}?;{n} ist es.\n" for n in range(60)]
    (served.base / "data/fragen.csv").write_text("Frage;Antwort\n" + "".join(lines))
    write_job(view, JOB.replace("sums.jsonl", "none.jsonl"))
    page = view.open("#/data//audit?lang=en")
    page.get_by_role("link", name="line 4").click(timeout=TRAINING)
    expect(page.locator("#yaml")).to_be_focused()
    page.locator("#yaml").fill(JOB.replace("sums.jsonl", "fragen.csv"))
    page = view.open("#/data//audit?lang=en")
    expect(page.locator("#column-output")).to_have_value("Antwort", timeout=TRAINING)
    page.locator("#apply-columns").click(timeout=TRAINING)
    expect(page.get_by_text("60 rows can be trained on")).to_be_visible(timeout=TRAINING)


def test_the_roles_of_columns_are_shown_and_changed(view: View, served: ServedPage) -> None:
    line = '{{"query": "SELECT {0}", "asked": "What is {0}?", "chosen": "It is {0}.", "rejected": "No."}}\n'
    (served.base / "data/pairs.jsonl").write_text("".join(line.format(n) for n in range(20)))
    write_job(view, "task: dpo\nmodel: llama-3m\ndata: data/pairs.jsonl\nsteps: 1\n", "pairs")
    page = view.open("#/data//audit?lang=en")
    expect(page.locator("#source-0-prompt")).to_have_value("query", timeout=TRAINING)
    page.locator("#source-0-prompt").select_option("asked")
    page.locator("#source-0-apply").click()
    expect(page.locator(".sample").first).to_contain_text("What·is·0?", timeout=TRAINING)  # a space as it is drawn
    expect(page.locator("#source-0-apply")).to_be_disabled()
    log = "".join(f"{n % 7},{1700000000 + n},{n % 9},{n % 2}\n" for n in range(60))
    (served.base / "data/log.csv").write_text("user,seen,price,click\n" + log)
    write_job(view, "task: ranking\ndata: data/log.csv\nsteps: 1\nranking: {label: rating}\n", "log")
    page = view.open("#/data//audit?lang=en")
    expect(page.locator("#source-0-time")).to_have_value("seen", timeout=TRAINING)  # as proposed
    page.locator("#source-0-label").select_option("click")
    page.locator("summary", has_text="left out").click()
    page.get_by_label("price", exact=True).check()
    page.locator("#source-0-apply").click()
    expect(page.get_by_text("60 rows can be trained on")).to_be_visible(timeout=TRAINING)
    yaml = page.evaluate("() => JSON.parse(localStorage.getItem('stoker.page')).yaml")
    assert all(part in yaml for part in ("label: click", "time: seen", "price")), yaml
    features = page.get_by_role("group", name="Features")
    expect(features).to_contain_text("user")
    expect(features).not_to_contain_text("price")


def test_a_packed_sequence_shows_its_documents_and_cuts(view: View) -> None:
    write_job(view, JOB.replace("seq_len: 64", "seq_len: 44"))
    page = view.open("#/data//rows?lang=en")
    expect(page.locator(".cut").first).to_contain_text("2 tokens are cut off here", timeout=TRAINING)
    write_job(view, JOB.replace("seq_len: 64", "seq_len: 140\n  pack: true"))
    page = view.open("#/data//rows?lang=en")
    expect(page.locator(".sample").nth(40)).to_be_attached(timeout=TRAINING)
    page.locator("#data-order").select_option("1")
    expect(page.locator(".boundary").nth(1)).to_contain_text(
        re.compile(r"Document 2: sums.jsonl, row \d+, \d+ tokens"), timeout=TRAINING
    )
    first = page.locator(".sample").first
    expect(first).to_contain_text("Sequence 0: 3 documents fill 138 of 140 tokens (98.6%)")
    assert "packed=1" in page.url
    page.locator("#data-order").select_option("")
    expect(page.locator(".sample").nth(40)).to_be_attached(timeout=TRAINING)
    assert "It is" in "".join(first.locator(".token.trained").all_inner_texts())


def test_losses_colour_the_tokens_of_a_run(view: View, served: ServedPage) -> None:
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'first')}/seen?lang=en")
    page.locator("#rows-at").select_option("last", timeout=TRAINING)
    page.get_by_role("button", name="Loss by token", exact=True).click()
    expect(page.locator(".heat-scale")).to_be_visible(timeout=TRAINING)
    expect(
        page.get_by_text(re.compile(r"At step 12, the \d+ trained tokens that are shown have a mean loss"))
    ).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile(r"stoker eval runs/first --by-token 20"))
    tokens = page.locator(".tokens").first
    figure = re.compile(r"Token \d+: .* · trained · Loss of a token: \d")
    coloured = tokens.locator(".token[style*=color-mix]")
    coloured.last.hover()
    expect(page.locator(".sample").first).to_contain_text(figure)
    page.mouse.move(0, 0)
    expect(page.locator(".sample").first).not_to_contain_text(figure)
    tokens.focus()
    for _ in range(int(coloured.last.get_attribute("data-at") or 0)):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".sample").first).to_contain_text(figure)
    assert not violations(page)
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_text("Sequences 21 to 40 of 60.")).to_be_visible(timeout=TRAINING)
    expect(page.locator(".heat-scale")).to_have_count(0)
    view.open(f"#/train/{run_id(view, 'first')}/seen?lang=zh&from=20")
    expect(page.get_by_role("button", name="逐词元损失", exact=True)).to_be_visible(timeout=TRAINING)


def test_a_click_log_is_audited(view: View, served: ServedPage) -> None:
    lines = [f"{i % 7},{i % 13},{0.1 * (i % 5):.1f},{int(i % 3 == 0)}" for i in range(400)]
    (served.base / "data/clicks.csv").write_text("user_id,film_id,age,click\n" + "\n".join(lines) + "\n")
    write_job(view, "task: ranking\ndata: data/clicks.csv\nranking:\n  label: click\nsteps: 5\n", "clicks")
    page = view.open("#/data//audit?lang=en")
    expect(page.get_by_text("400 rows can be trained on")).to_be_visible(timeout=TRAINING)
    expect(page.get_by_role("row", name=re.compile("film_id")).first).to_be_visible()
    expect(page.locator(".figure", has_text="Positive: click").locator(".number")).to_have_text(re.compile("3[34]"))


def test_a_file_for_a_job_with_stages_is_offered_for_each(view: View, tmp_path: Path) -> None:
    page = view.open("#/data//files?lang=en")
    page.set_input_files("#data-file", rows(tmp_path / "staged.jsonl", 12))
    expect(page.get_by_role("cell", name="staged.jsonl First rows", exact=True)).to_be_visible()
    job = f"{JOB}stages:\n- name: a\n- name: b\n"
    write_job(view, job, "chain")
    page = view.open("#/data//files?lang=en")
    row = page.get_by_role("row", name=re.compile("staged.jsonl"))
    row.get_by_role("button", name="Use in the job", exact=True).click()
    expect(page.get_by_role("button", name="Use staged.jsonl", exact=True)).to_have_count(2)
    assert page.evaluate("() => JSON.parse(localStorage.getItem('stoker.page')).yaml") == job


def test_a_row_is_left_out_of_a_new_version(view: View, tmp_path: Path) -> None:
    page = view.open("#/data//files?lang=en")
    page.set_input_files("#data-file", rows(tmp_path / "versions.jsonl", 12))
    expect(page.get_by_role("cell", name="versions.jsonl First rows", exact=True)).to_be_visible()
    uploaded = page.evaluate("() => fetch('/api/data').then((answer) => answer.json())")["data"]
    mine = next(file for file in uploaded if file["name"] == "versions.jsonl")
    keep = "(job) => localStorage.setItem('stoker.page', JSON.stringify(job))"
    page.evaluate(keep, {"yaml": JOB.replace("data/sums.jsonl", mine["path"]), "name": "x", "file": mine})
    page.reload()
    page = view.open("#/data//rows?lang=en")
    page.locator(".sample input[type=checkbox]").first.check(timeout=TRAINING)
    page.get_by_role("button", name="New version with 1 change", exact=True).click()
    expect(page.get_by_text("The job now uses the version versions-v2.jsonl")).to_be_visible()
    expect(page.locator(".sample")).to_have_count(11, timeout=TRAINING)
    assert "versions-v2.jsonl" in page.evaluate("() => JSON.parse(localStorage.getItem('stoker.page')).yaml")
    page.get_by_role("button", name="Edit the row").nth(1).click()
    row = page.get_by_role("textbox", name="Edit the row")
    expect(row).to_have_value(re.compile("What is 2 plus 2"))
    row.fill('{"prompt": "What is changed?", "completion": "This row."}')
    page.get_by_role("button", name="Keep", exact=True).click()
    page.get_by_role("button", name="New version with 1 change", exact=True).click()
    expect(page.locator(".note", has_text="the file before it stays")).to_contain_text("v3")
    page = view.open("#/data//files?lang=en")
    expect(page.get_by_role("cell", name="versions.jsonl First rows", exact=True)).not_to_have_count(0)
    found = page.evaluate("() => fetch('/api/data').then((answer) => answer.json())")["data"]
    made = {file["name"]: Path(file["path"]).read_text() for file in found if file["parent"]}
    assert len(made["versions-v2.jsonl"].splitlines()) == 11
    assert len(made["versions-v3.jsonl"].splitlines()) == 11
    assert "This row." in made["versions-v3.jsonl"]
    assert len(Path(mine["path"]).read_text().splitlines()) == 12
