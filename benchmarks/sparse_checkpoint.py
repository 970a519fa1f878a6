"""Checkpoints of a table of embeddings: bytes, seconds and the memory that saving and restoring take beside the rows.

    python benchmarks/sparse_checkpoint.py --rows 4000000 --touched 0.02

Memory is the largest resident size while the checkpoint is made, less that before it (Linux). Shares of rows are
looked up after a first checkpoint, and a second one has them alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.state import State
from stoker.checkpoint.storage import BASE
from stoker.sparse import Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.train.ranking.saved_tables import SavedTables

BATCH = 100_000  # ids of a lookup


class Tables:
    """What saved tables see of a ranking task."""

    def __init__(self, width: int) -> None:
        self.tables = self.make(width)
        self.before_pause: Callable[[], None] = lambda: None
        self.saved = SavedTables(self, lambda: self.make(width), full_every=2)  # type: ignore[arg-type]

    @staticmethod
    def make(width: int) -> SparseEmbeddings:
        return SparseEmbeddings([TableSettings("ids", width)], {"x": Feature("ids")})

    def train(self, ids: np.ndarray) -> None:
        """A step for each batch of ids."""
        for start in range(0, len(ids), BATCH):
            rows = self.tables({"x": JaggedIds.single(torch.from_numpy(ids[start : start + BATCH]))})["x"]
            rows.sum().backward()
            self.tables.apply_gradients()


def resident(name: str) -> float:
    """MiB of ``VmRSS``, or of ``VmHWM``, the largest since `watch`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def watch() -> float:
    """Begins to look for the largest resident size; gives the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def save(folder: str, rows: int, width: int, touched: float) -> list[dict[str, float]]:
    """Two checkpoints."""
    task, store, found = Tables(width), Store(Path(folder)), []
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, rows)
    task.train(ids)
    for step in (1, 2):
        before, begin = watch(), time.perf_counter()
        held = task.saved.now(step, lambda base: base in store.steps())
        size = store.save(State(step, held, {} if task.saved.base is None else {BASE: task.saved.base})).bytes
        seconds = time.perf_counter() - begin
        found.append({"bytes": size, "seconds": round(seconds, 2), "MiB beside": round(resident("VmHWM") - before)})
        found[-1]["MiB of the process before"] = round(before)
        task.train(ids[: int(rows * touched)])
    return found


def restore(folder: str, width: int) -> dict[str, float]:
    """Reads the last checkpoint into tables without rows."""
    task, store = Tables(width), Store(Path(folder))
    before, begin = watch(), time.perf_counter()
    store.restore(store.steps()[-1], task.saved.places)
    task.saved.restored()
    seconds, most = time.perf_counter() - begin, resident("VmHWM") - before
    held = resident("VmRSS") - before
    return {"seconds": round(seconds, 2), "MiB at most": round(most), "MiB of the tables": round(held)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--touched", type=float, default=0.02, help="share of the rows that follow-up steps look up")
    given = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        with processes.Pool(1) as one:
            first, second = one.apply(save, (folder, given.rows, given.width, given.touched))
        with processes.Pool(1) as other:
            read = other.apply(restore, (folder, given.width))
    print(json.dumps({"rows": given.rows, "first": first, "second": second, "restored": read}, indent=1))


if __name__ == "__main__":
    main()
