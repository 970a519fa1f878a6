"""Small click logs and jobs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 240
# of `train`: what a plain loop does as well
CONSTANT = {"batch": 12, "lr": 1e-2, "precision": "fp64", "warmup": 0, "schedule": "constant"}


def write_clicks(path: Path, rows: int = ROWS) -> Path:
    """Clicks of 12 users on 20 items, ten an hour, with a history, weighted tags and a price."""
    random = np.random.default_rng(7)
    user, item = random.integers(0, 12, rows), random.integers(0, 20, rows)
    taste = random.normal(size=(12, 20))
    clicked = random.random(rows) < 1 / (1 + np.exp(-2 * taste[user, item]))
    with path.open("w") as file:
        for n in range(rows):
            row = {
                "clicked": int(clicked[n]),
                "bought": int(clicked[n] and n % 2),
                "user_id": int(user[n]),
                "item_id": f"item{item[n]}",
                "item_history": [f"item{i}" for i in random.integers(0, 20, random.integers(0, 5))],
                "tags": {f"t{t}": 0.5 + t for t in random.integers(0, 6, random.integers(0, 3)).tolist()},
                "price": float(np.exp(random.normal())),
                "device": ["phone", "desktop"][n % 2],
                "timestamp": 1_500_000_000 + 360 * n,
            }
            file.write(json.dumps(row) + "\n")
    return path


def ranking_job(**changes: Any) -> dict[str, Any]:
    """A job of 12 rows a step in double precision."""
    block = {"label": "clicked", "width": 4, "hidden": [8, 6], "ignore": ["bought"], **changes.pop("ranking", {})}
    return {
        "task": "ranking",
        "data": "clicks.jsonl",
        "ranking": block,
        "steps": 6,
        "output": "run",
        "train": {"batch": 12, "lr": 1e-2, "precision": "fp64", "warmup": 0},
        "evaluate": {"fraction": 0.25, "every": 3},
        "checkpoint": {"keep": 20, "memory": 0},
        "faults": {"restarts": 0, "check": False},
        **changes,
    }
