"""How long a click log takes to be read when it has grown: all of it at first, then with more rows at its end.

    python benchmarks/growing_log.py --rows 500000 --grows 0.01

A log of JSON lines in a hundred files, in order of time, with three ids, a list of ids and two numbers; then another
file with a share of that many rows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from stoker.data.ranking.click_log import open_log
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job.blocks.source_block import SourceBlock

FILES = 100


def write(path: Path, first: int, rows: int) -> None:
    """Rows of a log, from the first-th second on."""
    random = np.random.default_rng(first)
    users, items = random.zipf(1.3, rows) % 20_000, random.zipf(1.2, rows) % 50_000
    with path.open("w") as file:
        for n in range(rows):
            row = {"label": n % 3 % 2, "user_id": int(users[n]), "item_id": f"item{items[n]}", "city": f"c{n % 300}"}
            row |= {
                "tags": [int(items[n]) % 7, n % 11],
                "price": n % 97 / 4,
                "age": n % 80 + 0.5,
                "timestamp": first + n,
            }
            file.write(json.dumps(row) + "\n")


def seconds_to_open(folder: Path) -> tuple[float, int]:
    """Seconds, and rows."""
    begin = time.perf_counter()
    log = open_log(
        [SourceBlock(path="log/*.jsonl")], RankingBlock(), folder, held_out=[], fraction=0.0, progressive=True
    )
    return round(time.perf_counter() - begin, 2), len(log.training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--grows", type=float, default=0.01, help="share of the rows that come")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["STOKER_CACHE"] = str(folder / "cache")
        (folder / "log").mkdir()
        each = given.rows // FILES
        for number in range(FILES):
            write(folder / "log" / f"part_{number}.jsonl", 1_500_000_000 + number * each, each)
        found = {"first": seconds_to_open(folder), "again": seconds_to_open(folder)}
        new = max(1, int(given.rows * given.grows))
        write(folder / "log" / f"part_{FILES}.jsonl", 1_500_000_000 + given.rows, new)
        found["grown"] = seconds_to_open(folder)
    print(json.dumps({name: {"seconds": s, "rows": rows} for name, (s, rows) in found.items()}))


if __name__ == "__main__":
    main()
