"""Tables against torch's own embeddings on static ids, and many processes against one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.launch.process_pool import Pool
from stoker.sparse import Admission, Eviction, Feature, JaggedIds, SparseEmbeddings, TableSettings
from stoker.sparse.sparse_state import SparseState

IDS, WIDTH, BATCH, STEPS = 50, 4, 12, 6
Change = Callable[[TableSettings], TableSettings]
USERS = TableSettings("users", WIDTH, optimizer="adagrad", lr=0.1, dtype="float64", init_scale=1.0)
ITEMS = replace(USERS, name="items")
WORDS = replace(USERS, name="words", width=3, optimizer="sgd")
FEATURES = {
    "user": Feature("users"),
    "friends": Feature("users", pooling="mean"),
    "items": Feature("items", pooling="sum"),
    "history": Feature("items", pooling="none", longest=3),
    "words": Feature("words", pooling="mean"),
}
NAMES = torch.randint(-(2**63), 2**63 - 1, (IDS,), generator=torch.Generator().manual_seed(5))  # any 64-bit ids


def jagged(generator: torch.Generator, longest: int, *, weighted: bool = False) -> JaggedIds:
    lengths = torch.randint(0, longest + 1, (BATCH,), generator=generator)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator, dtype=torch.float64) if weighted else None
    return JaggedIds(NAMES[ids], lengths, weights)


def batch_of(step: int) -> dict[str, JaggedIds]:
    generator = torch.Generator().manual_seed(step)
    user = JaggedIds.single(NAMES[torch.randint(0, IDS, (BATCH,), generator=generator)])
    friends, items = jagged(generator, 4), jagged(generator, 5, weighted=True)
    return {
        "user": user,
        "friends": friends,
        "items": items,
        "history": jagged(generator, 5),
        "words": jagged(generator, 2),
    }


def part_of(batch: dict[str, JaggedIds], rank: int, world: int) -> dict[str, JaggedIds]:
    """Some samples: every process has others, and the last one the most."""
    low, high = (BATCH * n * (n + 1) // (world * (world + 1)) for n in (rank, rank + 1))
    found = {}
    for name, whole in batch.items():
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), whole.lengths.cumsum(0)])
        ids = slice(int(starts[low]), int(starts[high]))
        found[name] = JaggedIds(
            whole.ids[ids], whole.lengths[low:high], None if whole.weights is None else whole.weights[ids]
        )
    return found


def loss_of(pooled: dict[str, Tensor]) -> Tensor:
    """Not linear, so that gradients depend on the rows; a sum over samples."""
    rows = [value.flatten(1) for _, value in sorted(pooled.items())]
    return torch.cat(rows, dim=1).sum(1).sin().sum() + sum(row.pow(2).sum() for row in rows) / 10


class Plain(nn.Module):
    """The same features with torch's modules; the row of an id is its place in ``NAMES``."""

    def __init__(self, tables: SparseEmbeddings) -> None:
        super().__init__()
        tables.eval()
        self.weights: dict[str, nn.Parameter] = {}
        for feature, table in (("user", "users"), ("items", "items"), ("words", "words")):
            first = first_values(tables, feature)
            self.weights[table] = nn.Parameter(first)

    def forward(self, batch: dict[str, JaggedIds]) -> dict[str, Tensor]:
        def bag(name: str, table: str, mode: str) -> Tensor:
            ids = batch[name]
            offsets = ids.lengths.cumsum(0) - ids.lengths
            return nn.functional.embedding_bag(
                places(ids.ids), self.weights[table], offsets, mode=mode, per_sample_weights=ids.weights
            )

        history = batch["history"]
        parts = places(history.ids).split(history.lengths.tolist())
        rows = [nn.functional.embedding(part[-3:], self.weights["items"]) for part in parts]
        padded = torch.stack([torch.cat([row, row.new_zeros(3 - len(row), WIDTH)]) for row in rows])
        return {
            "user": nn.functional.embedding(places(batch["user"].ids), self.weights["users"]),
            "friends": bag("friends", "users", "mean"),
            "items": bag("items", "items", "sum"),
            "history": padded,
            "words": bag("words", "words", "mean"),
        }


def places(ids: Tensor) -> Tensor:
    order = NAMES.argsort()
    return order[torch.searchsorted(NAMES[order], ids)]


def first_values(tables: SparseEmbeddings, feature: str) -> Tensor:
    """Rows of all ids, which training mode makes."""
    tables.train()
    nothing = JaggedIds(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    with torch.no_grad():
        return tables({name: JaggedIds.single(NAMES) if name == feature else nothing for name in FEATURES})[feature]


def trained(tables: SparseEmbeddings, *, rank: int = 0, world: int = 1, steps: range = range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(tables(part_of(batch_of(step), rank, world)))
        loss.backward()
        tables.apply_gradients()
        losses.append(float(loss.detach()))
    return losses


def made(group: dist.ProcessGroup | None = None, change: Change = lambda t: t) -> SparseEmbeddings:
    return SparseEmbeddings([change(table) for table in (USERS, ITEMS, WORDS)], FEATURES, seed=3, group=group)


def all_rows(parts: list[SparseState]) -> dict[str, tuple[Tensor, ...]]:
    """Of all processes, in the order of ids."""
    found = {}
    for name in parts[0].tables:
        columns = zip(
            *((t.ids, t.values, t.optimizer, t.seen, t.last) for t in (part.tables[name] for part in parts)),
            strict=True,
        )
        ids, *rest = map(torch.cat, columns)
        order = ids.argsort()
        found[name] = (ids[order], *(column[order] for column in rest))
    return found


def test_static_ids_are_trained_as_by_torch() -> None:
    tables = made()
    plain = Plain(tables)
    adagrad = torch.optim.Adagrad([plain.weights["users"], plain.weights["items"]], lr=0.1, eps=1e-8)
    sgd = torch.optim.SGD([plain.weights["words"]], lr=0.1)
    tables.discard()
    for step in range(STEPS):
        losses = [loss_of(model(batch_of(step))) for model in (tables, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
        adagrad.zero_grad(), sgd.zero_grad()
        for loss in losses:
            loss.backward()
        assert tables.gradients_are_finite()
        tables.apply_gradients(), adagrad.step(), sgd.step()
    for name, (ids, values, *_) in all_rows([tables.state()]).items():
        torch.testing.assert_close(values, plain.weights[name][places(ids)].detach(), rtol=1e-12, atol=1e-12)


def on_a_rank(change: Change, steps: range, parts: list[SparseState]) -> tuple[list[float], SparseState]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tables = made(dist.group.WORLD if world > 1 else None, change)
    tables.load(parts)
    losses = trained(tables, rank=rank, world=world, steps=steps)
    return losses, tables.state()


def summed(ranks: list[tuple[list[float], SparseState]]) -> list[float]:
    """The loss of each step over all processes."""
    return [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)]


def as_it_is(table: TableSettings) -> TableSettings:
    return table


def coming_and_going(table: TableSettings) -> TableSettings:
    admission = Admission(count=2, probability=0.9, cells=2**14)
    return replace(table, admission=admission, eviction=Eviction(age=1, every=2, frequency=5), optimizer="adam")


def bounded(table: TableSettings) -> TableSettings:
    eviction = Eviction(every=2, max_rows=29, default_row="mean")
    return replace(table, admission=Admission(count=2), eviction=eviction)


@pytest.mark.parametrize("change", [as_it_is, coming_and_going, bounded])
def test_any_number_of_processes_trains_alike(change: Change, pool: Pool) -> None:
    [(losses, state)] = pool.run(on_a_rank, change, range(STEPS), [], world=1)
    expected = all_rows([state])
    assert all(len(ids) for ids, *_ in expected.values())
    for world in (2, 3):
        ranks = pool.run(on_a_rank, change, range(STEPS), [], world=world)
        assert [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)] == pytest.approx(
            losses, rel=1e-12
        )
        assert all(len(table.ids) for _, part in ranks for table in part.tables.values())
        for name, columns in all_rows([part for _, part in ranks]).items():
            torch.testing.assert_close(columns, expected[name], rtol=1e-11, atol=1e-13)
            for _, part in ranks:
                found = part.tables[name].evicted
                torch.testing.assert_close(found, state.tables[name].evicted, rtol=1e-11, atol=1e-13)
    assert change is as_it_is or all(table.evicted[0, 0] > 0 for table in state.tables.values())


EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]  # the ids where signs and the marks of unused entries would show


def uneven(change: Change, of: int) -> tuple[list[float], SparseState]:
    """Trains where one process has no sample, then one feature no id; evaluates between; another table has no row."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tables = made(dist.group.WORLD if world > 1 else None, change)
    none = torch.empty(0, dtype=torch.int64)
    nothing = JaggedIds(none, none)
    losses = []
    for step in range(of):
        edges = JaggedIds.single(torch.tensor(EDGES))
        whole = dict.fromkeys(FEATURES, JaggedIds(none, torch.zeros(len(EDGES), dtype=torch.int64)))
        whole |= {"user": edges, "history": edges} if step % 2 else {"user": edges}
        own = whole if rank == step % world else dict.fromkeys(FEATURES, nothing)
        loss = loss_of(tables(own))
        loss.backward()
        tables.apply_gradients()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            tables.eval()(own if rank else dict.fromkeys(FEATURES, nothing))
        tables.train()
    return losses, tables.state()


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_processes_without_samples_features_without_ids_and_the_outermost_ids(dtype: str, pool: Pool) -> None:
    change = int8 if dtype == "int8" else as_it_is
    [(losses, state)] = pool.run(uneven, change, 5, world=1)
    assert state.tables["users"].ids.tolist() == state.tables["items"].ids.tolist() == EDGES
    assert not len(state.tables["words"].ids)
    for world in (2, 3):
        ranks = pool.run(uneven, change, 5, world=world)
        assert summed(ranks) == pytest.approx(losses, rel=1e-12)
        for name, columns in all_rows([part for _, part in ranks]).items():
            torch.testing.assert_close(columns, all_rows([state])[name], rtol=1e-11, atol=1e-13)
        again = made(change=change)
        again.load([part for _, part in ranks])
        for name, columns in all_rows([again.state()]).items():
            torch.testing.assert_close(columns, all_rows([state])[name], rtol=1e-11, atol=1e-13)


def int8(table: TableSettings) -> TableSettings:
    return replace(table, dtype="int8")


@pytest.mark.parametrize("change", [as_it_is, coming_and_going, bounded])
def test_two_processes_state_goes_on_in_any_number(change: Change, pool: Pool) -> None:
    half = STEPS // 2
    ranks = pool.run(on_a_rank, change, range(half), [], world=2)
    parts = [SparseState.from_tensors(part.tensors()) for _, part in ranks]
    whole = pool.run(on_a_rank, change, range(STEPS), [], world=2)
    expected = summed(whole)[half:]
    for world in (1, 3, 2):
        going_on = pool.run(on_a_rank, change, range(half, STEPS), parts, world=world)
        assert summed(going_on) == pytest.approx(expected, rel=1e-12)
    for name, columns in all_rows([part for _, part in going_on]).items():  # two, as before: the same arithmetic
        for column, other in zip(columns, all_rows([part for _, part in whole])[name], strict=True):
            assert torch.equal(column, other)
        assert torch.equal(going_on[0][1].tables[name].evicted, whole[0][1].tables[name].evicted)


def test_ids_without_a_row_have_the_mean_of_those_that_were_evicted() -> None:
    tables = made(change=bounded)
    trained(tables, steps=range(2))
    state = tables.state().tables["users"]
    assert int(state.evicted[0, 0]) > 0 and len(state.ids) < 29  # those of the last step stay
    tables.eval()
    unknown = JaggedIds.single(torch.tensor([123456789]))
    found = tables(batch_of(1) | {"user": unknown})["user"]
    assert found.any() and torch.equal(found[0], state.evicted[0, 2:])
    assert torch.equal(torch.from_numpy(tables.default_rows()["users"]), state.evicted[0, 2:])
    tables.train()
    rows = tables(batch_of(1) | {"user": unknown})["user"]  # waits for its second occurrence
    assert torch.equal(rows, found)
    (rows.sum() * torch.nan).backward()
    assert tables.gradients_are_finite()  # no row gets them
    tables.apply_gradients()
    assert torch.equal(tables.state().tables["users"].evicted, state.evicted)
    counts = tables.admissions()
    assert (counts.rows, counts.admitted - counts.rows) == (sum(tables.rows.values()), counts.evicted)


def test_micro_batches_change_nothing() -> None:
    whole, parts = made(change=coming_and_going), made(change=coming_and_going)
    for step in range(STEPS):
        trained(whole, steps=range(step, step + 1))
        for rank in range(3):
            loss_of(parts(part_of(batch_of(step), rank, 3))).backward()
        parts.apply_gradients()
    expected = all_rows([whole.state()])
    for name, columns in all_rows([parts.state()]).items():
        torch.testing.assert_close(columns, expected[name], rtol=1e-11, atol=1e-13)


def test_scale_and_learning_rate_are_factors() -> None:
    one, other = made(change=lambda t: replace(t, optimizer="sgd")), made(change=lambda t: replace(t, optimizer="sgd"))
    for tables, scale, lr_factor in ((one, 0.25, 2.0), (other, 0.5, 1.0)):
        loss_of(tables(batch_of(0))).backward()
        tables.apply_gradients(scale=scale, lr_factor=lr_factor)
    for name, columns in all_rows([one.state()]).items():
        torch.testing.assert_close(columns, all_rows([other.state()])[name], rtol=1e-14, atol=0)


def test_weights_of_means_and_of_sequences() -> None:
    """A mean is divided by the sum of its weights, and the last ids of a sequence keep their own ones."""
    features = {"mean": Feature("users", pooling="mean"), "last": Feature("users", pooling="none", longest=2)}
    tables = SparseEmbeddings([USERS], features, seed=0)
    ids, weights = NAMES[:6], torch.tensor([1.0, 2.0, 0.5, 4.0, -4.0, 3.0])
    given = JaggedIds(ids, torch.tensor([3, 0, 2, 1]), weights)
    r = tables({"mean": JaggedIds.single(ids), "last": given})["mean"]
    found, nothing = tables({"mean": given, "last": given}), torch.zeros(WIDTH, dtype=torch.float64)
    torch.testing.assert_close(
        found["mean"], torch.stack([(r[0] + 2 * r[1] + 0.5 * r[2]) / 3.5, nothing, nothing, r[5]])
    )
    last = [[2 * r[1], 0.5 * r[2]], [nothing, nothing], [4 * r[3], -4 * r[4]], [3 * r[5], nothing]]
    torch.testing.assert_close(found["last"], torch.stack([torch.stack(rows) for rows in last]))


def test_lookups_without_gradients_update_no_row() -> None:
    table = replace(USERS, optimizer="adam", weight_decay=0.1)
    tables = SparseEmbeddings([table], {"user": Feature("users")}, seed=0)
    ids = {"user": JaggedIds.single(NAMES[:3])}
    with torch.no_grad():
        before = tables(ids)["user"]
    tables.apply_gradients()
    assert tables.rows == {"users": 3} and torch.equal(tables.eval()(ids)["user"], before)


def test_a_discarded_step_leaves_no_trace() -> None:
    tables = made()
    trained(tables, steps=range(1))
    before = all_rows([tables.state()])
    for step in (0, 1, 2):
        loss_of(tables(batch_of(step))).backward()
    tables.discard()
    assert tables.version == 1
    for name, (ids, values, optimizer, *_) in all_rows([tables.state()]).items():
        assert torch.equal(ids, before[name][0])
        assert torch.equal(values, before[name][1])
        assert torch.equal(optimizer, before[name][2])


def test_a_step_that_is_taken_again_is_the_same_step() -> None:
    """Rounding, admission, ages and evictions know nothing of the first attempt."""

    def change(table: TableSettings) -> TableSettings:
        rules = {"admission": Admission(probability=0.6), "eviction": Eviction(age=1, every=2)}
        return replace(table, dtype="float16", **rules)

    def states(failing: int) -> SparseState:
        tables = made(change=change)
        for step in range(6):
            if step == failing:
                loss_of(tables(batch_of(step))).backward()
                tables.discard()
            trained(tables, steps=range(step, step + 1))
        return tables.state()

    undisturbed, disturbed = states(-1), states(1)
    assert disturbed.step == undisturbed.step
    for name, columns in all_rows([undisturbed]).items():
        assert len(columns[0])
        assert all(torch.equal(a, b) for a, b in zip(columns, all_rows([disturbed])[name], strict=True))


def test_steps_that_were_left_out_are_empty_ones() -> None:
    def change(table: TableSettings) -> TableSettings:
        return replace(table, eviction=Eviction(age=1, every=2))

    tables = made(change=change)
    trained(tables, steps=range(1))
    loss_of(tables(batch_of(1))).backward()
    tables.discard()
    assert any(tables.rows.values())
    tables.end_empty_steps(2)
    assert tables.version == 2
    assert not any(tables.rows.values())
    tables.end_empty_steps(1)
    assert tables.version == 2


def test_evaluation_gives_unknown_ids_zeros_and_changes_nothing() -> None:
    tables = made()
    trained(tables, steps=range(1))
    before = all_rows([tables.state()])
    tables.eval()
    unknown = JaggedIds.single(torch.tensor([123456789]))
    assert not tables(batch_of(1) | {"user": unknown})["user"].any()
    tables.discard()
    after = all_rows([tables.state()])
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))


def test_an_incremental_state_brings_an_older_one_up_to_date() -> None:
    def change(table: TableSettings) -> TableSettings:
        return replace(table, eviction=Eviction(age=1, every=2, frequency=2), optimizer="adam")

    tables = made(change=change)
    trained(tables, steps=range(3))
    full = tables.state()
    trained(tables, steps=range(3, 6))
    delta = tables.state(since=full.step)
    assert any(len(table.removed) for table in delta.tables.values())
    assert any(len(table.ids) < len(tables.state().tables[name].ids) for name, table in delta.tables.items())
    other = made(change=change)
    other.load([full])
    other.load([delta])
    expected = all_rows([tables.state()])
    for name, columns in all_rows([other.state()]).items():
        assert all(torch.equal(a, b) for a, b in zip(columns, expected[name], strict=True))
