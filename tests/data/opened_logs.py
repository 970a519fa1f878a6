"""Click logs of a few rows, opened for tests, and what is found in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.data.ranking.click_log import ClickLog, open_log
from stoker.data.ranking.features import Features
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job.blocks.source_block import SourceBlock

ROWS: list[dict[str, Any]] = [
    {"label": n % 2, "user_id": n % 5, "city": f"c{n % 3}", "price": n / 4, "tags": [n, f"t{n % 2}"], "ts": 1000 - n}
    for n in range(40)
]


def log_of(
    folder: Path, name: str, text: str, *, form: str = "auto", fraction: float = 0.25, **settings: Any
) -> ClickLog:
    (folder / name).write_text(text, encoding="utf-8")
    block = SourceBlock(path=name, format=form)  # type: ignore[arg-type]
    return open_log([block], RankingBlock(**settings), folder, held_out=[], fraction=fraction)


def json_lines(rows: Sequence[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def kinds(features: Features) -> dict[str, str]:
    return {column.name: column.kind for column in features}


def reasons_of(log: ClickLog) -> list[tuple[str, int, str]]:
    return [(Path(row.source).name, row.row, row.reason) for row in log.training.store.summary.rejected]
