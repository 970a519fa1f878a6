"""Passes that evict rows: the rows and the default row against a model in plain Python, on any number of shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sparse.eviction_pass import Candidates, EvictionPlan, eviction_plans, is_due
from stoker.sparse.hashing import owners_of
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import DefaultRow, Eviction, Score, TableSettings
from stoker.sparse.table_shard import TableShard

STEPS = 6


Row = tuple[int, int, list[float]]  # occurrences, the step in which its id was last seen, values


def keys_of(shard: TableShard, ids: np.ndarray, table: int) -> Keys:
    return Keys.of(np.ascontiguousarray(ids, np.int64), np.full(len(ids), table), shard.salts)


def filled(tables: list[TableSettings], rank: int, world: int, seed: int) -> TableShard:
    """A shard whose rows have few different values, so that many scores are equal."""
    shard = TableShard(tables, seed=0, rank=rank, world=world)
    random = np.random.default_rng(seed)
    for _ in range(STEPS):
        for number in range(len(tables)):
            ids = random.integers(0, 60, 25)
            keys = keys_of(shard, ids, number)
            mine = owners_of(keys.hashes, world) == rank
            found = shard.look_up(keys[np.flatnonzero(mine)])
            values = (shard.index.ids[found.unique] % 4)[:, None] * np.ones(tables[number].width)
            shard.store.write(found.unique, torch.from_numpy(values), shard.store.state(found.unique))
        shard.end_step()
    return shard


def evict(*layouts: list[TableShard]) -> list[EvictionPlan]:
    candidates = [[Candidates(shard) for shard in shards] for shards in layouts]

    def totals(number: int, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        return np.sum([some.answer(what, arrays) for some in candidates[number]], axis=0)

    tables, before = [shards[0].tables for shards in layouts], [shards[0].evicted for shards in layouts]
    plans = eviction_plans(tables, layouts[0][0].step, before, totals)
    for shards, some, plan in zip(layouts, candidates, plans, strict=True):
        for shard, own in zip(shards, some, strict=True):
            shard.evict(own, plan)
    return plans


def rows_of(shards: list[TableShard], name: str) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for shard in shards:
        state = dict(shard.state(is_base=False))[name]
        columns = (state.ids.tolist(), state.seen.tolist(), state.last.tolist(), state.values.tolist())
        found |= {number: (seen, last, values) for number, seen, last, values in zip(*columns, strict=True)}
    return found


def model_of(rule: Eviction, rows: dict[tuple[str, int], Row], hashes: dict[tuple[str, int], int]) -> set[Any]:
    """The tables and ids that go."""

    def score(key: tuple[str, int]) -> float:
        seen, last, values = rows[key]
        norm = float(np.linalg.norm(values))
        found = {"norm-frequency": norm * seen, "frequency": seen, "norm": norm, "recency": last}[rule.score]
        return float(np.float32(found))

    old = [key for key, (_, last, _) in rows.items() if STEPS - 1 - last >= rule.age]
    old.sort(key=lambda key: (score(key), hashes[key] & (2**32 - 1)))
    return set(old if rule.max_rows is None else old[: max(0, len(rows) - rule.max_rows)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 1000),
    st.sampled_from(["norm-frequency", "frequency", "norm", "recency"]),
    st.one_of(st.none(), st.integers(1, 140)),
    st.integers(1, 3),
    st.sampled_from(["zeros", "mean"]),
)
def test_the_rows_of_lowest_score_go(
    world: int, seed: int, score: Score, max_rows: int | None, age: int, default_row: DefaultRow
) -> None:
    """Those of two tables of different width together; a third one has no rule."""
    rule = Eviction(age=age, every=STEPS, max_rows=max_rows, score=score, default_row=default_row)
    common: dict[str, Any] = {"optimizer": "sgd", "dtype": "float64", "init_scale": 0.0}
    narrow = [TableSettings("a", 1, eviction=rule, **common)]
    wide = [TableSettings("b", 2, **common), TableSettings("c", 2, eviction=rule, **common)]

    def made(world: int) -> list[list[TableShard]]:
        return [[filled(tables, rank, world, seed) for rank in range(world)] for tables in (narrow, wide)]

    layouts = made(world)
    places = {"a": (layouts[0], 0), "c": (layouts[1], 1)}
    before = {(name, n): row for name, (shards, _) in places.items() for n, row in rows_of(shards, name).items()}
    hashes = {}
    for name, (shards, table) in places.items():
        ids = np.array([n for other, n in before if other == name])
        found = keys_of(shards[0], ids, table).hashes.tolist()
        hashes |= {(name, n): one for n, one in zip(ids.tolist(), found, strict=True)}
    other = rows_of(layouts[1], "b")
    gone = model_of(rule, before, hashes)
    plans = evict(*layouts)
    assert {(name, n) for name, (shards, _) in places.items() for n in rows_of(shards, name)} == set(before) - gone
    assert rows_of(layouts[1], "b") == other and not plans[1].evicted[0].any()
    for plan, (name, (_, table)) in zip(plans, places.items(), strict=True):
        mine = [before[key] for key in gone if key[0] == name]
        assert plan.evicted[table, 0] == len(mine)
        weights = np.array([seen for seen, _, _ in mine], float)
        expected = np.zeros(1 + len(plan.evicted[table]) - 2)
        if default_row == "mean" and mine:
            expected[0] = weights.sum()
            expected[1:] = np.average([values for _, _, values in mine], axis=0, weights=weights)
        np.testing.assert_allclose(plan.evicted[table, 1:], expected, rtol=1e-12)
    for plan, alone in zip(plans, evict(*made(1)), strict=True):
        assert np.array_equal(alone.evicted, plan.evicted) and np.array_equal(alone.below, plan.below)


def test_each_pass_halves_the_weight_of_those_before_it() -> None:
    rule = Eviction(every=1, default_row="mean")
    shard = TableShard([TableSettings("t", 1, optimizer="sgd", dtype="float64", eviction=rule)], seed=0)
    weight, mean = 0.0, 0.0
    for number in range(1, 5):
        found = shard.look_up(keys_of(shard, np.full(number, 7), 0))
        shard.store.write(found.unique, torch.full((1, 1), 10.0**number / 3, dtype=torch.float64), torch.zeros(1, 0))
        for _ in range(2):  # the second step does not see the id
            shard.end_step()
            assert is_due(shard.tables, shard.step)
            evict([shard])
        mean = (weight / 2 * mean + number * 10.0**number / 3) / (weight / 2 + number)
        weight = weight / 2 + number
        np.testing.assert_allclose(shard.evicted, [[number, weight, mean]], rtol=1e-12)
    assert not is_due([TableSettings("t", 1, eviction=Eviction(every=3))], 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_does_not_enter_the_default_row(bad: float) -> None:
    rule = Eviction(every=1, default_row="mean")
    shard = TableShard([TableSettings("t", 2, optimizer="sgd", dtype="float64", eviction=rule)], seed=0)
    found = shard.look_up(keys_of(shard, np.array([7, 8, 8]), 0))
    values = torch.tensor([[1.0, bad], [3.0, 4.0]], dtype=torch.float64)
    shard.store.write(found.unique, values, torch.zeros(2, 0))
    shard.end_step()
    shard.end_step()
    evict([shard])
    np.testing.assert_array_equal(shard.evicted, [[2, 2, 3, 4]])  # two rows, one of them with two occurrences


def test_a_huge_value_enters_the_default_row_as_the_largest_that_is_summed() -> None:
    rule = Eviction(every=1, default_row="mean")
    shard = TableShard([TableSettings("t", 2, optimizer="sgd", dtype="float64", eviction=rule)], seed=0)
    found = shard.look_up(keys_of(shard, np.array([7]), 0))
    shard.store.write(found.unique, torch.tensor([[1e30, -1e30]], dtype=torch.float64), torch.zeros(1, 0))
    shard.end_step()
    shard.end_step()
    evict([shard])
    np.testing.assert_array_equal(shard.evicted, [[1, 1, 2.0**40, -(2.0**40)]])


def test_rules_are_ranked_in_the_order_of_the_tables() -> None:
    """Each takes collectives: an order that differs between processes would mix the sums of two rules."""
    more = [5, 2, 7, 1, 8, 3, 6, 4]  # rows above each rule's limit
    tables = [TableSettings(f"t{n}", 1, eviction=Eviction(every=1, max_rows=100 - n)) for n in more]
    seen: list[int] = []

    def totals(number: int, what: str, arrays: list[np.ndarray]) -> np.ndarray:
        if what == "digits" and arrays[0][1] == 48 and number == 0:  # the second digit: the first is in the prefix
            seen.append(int(arrays[0][0]))
        return {"rows": np.array([[100, 100]]), "digits": np.ones((1, 256), int), "sums": np.zeros((1, 4), int)}[what]

    eviction_plans([[table] for table in tables], 1, [np.zeros((1, 3))] * len(tables), totals)
    assert seen == [n - 1 for n in more]


def test_a_rule_keeps_at_least_one_row() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Eviction(max_rows=0)
