"""Predicts each row of a table of published runs, or orders the rows of each group by predicted speed.

    python benchmarks/planner_cases.py FILE [--out FILE]
    python benchmarks/planner_cases.py --rank FILE [--out FILE]

FILE has a JSON object a line; `planner_runs.cases` says which fields are read and what holds where one is missing.
Without --out the lines go to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from planner_runs.cases import Prediction, as_json, predict_all
from planner_runs.rows import read_rows

from stoker.errors import Problem, UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 where the input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="rows as JSON lines")
    parser.add_argument("--rank", action="store_true", help="order the rows of each group instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the lines go")
    asked = parser.parse_args(arguments)
    try:
        predictions, problems = predict_all(read_rows(asked.file), file=str(asked.file))
        for problem in problems:
            print(f"no prediction: {problem}", file=sys.stderr)
        give(ranked(predictions) if asked.rank else map(as_json, predictions), asked.out)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code
    return 0


def ranked(predictions: Iterable[Prediction]) -> list[str]:
    """One line for each group: its rows' numbers, the fastest first."""
    groups: dict[str, list[tuple[float, Any]]] = {}
    for found in predictions:
        if found.group is not None and found.tokens_per_s_per_gpu is not None:
            groups.setdefault(found.group, []).append((found.tokens_per_s_per_gpu, found.row_id))
    lines = []
    for group, rows in groups.items():
        rows.sort(key=lambda pair: -pair[0])
        order = {"row_ids": [row for _, row in rows], "tokens_per_s_per_gpu": [speed for speed, _ in rows]}
        lines.append(json.dumps({"group": group, **order}))
    return lines


def give(lines: Iterable[str], out: Path | None) -> None:
    """Write all of the lines or nothing."""
    text = "".join(f"{line}\n" for line in lines)
    if out is None:
        print(text, end="")
        return
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(Problem(f"cannot be written: {error.strerror}", file=str(out))) from None


if __name__ == "__main__":
    raise SystemExit(main())
