"""A policy under layouts: the same answers, scores and steps as in one process, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from running import write_job, write_rows

from stoker.checkpoint.dcp_store import Store
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.rollouts.rollout_files import ROLLOUTS, RolloutFiles
from stoker.train.run import train_run

STEPS = 5
LORA = ("tune.method=lora", "tune.rank=4", "grpo.kl_in=reward")
LAYOUTS = {
    "DDP": (2, ("parallel.data=2",)),
    "zero3 + tensor": (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2")),
    "DDP, LoRA": (2, ("parallel.data=2", *LORA)),
    "zero2, LoRA": (2, ("parallel.data=2", "parallel.shard=zero2", *LORA)),
    "zero1": (2, ("parallel.data=2", "parallel.shard=zero1")),
    "tensor + sequence": (2, ("parallel.tensor=2", "parallel.sequence=true")),
}
MIX = {"data": "beside.jsonl", "weight": 0.5, "sequences": 3}  # an odd number for two processes
LAYOUTS |= {
    "zero3, mix": (2, ("parallel.data=2", "parallel.shard=zero3")),
    "DDP, mix, LoRA": (2, ("parallel.data=2", *LORA)),
}
OFTEN = ("zero3 + tensor", "DDP, LoRA")


def trained(path: str, name: str, overrides: tuple[str, ...]) -> None:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [*overrides, f"output={name}"])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    with in_float64():
        prepared = prepare(loaded, base, mesh=mesh)
        folder = RunFolder(base / name)
        folder.path.mkdir(exist_ok=True)
        train_run(prepared, folder, base, quiet=True)


def trained_out_of_sight(path: str, name: str, overrides: tuple[str, ...]) -> None:
    """Trains where no process but the first sees new files in the run's folder, as on another node for a while."""
    if torch.distributed.get_rank():
        unseen = Path(path) / "unseen.npz"
        with patch.multiple(RolloutFiles, _path=lambda *_: unseen, numbers=lambda _: []):
            trained(path, name, overrides)
    else:
        trained(path, name, overrides)


def test_only_the_first_process_reads_answers(job: dict[str, Any], base: Path, pool: Pool) -> None:
    train, grpo = {**job["train"], "precision": "fp64"}, {**job["grpo"], "dynamic": 2}
    write_job(base, {**job, "train": train, "grpo": grpo})
    for steps in (3, 4, STEPS):  # the second run continues within a round, the third begins another
        overrides = ("parallel.data=2", f"steps={steps}")
        pool.run(trained_out_of_sight, str(base), "spread", overrides, world=2, timeout=250)
    assert len(RunFolder(base / "spread").read_metrics()) == STEPS


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
@pytest.mark.often("DDP, LoRA", then="slow")
def test_a_policy_under_a_layout_is_that_of_one_process(
    name: str, job: dict[str, Any], base: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, overrides = LAYOUTS[name]
    train = {**job["train"], "precision": "fp64", "micro_batch": 2}
    write_job(base, {**job, "steps": STEPS, "train": train, "evaluate": {"fraction": 0.2, "every": 3}})
    if "mix" in name:
        write_rows(base / "beside.jsonl", 10)
        write_job(base, {**job, "steps": STEPS, "train": train, "grpo": {**job["grpo"], "ptx": MIX}})
    monkeypatch.syspath_prepend(str(base))
    trained(str(base), "alone", LORA if "LoRA" in name else ())
    pool.run(trained, str(base), "spread", overrides, world=world, timeout=250)
    check_alike(base, STEPS, ("loss", "score", "kl", "ratio", "approx_kl", "clip_fraction", "grad_norm"))
    if "mix" in name:
        check_alike(base, STEPS, ("ptx_loss",))


def check_alike(base: Path, steps: int, keys: tuple[str, ...]) -> None:
    """Checks that the runs ``alone`` and ``spread`` have the same answers, metrics and weights."""
    alone, spread = (RolloutFiles(base / run / ROLLOUTS) for run in ("alone", "spread"))
    assert alone.numbers() == spread.numbers() == [0, 1]
    for number in alone.numbers():
        for a, b in zip(alone.read(number).rollouts, spread.read(number).rollouts, strict=True):
            assert (a.prompt, a.sample, a.row, a.score) == (b.prompt, b.sample, b.row, b.score)
            assert a.answer_ids.tolist() == b.answer_ids.tolist()
            assert a.tokens.keys() == b.tokens.keys()
            for column, values in a.tokens.items():
                np.testing.assert_allclose(b.tokens[column], values, atol=1e-8, err_msg=column)
    one, many = (RunFolder(base / run) for run in ("alone", "spread"))
    for key in keys:
        expected = [line[key] for line in one.read_metrics()]
        assert [line[key] for line in many.read_metrics()] == pytest.approx(expected, abs=1e-8), key
    held_out = [[e["score"] for e in f.read_events() if e["event"] == "evaluated"] for f in (one, many)]
    assert held_out[0] == pytest.approx(held_out[1])
    expected, found = (Store(folder.checkpoints).load(steps) for folder in (one, many))
    for key, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[key], tensor, rtol=0, atol=1e-7, msg=key)
