"""AUC of the recipe ranking-movielens beside plain `nn.Embedding` in the same model, over seeds.

    python benchmarks/ranking_movielens.py [--seeds 3] [--model deepfm]

The plain loop has a row for every id of the log from the start, elementwise Adagrad, the same tower with the same first
weights, the same order of the rows and the same schedule. Ratings come from the wheel of recbole, as in the recipe.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from stoker.data.ranking.log_batch import RowBatch
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.job import LoadedJob, load_job
from stoker.job.recipes import write_recipe
from stoker.job.task_spec import block_of_task
from stoker.models.ranking.model_inputs import FIRST_ORDER, RankingInputs
from stoker.runs.run_folder import RunFolder
from stoker.scoring.ranking_metrics import auc, log_losses
from stoker.train.optim.optimizer import build_optimizer
from stoker.train.prepare import prepare
from stoker.train.ranking.ranking_task import RankingTask
from stoker.train.run import train_run
from stoker.train.run_schedule import length_of, schedule_of


class PlainTables(nn.Module):
    """An `nn.Embedding` for each feature, with all ids that the log ever has."""

    def __init__(self, task: RankingTask, width: int, scale: float) -> None:
        super().__init__()
        rows = [task.log.training, *([task.held_out] if task.held_out else [])]
        batches = [part.batch(np.arange(len(part))) for part in rows]
        self.columns = task.log.features.ids
        self.ids = {c.name: np.unique(np.concatenate([b.ids[c.name].ids for b in batches])) for c in self.columns}
        names = {c.name: width for c in self.columns}
        if getattr(task.model, "first_order", False):
            names |= {c.name + FIRST_ORDER: 1 for c in self.columns}
        self.tables = nn.ModuleDict(
            {n: nn.Embedding(len(self.ids[n.removesuffix(FIRST_ORDER)]), w) for n, w in names.items()}
        )
        for table in self.tables.values():
            nn.init.uniform_(table.weight, -scale, scale)

    def forward(self, batch: RowBatch) -> RankingInputs:
        vectors: dict[str, Tensor] = {}
        for column in self.columns:
            found = batch.ids[column.name]
            at, lengths = (
                torch.from_numpy(np.searchsorted(self.ids[column.name], found.ids)),
                torch.from_numpy(found.lengths),
            )
            row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            for name in (column.name, column.name + FIRST_ORDER):
                if name in self.tables:
                    each = self.tables[name](at)
                    summed = each.new_zeros(len(lengths), each.shape[1]).index_add(0, row, each)
                    several = column.kind in ("ids", "sequence")
                    vectors[name] = summed / lengths.clamp(min=1)[:, None] if several else summed
        return RankingInputs(vectors, {}, torch.from_numpy(batch.dense))


def plain(loaded: LoadedJob, base: Path) -> tuple[float, float]:
    """AUC and log loss of the plain loop."""
    prepared = prepare(loaded, base)
    task, job, block = prepared.task, prepared.job, block_of_task(loaded.job, RankingBlock)
    assert isinstance(task, RankingTask)
    assert task.held_out is not None
    length, batch_size = length_of(job, task), job.train.batch
    schedule = schedule_of(job, length.steps)
    torch.manual_seed(job.seed)
    tables = PlainTables(task, block.width, block.table.init_scale)
    tower, rows = build_optimizer(task.model, job.train), torch.optim.Adagrad(tables.parameters(), lr=block.table.lr)
    for step in range(length.steps):
        positions = task.positions(step * batch_size, min((step + 1) * batch_size, length.samples))
        batch = task.log.training.batch(positions)
        loss = nn.functional.binary_cross_entropy_with_logits(task.model(tables(batch)), torch.from_numpy(batch.labels))
        tower.zero_grad()
        rows.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), job.train.clip)
        for group in tower.param_groups:
            group["lr"] = schedule.lr(step + 1)
        for group in rows.param_groups:
            group["lr"] = block.table.lr * schedule.lr(step + 1) / job.train.lr
        tower.step()
        rows.step()
    batch = task.held_out.batch(np.arange(len(task.held_out)))
    with torch.no_grad():
        logits = task.model(tables(batch)).numpy()[:, 0]
    return float(auc(batch.labels[:, 0], logits) or 0), float(log_losses(batch.labels[:, 0], logits).mean())


def trained(loaded: LoadedJob, base: Path) -> tuple[float, float]:
    """AUC and log loss of the job."""
    folder = RunFolder(base / loaded.job.output)
    with folder.take():
        _, loop = train_run(prepare(loaded, base), folder, base, quiet=True)
    assert loop.evaluation is not None
    return loop.evaluation.measures["auc"], loop.evaluation.measures["log_loss"]


def main() -> None:
    """Print a line a seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="deepfm")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float]]] = {"stoker": [], "plain": []}
    for seed in range(arguments.seeds):
        for name, run in (("stoker", trained), ("plain", plain)):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "job.yaml"
                path.write_text(write_recipe("ranking-movielens"), encoding="utf-8")
                overrides = [f"seed={seed}", f"ranking.model={arguments.model}", "evaluate.every=1000"]
                loaded = load_job(path, overrides)
                begin = time.perf_counter()
                found[name].append(run(loaded, Path(folder)))
                seconds = time.perf_counter() - begin
            value, loss = found[name][-1]
            print(f"seed {seed}  {name:<6}  AUC {value:.4f}  log loss {loss:.4f}  {seconds:.0f} s")
    for name, results in found.items():
        aucs, losses = zip(*results, strict=True)
        print(f"mean    {name:<6}  AUC {np.mean(aucs):.4f} (+- {np.std(aucs):.4f})  log loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    main()
