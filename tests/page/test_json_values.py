"""What JSON has no form of has a text, or is null."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from browsing import HOST, Browser

from stoker.json_values import finite


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        ([1.5, float("-inf"), True, 3], [1.5, None, True, 3]),
        ({"a": (date(2026, 1, 2), Decimal("1.10")), 3: None}, {"a": ["2026-01-02", "1.10"], "3": None}),
        ("half \ud800 a character, 字", "half \\ud800 a character, 字"),
        (b"caf\xc3\xa9 \xff", "café \\xff"),
    ],
)
def test_every_value_can_be_written(value: Any, written: Any) -> None:
    found = finite(value)
    assert found == written
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


def test_half_a_character_in_a_request_is_an_error_of_it(page: Browser) -> None:
    headers = {"origin": f"http://{HOST}", "x-stoker-csrf": page.csrf, "content-type": "application/json"}
    body = b'{"verb": "export", "run": "x", "options": {"\\ud800": 1}}'
    found = page.client.post("/api/actions", content=body, headers=headers)
    assert 400 <= found.status_code < 500 and found.json()["error"]["message"]


def test_dates_and_bytes_of_a_table_are_shown(page: Browser, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": ["a", "b"], "day": [date(2026, 1, 2)] * 2, "raw": [b"x", b"\xff"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    begun = page.post("/api/uploads", {"name": "t.parquet", "size": len(content)}).json()
    headers = {"origin": f"http://{HOST}", "x-stoker-csrf": page.csrf}
    page.client.patch(f"/api/uploads/{begun['id']}?offset=0", content=content, headers=headers)
    rows = page.get(f"/api/data/{begun['id']}/rows?limit=5").json()["rows"]
    assert [row["value"]["day"] for row in rows] == ["2026-01-02"] * 2
    made = page.post(f"/api/data/{begun['id']}/versions", {"exclude": [rows[0]["row"]]})
    assert made.status_code == 200, made.text
