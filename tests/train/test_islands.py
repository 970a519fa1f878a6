"""Islands: local SGD and DiLoCo against the same written in a few lines; checkpoints of islands; bad input."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from made_module import made_module
from stoker.checkpoint.dcp_store import Store
from stoker.checkpoint.load_run import state_at
from stoker.errors import UserError
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job, with_nodes
from stoker.job.resolution.island_count import islands_of
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.hooks import Hook
from stoker.train.prepare import prepare
from stoker.train.run import train_run

STEPS, BATCH, LR = 7, 8, 0.05
JOB: dict[str, Any] = {
    "task": "module", "steps": STEPS, "output": "run", "parallel": {"data": 2},
    "module": {"model": "made:network", "loss": "torch.nn.functional:mse_loss", "data": "made:data"},
    "train": {"batch": BATCH, "precision": "fp64", "optimizer": "sgd", "beta1": 0.5, "lr": LR, "schedule": "constant",
              "warmup": 0, "weight_decay": 0.0, "clip": 0.0},
    "evaluate": {"every": "auto"}, "checkpoint": {"every": 2, "keep": 9, "best": False, "memory": 0},
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made.py").write_text(made_module())
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    return tmp_path


def train(
    path: str, overrides: list[str], name: str, nodes: int = 1, *, quiet: bool = True, hooks: Sequence[Hook] = ()
) -> None:
    base = Path(path)
    sys.path.insert(0, path)
    sys.modules.pop("made", None)
    try:
        loaded = with_nodes(load_job(base / "job.yaml", overrides), nodes)
        layout = layout_of(loaded.job)
        mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
        folder = RunFolder(base / name)
        folder.path.mkdir(exist_ok=True)
        train_run(prepare(loaded, base, mesh=mesh), folder, base, quiet=quiet, hooks=hooks)
    finally:
        sys.path.remove(path)


def result(base: Path, name: str, step: int = STEPS) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a run, and the weights of its first island."""
    folder = RunFolder(base / name)
    tensors = Store(folder.checkpoints).load(step).tensors
    weights = {key.removeprefix("model/"): t for key, t in tensors.items() if key.startswith("model/")}
    return [line["loss"] for line in folder.read_metrics()], weights


def by_hand(base: Path, islands: int, every: int, outer: dict[str, float] | None) -> tuple[list[float], nn.Module]:
    """Islands one after another in one process: SGD with momentum in each, and the outer step."""
    made: dict[str, Any] = {}
    exec((base / "made.py").read_text(), made)
    loaded = load_job(base / "job.yaml")
    sys.path.insert(0, str(base))
    sys.modules.pop("made", None)
    try:
        prepared = prepare(load_job(base / "job.yaml", ["parallel.data=1"]), base)
    finally:
        sys.path.remove(str(base))
    anchor = prepared.task.model
    data = made["Data"]()
    copies = [made["network"]() for _ in range(islands)]
    for copy in copies:
        copy.load_state_dict(anchor.state_dict())
    inner = [torch.optim.SGD(copy.parameters(), lr=LR, momentum=loaded.job.train.beta1) for copy in copies]
    momentum = [torch.zeros_like(p) for p in anchor.parameters()]
    losses = []
    for step in range(1, STEPS + 1):
        samples = prepared.task._indices((step - 1) * BATCH, step * BATCH)  # type: ignore[attr-defined]
        size, found = BATCH // islands, 0.0
        for number, (copy, optimizer) in enumerate(zip(copies, inner, strict=True)):
            inputs, targets = map(
                torch.stack, zip(*(data[int(i)] for i in samples[number * size : (number + 1) * size]), strict=True)
            )
            loss = nn.functional.mse_loss(copy(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += loss.item() / islands
        losses.append(found)
        if step % every and step != STEPS:
            continue
        with torch.no_grad():
            for i, weights in enumerate(anchor.parameters()):
                change = weights - sum(list(copy.parameters())[i] for copy in copies) / islands
                if outer is None:
                    weights.sub_(change)
                else:
                    momentum[i] = outer["momentum"] * momentum[i] + change
                    weights.sub_(outer["lr"] * (change + outer["momentum"] * momentum[i]))
                for copy in copies:
                    list(copy.parameters())[i].copy_(weights)
    return losses, anchor


SYNCS = {
    "local SGD": (["parallel.sync.every=3", "parallel.sync.outer=average"], None),
    "DiLoCo": (
        ["parallel.sync.every=3", "parallel.sync.outer_lr=0.6", "parallel.sync.outer_momentum=0.8"],
        {"lr": 0.6, "momentum": 0.8},
    ),
}


@pytest.mark.pool
@pytest.mark.parametrize("sync", SYNCS)
def test_islands_are_those_of_the_papers(pool: Pool, base: Path, sync: str) -> None:
    words, outer = SYNCS[sync]
    pool.run(train, str(base), words, "run", world=2)
    losses, weights = result(base, "run")
    expected, model = by_hand(base, 2, 3, outer)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.pool
def test_each_of_two_nodes_is_an_island(pool: Pool, base: Path) -> None:
    words, outer = SYNCS["DiLoCo"]
    pool.run(train, str(base), [*words, "parallel.data=4"], "run", 2, world=4)
    losses, weights = result(base, "run")
    expected, model = by_hand(base, 2, 3, outer)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("copies", "nodes", "islands"),
    [(8, 1, 8), (16, 2, 2), (6, 4, 2), (2, 4, 2), (3, 2, 3), (1000, 1000, 1000)],
)
def test_islands_end_where_nodes_end(copies: int, nodes: int, islands: int) -> None:
    assert islands_of(copies, nodes) == islands


def test_the_number_of_nodes_decides_what_the_job_leaves_open(base: Path) -> None:
    words = ["parallel.data=4", "parallel.sync.every=3"]
    read = load_job(base / "job.yaml", words)
    assert layout_of(read.job).islands == 4
    there = with_nodes(read, 2)
    assert layout_of(there.job).islands == 2 and there.origins["parallel.sync.islands"].why == "each node is one"
    stated = with_nodes(load_job(base / "job.yaml", [*words, "parallel.sync.islands=4"]), 2)
    assert layout_of(stated.job).islands == 4
    compressed = load_job(base / "job.yaml", [*words, "parallel.compress=bf16"])
    assert layout_of(with_nodes(compressed, 2).job).islands == 2
    with pytest.raises(UserError, match="each island has one copy"):
        with_nodes(compressed, 1)


@pytest.mark.pool
@pytest.mark.slow
def test_islands_of_several_processes_with_sharded_weights(pool: Pool, base: Path) -> None:
    words = SYNCS["DiLoCo"][0]
    pool.run(train, str(base), words, "two", world=2)
    for name, more in {
        "copies": ["parallel.sync.islands=2"],
        "sharded": ["parallel.shard=zero3", "parallel.shard_size=2"],
    }.items():
        pool.run(train, str(base), [*words, "parallel.data=4", *more], name, world=4)
        losses, weights = result(base, name)
        assert losses == pytest.approx(result(base, "two")[0], rel=1e-12)
        for key, expected in result(base, "two")[1].items():
            torch.testing.assert_close(weights[key], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.pool
def test_synchronising_every_step_is_plain_data_parallelism(pool: Pool, base: Path) -> None:
    pool.run(train, str(base), [], "plain", world=2)
    pool.run(train, str(base), ["parallel.sync.every=1"], "every", world=2)
    assert result(base, "every")[0] == result(base, "plain")[0]


@pytest.mark.pool
def test_a_run_goes_on_between_two_synchronisations(pool: Pool, base: Path) -> None:
    words = [*SYNCS["DiLoCo"][0], "train.optimizer=adamw"]
    pool.run(train, str(base), words, "whole", world=2)
    pool.run(train, str(base), [*words, "steps=4"], "parts", world=2)
    # The last step of a run synchronises the islands; here it is step 2, between two of the longer run, that counts.
    shutil.rmtree(RunFolder(base / "parts").checkpoints / "step-00000004")
    pool.run(train, str(base), words, "parts", world=2)
    assert result(base, "parts")[0] == result(base, "whole")[0]
    for key, expected in result(base, "whole")[1].items():
        assert torch.equal(result(base, "parts")[1][key], expected)


@pytest.mark.pool
def test_between_two_synchronisations_the_weights_of_the_last_one_are_opened(pool: Pool, base: Path) -> None:
    pool.run(train, str(base), [*SYNCS["DiLoCo"][0], "checkpoint.every=1", "checkpoint.keep=99"], "run", world=2)
    folder = RunFolder(base / "run")
    job = load_job(folder.job).job
    three, five = (state_at(folder, job, at, base).tensors for at in ("3", "5"))
    saved = result(base, "run", 5)[1]
    for name in saved:
        assert torch.equal(three[f"model/{name}"], five[f"model/{name}"])
    assert any(not torch.equal(five[f"model/{name}"], tensor) for name, tensor in saved.items())


@pytest.mark.pool
def test_islands_of_a_run_that_had_none_begin_with_its_weights(pool: Pool, base: Path) -> None:
    """An outer step of half the change goes half of the way to what plain data parallelism has."""
    half = ["parallel.sync.every=3", "parallel.sync.outer_lr=0.5", "parallel.sync.outer_momentum=0"]
    pool.run(train, str(base), ["steps=3"], "run", world=2)
    pool.run(train, str(base), ["steps=4"], "plain", world=2)
    pool.run(train, str(base), [*half, "steps=4"], "run", world=2)
    before, plain, after = result(base, "run", 3)[1], result(base, "plain", 4)[1], result(base, "run", 4)[1]
    for key, weights in after.items():
        torch.testing.assert_close(weights, (before[key] + plain[key]) / 2, rtol=1e-12, atol=1e-14)
        assert not torch.equal(before[key], plain[key])


@pytest.mark.pool
def test_running_statistics_become_their_mean(pool: Pool, base: Path) -> None:
    """The mean of two halves of a batch is that of the batch; the mean of their variances is not its variance."""
    (base / "made.py").write_text(made_module("nn.BatchNorm1d(8)"))
    pool.run(train, str(base), ["steps=1", "parallel.data=1"], "one", world=1)
    pool.run(train, str(base), ["steps=1", "parallel.sync.every=3"], "two", world=2)
    one, two = (Store(RunFolder(base / name).checkpoints).load(1).tensors for name in ("one", "two"))
    mean, variance = "buffer/1.running_mean", "buffer/1.running_var"
    torch.testing.assert_close(two[mean], one[mean], rtol=1e-12, atol=1e-14)
    assert one[mean].abs().max() > 0.01 and not torch.allclose(two[variance], one[variance])


@pytest.mark.pool
@pytest.mark.slow
def test_a_run_goes_on_with_other_islands_and_without(pool: Pool, base: Path) -> None:
    words = SYNCS["DiLoCo"][0]
    pool.run(train, str(base), [*words, "steps=3"], "run", world=2)
    pool.run(train, str(base), [*words, "steps=5", "parallel.data=4"], "run", world=4)
    at_five = result(base, "run", 5)
    assert len(at_five[0]) == 5
    pool.run(train, str(base), ["parallel.data=1"], "run", world=1)
    assert len(result(base, "run")[0]) == STEPS


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel.sync.outer=average"], "`sync.outer` has no effect with `sync.every: 1`"),
        (
            ["parallel.sync.every=2", "parallel.sync.outer=average", "parallel.sync.outer_lr=1"],
            "is of `outer: nesterov`",
        ),
        (["parallel.sync.every=2", "parallel.data=1"], "needs several copies of the model, and there is one"),
        (["parallel.sync.every=2", "parallel.shard=zero3"], "needs several copies of the model, and there is one"),
        (["parallel.sync.every=2", "parallel.data=4", "parallel.sync.islands=3"], "write `islands: 2 or 4`"),
        (["parallel.sync.every=4", "evaluate.every=6"], "write a multiple of 4"),
        (["parallel.sync.every=4", "train.average=0.9"], "`train.average` follows the weights of one island"),
        (["parallel.sync.evry=4"], "write `every`"),
    ],
)
def test_wrong_input(base: Path, words: list[str], told: str) -> None:
    with pytest.raises(UserError) as error:
        load_job(base / "job.yaml", words)
    assert told in str(error.value)
