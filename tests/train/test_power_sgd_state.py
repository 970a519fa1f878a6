"""PowerSGD's state is in checkpoints: a resumed run equals an uninterrupted one to the bit."""

from __future__ import annotations

import io
import json
import math
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from test_islands import JOB, train
from torch import Tensor

from made_module import made_module
from stoker.checkpoint.dcp_store import Store
from stoker.launch.process_pool import Pool
from stoker.runs.run_folder import RunFolder
from stoker.train.hooks import Hook
from stoker.train.loop import FORGETS

STEPS = 16  # of which six are compressed
WORDS = [f"steps={STEPS}", "parallel.compress=powersgd", "parallel.compress_rank=1", "train.optimizer=adamw"]

PLAIN = ["parallel.compress=none", "parallel.compress_rank=4"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "made.py").write_text(made_module("nn.Linear(8, 8), nn.Tanh()"))
    checkpoint = {"every": 1, "keep": 99, "best": False, "memory": 0}
    (tmp_path / "job.yaml").write_text(json.dumps({**JOB, "checkpoint": checkpoint}))
    return tmp_path


def ended(base: Path, name: str) -> tuple[list[float], dict[str, Tensor]]:
    folder = RunFolder(base / name)
    return [line["loss"] for line in folder.read_metrics()], Store(folder.checkpoints).load(STEPS).tensors


def cut(base: Path, name: str, step: int) -> None:
    """Cuts the run back to its state when it was killed after a step's checkpoint."""
    folder = RunFolder(base / name)
    for path in folder.checkpoints.iterdir():
        if path.name > f"step-{step:08}":
            shutil.rmtree(path)


@pytest.mark.pool
@pytest.mark.parametrize(
    ("words", "world"), [([], 2), (["parallel.data=4", "parallel.sync.every=4", "parallel.sync.islands=2"], 4)]
)
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(pool: Pool, base: Path, words: list[str], world: int) -> None:
    pool.run(train, str(base), [*WORDS, *words], "whole", world=world)
    losses, weights = ended(base, "whole")
    for step in (9, 10, 13):  # before, at and after the first compressed step
        shutil.copytree(base / "whole", base / "again")
        cut(base, "again", step)
        pool.run(train, str(base), [*WORDS, *words], "again", world=world)
        again, found = ended(base, "again")
        assert again == losses, step
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), step
        shutil.rmtree(base / "again")


def train_with_a_bad_step(path: str, words: list[str], name: str) -> None:
    """The loss of step 13 is NaN on its first attempt, after gradients were summed."""
    bad = [13]

    def after_passes(step: int, loss: Tensor) -> Tensor:
        if step not in bad:
            return loss
        bad.remove(step)
        return loss * math.nan

    train(path, words, name, hooks=[Hook(after_passes=after_passes)])


@pytest.mark.pool
@pytest.mark.slow
def test_a_step_that_is_not_taken_leaves_the_state_as_it_was(pool: Pool, base: Path) -> None:
    pool.run(train, str(base), WORDS, "whole", world=2)
    pool.run(train_with_a_bad_step, str(base), [*WORDS, "faults.not_finite=roll-back"], "again", world=2)
    assert "not_finite" in [event["event"] for event in RunFolder(base / "again").read_events()]
    (losses, weights), (again, found) = ended(base, "whole"), ended(base, "again")
    assert again == losses
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def notes(path: str, words: list[str], name: str) -> str:
    """Returns the output of the first process of a run."""
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        train(path, words, name, quiet=False)
    return said.getvalue()


@pytest.mark.pool
@pytest.mark.parametrize("words", [["parallel.compress_rank=2"], PLAIN])
def test_another_layout_says_what_is_lost(pool: Pool, base: Path, words: list[str]) -> None:
    pool.run(train, str(base), [*WORDS, "steps=12"], "run", world=2)
    assert FORGETS in pool.run(notes, str(base), [*WORDS, *words], "run", world=2)[0]
    assert len(ended(base, "run")[0]) == STEPS
