"""What half of the rows are worth: AUC of the recipe ranking-movielens once they are gone, by rule and by default row.

    python benchmarks/sparse_eviction.py --seeds 3

After the training half of the rows of each table are replaced by a default row: zeros, as ids without a row have, or
the mean of the rows that go, each by how often it was seen. Which rows go: those that were seen least, those of the
smallest norm, or those of the smallest norm times times seen.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.job import load_job
from stoker.job.recipes import write_recipe
from stoker.runs.run_folder import RunFolder
from stoker.sparse.sparse_state import TableState
from stoker.train.engine import SingleProcess
from stoker.train.prepare import prepare
from stoker.train.ranking.figures import figures_of
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.run import start

RULES: dict[str, Callable[[TableState], Tensor]] = {
    "seen": lambda table: table.seen.double(),
    "norm": lambda table: table.values.double().norm(dim=1),
    "norm x seen": lambda table: table.values.double().norm(dim=1) * table.seen,
}
DEFAULTS: dict[str, Callable[[TableState, Tensor], Tensor]] = {
    "zeros": lambda table, gone: torch.zeros(table.values.shape[1]),
    "mean": lambda table, gone: (table.values[gone] * table.seen[gone, None]).sum(0) / table.seen[gone].sum(),
}


def without_half(table: TableState, worth: Tensor, default: Callable[[TableState, Tensor], Tensor]) -> TableState:
    """A table whose rows of less worth than the median are the default row."""
    gone = worth < worth.median()
    values = table.values.clone()
    if gone.any():
        values[gone] = default(table, gone)
    return replace(table, values=values)


def measured(seed: int) -> dict[str, float]:
    """AUC by rule and default row, and with all rows."""
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "job.yaml").write_text(write_recipe("ranking-movielens"), encoding="utf-8")
        prepared = prepare(load_job(base / "job.yaml", [f"seed={seed}", "evaluate.every=1000"]), base)
        folder = RunFolder(base / prepared.job.output)
        with folder.take():
            start(prepared, folder, base, quiet=True)
        task = prepared.task
        assert isinstance(task, RankingTask) and task.held_out is not None
        engine, held_out = SingleProcess(task, prepared.device, ()), task.held_out

        def auc() -> float:
            _, scored = task.score(held_out, engine)
            return figures_of(scored, task.log.features.labels, task.at).means["auc"]

        found, trained = {"all rows": auc()}, task.tables.state()
        for rule, worth_of in RULES.items():
            for name, default in DEFAULTS.items():
                tables = {n: without_half(table, worth_of(table), default) for n, table in trained.tables.items()}
                task.tables.load([replace(trained, tables=tables)])
                found[f"{rule}, {name}"] = auc()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)
    results = [measured(seed) for seed in range(parser.parse_args().seeds)]
    for name in results[0]:
        aucs = [result[name] for result in results]
        print(f"{name:<20} {np.mean(aucs):.4f}  ({', '.join(f'{value:.4f}' for value in aucs)})", flush=True)


if __name__ == "__main__":
    main()
