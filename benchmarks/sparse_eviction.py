"""What half of the rows are worth: AUC of the recipe ranking-movielens with `table.eviction`, by score and default row.

    python benchmarks/sparse_eviction.py --seeds 3

Each run is the recipe with an eviction in its job. `max_rows` is half of the rows that the recipe makes, and the pass
is at the end of the last step, before the held-out rows are evaluated. With ``--every 125`` passes are made during the
training as well, and ids that are seen again get rows again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from stoker.job import load_job
from stoker.job.recipes import write_recipe
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.run import train_run

STEPS = 625  # two epochs of 80,000 rows, 256 a step
SCORES = ("norm-frequency", "norm", "frequency", "recency")


def trained(seed: int, *overrides: str) -> tuple[float, dict[str, int]]:
    """AUC of a run, and the rows of its tables."""
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "job.yaml").write_text(write_recipe("ranking-movielens"), encoding="utf-8")
        prepared = prepare(load_job(base / "job.yaml", [f"seed={seed}", f"evaluate.every={STEPS}", *overrides]), base)
        assert isinstance(prepared.task, RankingTask)
        folder = RunFolder(base / prepared.job.output)
        with folder.take():
            train_run(prepared, folder, base, quiet=True)
        [*_, last] = (event for event in folder.read_events() if event["event"] == "evaluated")
        assert last["step"] == STEPS
        return float(last["auc"]), prepared.task.tables.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scores", default="norm-frequency,frequency", help=f"of {', '.join(SCORES)}")
    parser.add_argument("--every", type=int, default=STEPS, help="steps between passes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    aucs: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        auc, rows = trained(seed)
        limit = sum(rows.values()) // 2
        aucs.setdefault("all rows", []).append(auc)
        print(f"seed {seed}: {sum(rows.values())} rows, {auc:.4f}; max_rows: {limit}", flush=True)
        for score in options.scores.split(","):
            for default in ("mean", "zeros"):
                rule = f"{{max_rows: {limit}, every: {options.every}, score: {score}, default_row: {default}}}"
                auc, left = trained(seed, f"ranking.table.eviction={rule}")
                aucs.setdefault(f"{score}, {default}", []).append(auc)
                print(f"seed {seed}: {score}, {default}: {sum(left.values())} rows, {auc:.4f}", flush=True)
    for name, found in aucs.items():
        loss = np.mean(aucs["all rows"]) - np.mean(found)
        print(f"{name:<24} {np.mean(found):.4f} ({', '.join(f'{auc:.4f}' for auc in found)}), {loss:.4f} less")


if __name__ == "__main__":
    main()
