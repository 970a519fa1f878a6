"""TorchRec's tables behind the same calls. Without TorchRec: the one message that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stoker.errors import CannotRun, UserError
from stoker.launch.process_pool import Pool
from stoker.sparse import Admission, Feature, JaggedIds, TableSettings
from stoker.sparse.torchrec_embeddings import TorchRecEmbeddings

USERS = TableSettings("users", 4, lr=0.1, init_scale=1.0)
ITEMS = replace(USERS, name="items", optimizer="sgd")
FEATURES = {"user": Feature("users"), "item": Feature("items", pooling="mean")}
ROWS = {"users": 30, "items": 10}
has_torchrec = pytest.mark.skipif(find_spec("torchrec") is None, reason="an extra that pins its own torch")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def batch() -> dict[str, JaggedIds]:
    items = JaggedIds(torch.tensor([1, 2, 2]), torch.tensor([2, 0, 1]))
    return {"user": JaggedIds.single(torch.tensor([5, 6, 5])), "item": items}


@pytest.mark.skipif(find_spec("torchrec") is not None, reason="it is there")
def test_without_it_the_matched_pair_is_named() -> None:
    with pytest.raises(CannotRun, match=r"torchrec==1\.8\.0"):
        TorchRecEmbeddings([USERS, ITEMS], FEATURES, rows=ROWS)


def test_what_it_cannot_do_is_refused() -> None:
    wrong = replace(USERS, admission=Admission(count=2), optimizer="ftrl", dtype="int8")
    with pytest.raises(UserError) as caught:
        TorchRecEmbeddings([wrong, ITEMS], {**FEATURES, "h": Feature("items", pooling="none")}, rows={"users": 30})
    text = str(caught.value)
    for named in ("admission", "ftrl", "int8", "mean and none", "no number of rows"):
        assert named in text


@has_torchrec
def test_every_row_that_was_looked_up_is_trained(group: None) -> None:
    """The trap: with the dense kernel, which TorchRec takes on a CPU by itself, no row would change."""
    model = TorchRecEmbeddings([USERS, ITEMS], FEATURES, rows=ROWS, seed=1)
    before = model.state().tables
    pooled = model(batch())
    (pooled["user"].sum() + pooled["item"].sum()).backward()
    model.apply_gradients()
    after = model.state().tables
    changed = {name: int((after[name].values != before[name].values).any(1).sum()) for name in ROWS}
    assert changed == {"users": 2, "items": 2}
    step = before["items"].values - after["items"].values
    assert sorted(step[step.any(1)].mean(1).tolist()) == pytest.approx([0.05, 0.15])  # means of two and of one id
    moved = (before["users"].values - after["users"].values).norm(dim=1)
    assert moved[moved > 0].tolist() == pytest.approx([0.2, 0.2], rel=1e-4)  # row-wise Adagrad's first step is lr


def moved_on_a_rank() -> list[float]:
    """How far the rows of this process' tables move by a gradient of 1 from each process."""
    tables = [ITEMS, replace(ITEMS, name="users")]
    model = TorchRecEmbeddings(tables, {"user": Feature("users"), "item": Feature("items")}, rows=ROWS, seed=1)
    before = model.state().tables
    pooled = model({name: JaggedIds.single(torch.tensor([7])) for name in ("user", "item")})
    (pooled["user"].sum() + pooled["item"].sum()).backward()
    model.apply_gradients()
    steps = [(before[name].values - table.values).abs() for name, table in model.state().tables.items()]
    return torch.cat([step[step.any(1)].mean(1) for step in steps]).tolist()


@has_torchrec
def test_gradients_are_summed_over_processes(pool: Pool) -> None:
    assert pool.run(moved_on_a_rank, world=2) == [pytest.approx([0.2]), pytest.approx([0.2])]


@has_torchrec
def test_a_state_is_taken_over_with_its_optimizer(group: None) -> None:
    one, other = (TorchRecEmbeddings([USERS, ITEMS], FEATURES, rows=ROWS, seed=seed) for seed in (1, 2))
    sum(value.sum() for value in one(batch()).values()).backward()
    one.apply_gradients()
    other.load(one.parts())
    for model in (one, other):
        sum(value.square().sum() for value in model(batch()).values()).backward()
        model.apply_gradients(lr_factor=0.5)
    for name, table in one.state().tables.items():
        assert torch.equal(other.state().tables[name].values, table.values)
        assert torch.equal(other.state().tables[name].optimizer, table.optimizer)
    assert other.version == one.version == 2
