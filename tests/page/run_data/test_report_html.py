"""A report is one file that asks nothing of anybody, and what is inside it cannot break out of it."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from stoker.page.run_data.report_html import FIRST, STATIC, modules, report_html

NASTY = "</script><script>alert(1)</script>"


def answers() -> dict[str, Any]:
    """What the API says of one run with a name that means harm."""
    run = {"id": "a-1", "name": NASTY, "status": "done", "step": 2, "steps": 2}
    return {"/api/runs": {"runs": [run]}, "/api/runs/a-1": {**run, "job": NASTY}}


def test_every_module_is_inside_and_imports_only_those() -> None:
    found = modules(FIRST)
    for name, text in found.items():
        for path in re.findall(r"""(?:from\s*|import\(\s*|import\s+)["']([^"']+)["']""", text):
            assert path.removeprefix("stoker/") in found, f"{name} imports {path}"
    assert {"run.js", "compare.js", "vendor/preact.mjs", "vendor/uplot.mjs"} <= found.keys()


def test_its_import_map_has_the_modules() -> None:
    text = report_html(answers())
    found = re.search(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    imports = json.loads(found[1])["imports"]
    source = base64.b64decode(imports["stoker/vendor/preact.mjs"].partition(",")[2])
    assert source == (STATIC / "vendor/preact.mjs").read_bytes()


def test_what_is_inside_cannot_break_out() -> None:
    text = report_html(answers(), "zh")
    assert NASTY not in text
    inside = re.search(r'id="report">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["answers"] == answers()
    assert text.count("</script>") == 3


def test_numbers_that_are_not_finite_are_null() -> None:
    run = {"id": "a-1", "loss": float("nan"), "curves": [1.5, float("inf"), {"low": -float("inf")}]}
    text = report_html({"/api/runs": {"runs": [run]}})
    inside = re.search(r'id="report">(.*?)</script>', text, re.DOTALL)
    assert inside is not None

    def refused(name: str) -> float:
        raise AssertionError(f"browsers do not read {name}")

    found = json.loads(inside[1], parse_constant=refused)["answers"]["/api/runs"]["runs"][0]
    assert found == {"id": "a-1", "loss": None, "curves": [1.5, None, {"low": None}]}


def test_it_asks_nothing_of_anybody() -> None:
    text = report_html(answers())
    head = text.partition("<style>")[0]
    assert "default-src 'none'" in head
    assert not re.search(r"""(?:src|href)=["']https?:""", head)
