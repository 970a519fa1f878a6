"""TorchRec's tables behind the same calls: against Stoker's own, over processes, through states."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stoker.errors import CannotRun, UserError
from stoker.launch.process_pool import Pool
from stoker.sparse import Admission, DiskTier, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.hashing import hashes_of, salt_of
from stoker.sparse.sparse_state import SparseState
from stoker.sparse.torchrec_embeddings import TorchRecEmbeddings
from stoker.sparse.torchrec_tables import TorchRecTables, first_values

USERS = TableSettings("users", 4, lr=0.1, init_scale=1.0)
ITEMS = replace(USERS, name="items", width=3)
FEATURES = {"user": Feature("users"), "item": Feature("items", pooling="mean"), "seen": Feature("items")}
ROWS = {"users": 3000, "items": 2000}  # large enough that few ids share one
IDS = 12


def batch(seed: int, size: int = 6) -> dict[str, JaggedIds]:
    random = np.random.default_rng(seed)

    def several(weights: bool) -> JaggedIds:
        lengths = torch.from_numpy(random.integers(0, 4, size))
        count = int(lengths.sum())
        factors = torch.from_numpy(random.random(count, np.float32)) if weights else None
        return JaggedIds(torch.from_numpy(random.integers(0, IDS, count)), lengths, factors)

    user = JaggedIds.single(torch.from_numpy(random.integers(0, IDS, size)))
    return {"user": user, "item": several(False), "seen": several(True)}


def tables(engine: str, *, rank: int = 0, group: Any = None, **changes: Any) -> SparseEmbeddings | TorchRecEmbeddings:
    settings = [replace(table, **changes) for table in (USERS, ITEMS)]
    if engine == "stoker":
        return SparseEmbeddings(settings, FEATURES, seed=1, group=group)
    return TorchRecEmbeddings(settings, FEATURES, rows=ROWS, seed=1, group=group)


def numbers_of(ids: torch.Tensor, table: str) -> torch.Tensor:
    """The rows that ids have in a table of TorchRec's."""
    hashes = hashes_of(ids.numpy(), salt_of("index", table))
    return torch.from_numpy((hashes % np.uint64(ROWS[table])).view(np.int64))


def with_values_of(own: SparseEmbeddings, model: TorchRecEmbeddings) -> None:
    """Gives TorchRec's rows the first values that ids have in Stoker's tables."""
    everything = JaggedIds.single(torch.arange(IDS))
    own(dict.fromkeys(FEATURES, everything))
    own.end_empty_steps(1)
    found = own.state().tables
    for name, table in found.items():
        at = numbers_of(table.ids, name)
        assert len(at.unique()) == len(at) == IDS
        model.put(SparseState(1, None, {name: replace(table, ids=at)}))


def trained(model: SparseEmbeddings | TorchRecEmbeddings, steps: int, *, passes: int = 1, share: slice = slice(None)):  # type: ignore[no-untyped-def]
    losses = []
    for step in range(steps):
        losses.append(0.0)
        for number in range(passes):
            ids = {name: _part(some, share) for name, some in batch(10 * step + number).items()}
            loss = torch.cat([rows.flatten(1) for rows in model(ids).values()], dim=1).sum(1).sin().sum()
            loss.backward()
            losses[-1] += float(loss.detach())
        if step == 1:
            model.discard()
        else:
            model.apply_gradients(scale=0.5, lr_factor=1 / (1 + step))
    return losses


def _part(ids: JaggedIds, share: slice) -> JaggedIds:
    chosen = torch.arange(len(ids.lengths))[share]
    owner = torch.repeat_interleave(torch.arange(len(ids.lengths)), ids.lengths)
    kept = torch.isin(owner, chosen)
    return JaggedIds(ids.ids[kept], ids.lengths[share], None if ids.weights is None else ids.weights[kept])


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("passes", [1, 2])
def test_losses_and_rows_are_those_of_the_own_tables(optimizer: str, passes: int) -> None:
    own, model = tables("stoker", optimizer=optimizer), tables("torchrec", optimizer=optimizer)
    with_values_of(own, model)
    expected, found = trained(own, 5, passes=passes), trained(model, 5, passes=passes)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, table in own.state().tables.items():
        ours, theirs = table, model.state().tables[name]
        at = numbers_of(ours.ids, name)
        torch.testing.assert_close(theirs.values[at], ours.values, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(theirs.optimizer[at], ours.optimizer, rtol=1e-4, atol=1e-6)
        others = torch.ones(ROWS[name], dtype=torch.bool)
        others[at] = False
        assert torch.equal(theirs.values[others], tables("torchrec").state().tables[name].values[others])
    assert model.version == own.version == 5


def test_every_row_that_was_looked_up_is_trained() -> None:
    model = tables("torchrec")
    changed_rows(model)


def changed_rows(model: TorchRecEmbeddings, size: int = 6) -> dict[str, int]:
    """How many rows of this process' tables a step has changed: all that were looked up, on all processes."""
    before, ids = model.state().tables, batch(3, size)
    sum(rows.sum() for rows in model(ids).values()).backward()  # type: ignore[union-attr]
    model.apply_gradients()
    found = {}
    for name, table in model.state().tables.items():
        looked_up = torch.cat([some.ids for feature, some in ids.items() if FEATURES[feature].table == name]).unique()
        changed = (table.values != before[name].values).any(1).nonzero()[:, 0]
        assert changed.tolist() == sorted(set(numbers_of(looked_up, name).tolist()))
        assert (table.optimizer[changed] > 0).all()
        found[name] = len(changed)
    return found


def on_a_rank(expected: list[float]) -> tuple[list[float], dict[str, int], bool, dict[str, int]]:
    """Losses of a process' share, rows that changed, whether its gradients are finite, rows held."""
    dist_group = dist.group.WORLD
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tables("torchrec", group=dist_group)
    losses = trained(model, 4, share=slice(rank, None, world))
    model.eval()
    uneven = model(batch(50, 3 + 2 * rank))  # processes with other numbers of samples
    assert uneven["user"].shape == (3 + 2 * rank, 4)
    model.train()
    (model(batch(60, 1 + rank))["user"].sum() * (1 if rank else torch.nan)).backward()
    finite = model.gradients_are_finite()
    model.discard()
    changed = changed_rows(tables("torchrec", group=dist_group))
    return losses, changed, finite, model.rows


@pytest.mark.slow  # every process of the pool imports TorchRec
def test_processes_compute_what_one_does(pool: Pool) -> None:
    alone = trained(tables("torchrec"), 4)
    for world in (2, 3):
        ranks = pool.run(on_a_rank, alone, world=world)
        assert [sum(parts) for parts in zip(*(losses for losses, *_ in ranks), strict=True)] == pytest.approx(
            alone, rel=1e-5
        )
        held = {name: [rows[name] for *_, rows in ranks] for name in ROWS}
        assert {name: sum(rows) for name, rows in held.items()} == ROWS  # each table whole, on one process
        assert {name for _, changed, *_ in ranks for name in changed} == set(ROWS)
        assert [finite for *_, finite, _ in ranks] == [False] + [True] * (world - 1)


def test_a_state_is_taken_over_with_its_optimizer() -> None:
    one, other = tables("torchrec"), tables("torchrec")
    trained(one, 3)
    for part in one.parts(rows=700):
        other.put(part)
    assert other.version == one.version == 2  # one step was discarded
    assert trained(other, 3) == trained(one, 3)
    for name, table in one.state().tables.items():
        assert torch.equal(other.state().tables[name].values, table.values)
        assert torch.equal(other.state().tables[name].optimizer, table.optimizer)
    with pytest.raises(ValueError, match="there is row 2999, and this job's have 2000"):
        other.put(SparseState(0, None, {"items": one.state().tables["users"]}))
    with pytest.raises(ValueError, match="does not know which rows have changed"):
        one.state(since=1)


def test_evaluation_changes_nothing() -> None:
    model = tables("torchrec").eval()
    before = model.state().tables
    rows = model(batch(1))
    assert not rows["user"].requires_grad
    model.apply_gradients()
    assert all(torch.equal(model.state().tables[name].values, table.values) for name, table in before.items())
    assert all(found.all() for found in model.found(batch(1)).values())


def test_a_table_that_would_never_be_trained_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where TorchRec's planner takes the dense kernel, which it does for some tables on a CPU."""
    inner = tables("torchrec")._inner
    assert isinstance(inner, TorchRecTables)
    inner._check_fused()
    params = {key: weight for key, weight in inner._optimizer.params.items() if "table1" not in key}
    monkeypatch.setattr(inner, "_optimizer", SimpleNamespace(params=params))
    with pytest.raises(RuntimeError, match="would never train table 'items'"):
        inner._check_fused()


def test_without_it_the_matched_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.delitem(sys.modules, "stoker.sparse.torchrec_tables")
    with pytest.raises(CannotRun, match=r"torchrec==1\.8\.0"):
        tables("torchrec")


def test_what_it_cannot_do_is_refused() -> None:
    wrong = replace(USERS, admission=Admission(count=2), optimizer="ftrl", dtype="int8")
    with pytest.raises(UserError) as caught:
        TorchRecEmbeddings([wrong, ITEMS], {**FEATURES, "h": Feature("items", pooling="none")}, rows={"users": 30})
    text = str(caught.value)
    for named in ("admission", "ftrl", "int8", "not pooled", "no number of rows"):
        assert named in text
    for changes in ({"lr": 0.2}, {"eps": 1e-3}, {"weight_decay": 0.1}):
        with pytest.raises(UserError, match="several optimizers"):
            TorchRecEmbeddings([USERS, replace(ITEMS, **changes)], FEATURES, rows=ROWS)
    other: list[tuple[dict[str, Any], str]] = [
        ({"eviction": Eviction(age=2, every=3)}, "has eviction"),
        ({"disk": DiskTier(Path("rows"), 9)}, "has disk"),
        ({"initial": 0.1}, "has an initial accumulator"),
    ]
    for changes, said in other:
        with pytest.raises(UserError, match=said):
            tables("torchrec", **changes)
    with pytest.raises(UserError, match="'items' has no features"):
        TorchRecEmbeddings([USERS, ITEMS], {"user": Feature("users")}, rows=ROWS)


def test_gradients_of_one_feature_that_are_not_finite_are_enough() -> None:
    model = tables("torchrec")
    pooled = model(batch(1))
    (pooled["item"].sum() + pooled["user"].sum() * torch.nan).backward()
    assert not model.gradients_are_finite()


def test_first_values_depend_on_the_seed_and_the_table() -> None:
    first = first_values(USERS, 5, 1)
    assert torch.equal(first, first_values(USERS, 5, 1)) and first.abs().max() <= USERS.init_scale
    assert not torch.equal(first, first_values(USERS, 5, 2))
    assert not torch.equal(first, first_values(replace(USERS, name="items"), 5, 1))
