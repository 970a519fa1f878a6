"""A ranking run's lookup: a row from the log and a typed one, scored as `stoker serve` scores them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect
from served_page import TRAINING, ServedPage, View, run_id
from test_accessibility import violations

# A browser, training and a server of the model.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("warm_processes")]
JOB = """\
task: ranking
data: data/shop.jsonl
ranking: {label: clicked, model: dcn, width: 4, hidden: [8]}
steps: 6
train: {batch: 12}
"""


def test_a_row_is_picked_changed_and_scored(view: View, served: ServedPage) -> None:
    rows = ({"clicked": n % 3 // 2, "user_id": n % 7, "item_id": f"i{n % 5}", "price": n % 11 / 4} for n in range(120))
    (served.base / "data/shop.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (served.base / "shop.yaml").write_text(JOB)
    command = [sys.executable, "-m", "stoker", "train", "shop.yaml", "output=runs/shop"]
    subprocess.run(command, cwd=served.base, check=True, capture_output=True)
    view.open("#/train?lang=en")
    page = view.open(f"#/train/{run_id(view, 'shop')}?lang=en")
    curve = page.locator('[data-metric="auc"]')
    expect(curve.locator("canvas")).to_be_visible()
    last = curve.locator(".head strong").inner_text()
    expect(page.locator(".figure", has_text="Held-out AUC").locator(".number")).to_have_text(last)
    page.get_by_role("link", name="Score rows").click()
    page.get_by_role("button", name="Take row 4", exact=True).click()
    expect(page.locator("#column-item_id")).to_have_value("i3")
    page.locator("#score").click()
    score = page.locator('[data-score="clicked"]')
    expect(score).to_have_text(re.compile(r"\d %|\d%"), timeout=TRAINING)
    expect(page.locator("[data-missing]")).to_have_count(0)
    known = score.inner_text()
    page.locator("#column-item_id").fill("never-seen")
    page.locator("#column-price").fill("")
    page.locator("#score").click()
    expect(page.locator('[data-missing="item_id"]')).to_have_text(re.compile("^1 · the default row"))
    expect(score).not_to_have_text(known)
    view.shots("lookup")
    page.locator("#column-price").fill("cheap")
    page.locator("#score").click()
    expect(page.get_by_role("alert")).to_contain_text("price")
    assert not violations(page)
    body = {"run": run_id(view, "shop"), "rows": [{"user_id": 3, "item_id": "i3", "price": 0.75}]}
    ask = """async (body) => {
        const csrf = (await (await fetch('/api/me')).json()).csrf;
        const headers = {'Content-Type': 'application/json', 'X-Stoker-CSRF': csrf};
        return (await fetch('/api/score', {method: 'POST', headers, body: JSON.stringify(body)})).json();
    }"""
    found = page.evaluate(ask, body)["data"][0]
    assert f"{100 * found['score']:.1f}"[:3] == known[:3]  # row 4 of the log is this one
    page = view.open(f"#/use/{body['run']}?lang=zh")
    expect(page.get_by_role("button", name="取用第 4 行", exact=True)).to_be_visible()
    assert not violations(page)
