"""One process' rows: admission, eviction and rounding against a model in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sparse.eviction_pass import Candidates, eviction_plans, is_due
from stoker.sparse.hashing import owners_of, salt_of
from stoker.sparse.sketch import CountMinSketch
from stoker.sparse.sparse_state import TableState
from stoker.sparse.table_keys import Keys
from stoker.sparse.table_settings import Admission, Dtype, Eviction, TableSettings
from stoker.sparse.table_shard import MOST_SEEN, TableShard
from stoker.sparse.value_format import RowFormat

TABLE = TableSettings("t", 2, optimizer="sgd", lr=1.0, dtype="float64")


def keys_of(shard: TableShard, ids: list[int], table: int = 0) -> Keys:
    return Keys.of(np.array(ids, np.int64), np.full(len(ids), table), shard.salts)


def end_step(shard: TableShard) -> None:
    """Ends a step as processes that share the tables do; this one has all of them."""
    shard.end_step()
    if is_due(shard.tables, shard.step):
        candidates = Candidates(shard)
        totals = lambda _, what, arrays: candidates.answer(what, arrays)  # noqa: E731
        shard.evict(candidates, *eviction_plans([shard.tables], shard.step, [shard.evicted], totals))


def ids_in(shard: TableShard, name: str = "t") -> list[int]:
    return dict(shard.state())[name].ids.tolist()


@dataclass
class Model:
    """The rules, one id at a time. The sketch is exact, as long as few ids are counted."""

    table: TableSettings
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # seen, last
    waiting: dict[int, int] = field(default_factory=dict)
    step: int = 0

    def end_step(self, ids: list[int]) -> None:
        for number in sorted(set(ids)):
            count = ids.count(number)
            if number in self.rows:
                self.rows[number] = (self.rows[number][0] + count, self.step)
                continue
            self.waiting[number] = self.waiting.get(number, 0) + count
            if self.table.admission is None or self.waiting[number] >= self.table.admission.count:
                self.rows[number] = (count, self.step)
        rule = self.table.eviction
        if rule and (self.step + 1) % rule.every == 0:
            kept = {
                number: (seen, last)
                for number, (seen, last) in self.rows.items()
                if self.step - last < rule.age or (rule.frequency is not None and seen >= rule.frequency)
            }
            self.rows = kept
        self.step += 1


STEPS = st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=12)
RULES = st.tuples(
    st.one_of(st.none(), st.integers(2, 4).map(lambda count: Admission(count=count, cells=2**22))),
    st.one_of(
        st.none(),
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4))).map(
            lambda rule: Eviction(age=rule[0], every=rule[1], frequency=rule[2])
        ),
    ),
)


@settings(max_examples=80, deadline=None)
@given(RULES, STEPS, st.integers(1, 3))
@pytest.mark.slow
def test_ids_come_and_go_by_the_rules(
    rules: tuple[Admission | None, Eviction | None], steps: list[list[int]], passes: int
) -> None:
    table = replace(TABLE, admission=rules[0], eviction=rules[1])
    shard, model = TableShard([table], seed=0), Model(table)
    for ids in steps:
        for part in range(passes):  # micro-batches of a step
            shard.look_up(keys_of(shard, ids[part::passes]))
        end_step(shard)
        model.end_step(ids)
        state = dict(shard.state())["t"]
        found = zip(state.ids.tolist(), zip(state.seen.tolist(), state.last.tolist(), strict=True), strict=True)
        assert dict(found) == model.rows


def test_rows_with_a_small_norm_are_evicted() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1, norm=0.5))], seed=0)
    rows = shard.look_up(keys_of(shard, [1, 2])).unique
    shard.update(rows, torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64))
    end_step(shard)
    assert ids_in(shard) == [1, 2]
    end_step(shard)
    assert ids_in(shard) == [1]


def test_occurrences_are_counted_up_to_the_largest_number() -> None:
    """A gender is looked up more than 2^31 times; a count that turned negative would get its row evicted."""
    rule = Eviction(age=1, every=1, frequency=2)
    shard = TableShard([replace(TABLE, eviction=rule), replace(TABLE, name="u", admission=Admission())], seed=0)

    def look_up(counts: list[int]) -> np.ndarray:
        return shard.look_up(keys_of(shard, [1, 2][: len(counts)]), np.array(counts)).unique

    rows = look_up([MOST_SEEN - 1, 1])
    shard.look_up(keys_of(shard, [7], table=1), np.array([MOST_SEEN + 5]))
    end_step(shard)
    before = shard.seen[rows].tolist()
    look_up([3]), look_up([4])
    assert shard.seen[rows].tolist() == [MOST_SEEN, 1]
    shard.undo_step()
    assert shard.seen[rows].tolist() == before
    look_up([3])
    end_step(shard)
    end_step(shard)
    assert ids_in(shard) == [1] and ids_in(shard, "u") == [7]
    assert dict(shard.state())["u"].seen.tolist() == [MOST_SEEN]


def test_a_step_that_was_undone_leaves_nothing() -> None:
    """A shard with an undone step before each step has the rows and counters of one without."""
    tables = [TABLE, replace(TABLE, name="u", admission=Admission(count=3, cells=2**22))]
    plain, undoing = (TableShard(tables, seed=0) for _ in range(2))
    for step in range(5):
        undoing.look_up(keys_of(undoing, [10 + step, 1]))
        undoing.look_up(keys_of(undoing, [7, 8], 1))
        undoing.undo_step()
        for shard in (plain, undoing):
            shard.look_up(keys_of(shard, [step, step + 1]))
            shard.look_up(keys_of(shard, [7], 1))
            shard.look_up(keys_of(shard, [1, step]))
            end_step(shard)
        for (name, found), (other, expected) in zip(undoing.state(), plain.state(), strict=True):
            assert name == other
            for part in fields(found):
                assert torch.equal(getattr(found, part.name), getattr(expected, part.name)), (step, name, part.name)
    assert ids_in(plain, "u") == [7] and ids_in(plain) == list(range(6))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8"])
def test_a_preview_has_the_values_of_a_lookup_and_changes_nothing(dtype: Dtype) -> None:
    tables = [replace(TABLE, dtype=dtype), replace(TABLE, name="u", dtype=dtype, admission=Admission(count=2))]
    shard = TableShard(tables, seed=0)
    known, waits = keys_of(shard, [3, 5]), keys_of(shard, [3], 1)
    shard.look_up(known)
    end_step(shard)
    keys = keys_of(shard, [5, 4, 3, 9])
    previewed = shard.preview(keys)
    assert ids_in(shard) == [3, 5] and not shard.preview(waits).any()
    found = shard.look_up(keys)
    assert torch.equal(previewed, shard.values(found.unique)[torch.from_numpy(found.inverse)]) and previewed.any()


def test_an_evicted_id_starts_again_with_its_first_values() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1))], seed=0)
    first = shard.look_up(keys_of(shard, [7])).unique
    before = shard.values(first)
    shard.update(first, torch.ones(1, 2, dtype=torch.float64))
    end_step(shard)
    shard.look_up(keys_of(shard, [8]))
    end_step(shard)
    assert ids_in(shard) == [8]
    assert torch.equal(shard.values(shard.look_up(keys_of(shard, [7])).unique), before)


def test_an_increment_has_the_rows_that_were_seen_since_its_base() -> None:
    shard = TableShard([TABLE], seed=0)
    for step, ids in enumerate(([1, 2], [3], [2, 4], [5])):
        shard.look_up(keys_of(shard, ids))
        end_step(shard)
        if step == 0:
            dict(shard.state())  # the base
    found = [dict(shard.state(since=since))["t"] for since in range(1, 5)]
    assert [state.ids.tolist() for state in found] == [[2, 3, 4, 5], [2, 4, 5], [5], []]


def test_parts_are_joined_in_the_order_of_their_ids() -> None:
    shard = TableShard([TABLE], seed=0)
    for ids in ([9, 2, 4], [2, 7, 7], [-3, 7, 7]):
        shard.look_up(keys_of(shard, ids))
        end_step(shard)
    whole, parts = dict(shard.state())["t"], [part for _, part in shard.state(rows=2)]
    assert len(parts) == 3 and len(set(whole.last.tolist())) == len(set(whole.seen.tolist())) == 3
    joined = TableState.joined([parts[1], parts[2], parts[0]])
    for part in fields(whole):
        assert torch.equal(getattr(joined, part.name), getattr(whole, part.name)), part.name


def test_evicted_ids_are_recorded_from_one_whole_state_to_the_next() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1))], seed=0)

    def steps(first: int, last: int) -> None:
        for number in range(first, last):
            shard.look_up(keys_of(shard, [number]))
            end_step(shard)

    steps(0, 5)
    assert not len(shard.gone)
    with pytest.raises(ValueError, match="there has been none"):
        next(shard.state(since=2))
    assert ids_in(shard) == [4]
    steps(5, 8)
    list(shard.state(is_base=False))
    assert dict(shard.state(since=5))["t"].removed.tolist() == [4, 5, 6]
    assert dict(shard.state(since=7))["t"].removed.tolist() == [6]
    assert ids_in(shard) == [7]
    assert not len(shard.gone)
    with pytest.raises(ValueError, match="that was at 8"):
        next(shard.state(since=5))


def test_evicted_ids_are_recorded_for_the_consumer_that_reaches_back_furthest() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1))], seed=0)
    shard.rebase(0, by="export")
    for number in range(6):  # an id is evicted in the step after its own
        shard.look_up(keys_of(shard, [number]))
        end_step(shard)
    shard.rebase(4, by="checkpoint")
    assert len(shard.gone) == 5
    shard.rebase(3, by="export")
    assert dict(shard.state(since=3))["t"].removed.tolist() == [2, 3, 4]
    shard.rebase(None, by="export")
    assert len(shard.gone) == 2
    shard.rebase(None, by="checkpoint")
    assert not len(shard.gone)


def test_ids_that_were_evicted_before_a_state_was_loaded_are_not_recorded() -> None:
    """They have rows again, also where later steps do not look them up."""
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1))], seed=0)
    shard.look_up(keys_of(shard, [1]))
    end_step(shard)
    state = dict(shard.state())["t"]
    end_step(shard)
    assert dict(shard.state(since=1))["t"].removed.tolist() == [1]
    shard.load("t", state, step=1)
    assert dict(shard.state(since=1))["t"].removed.tolist() == []


def test_rows_that_are_evicted_between_two_parts_are_not_in_the_later_one() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1))], seed=0)
    shard.look_up(keys_of(shard, [1, 2, 3, 4]))
    end_step(shard)
    parts = shard.state(rows=2)
    assert next(parts)[1].ids.tolist() == [1, 2]
    shard.look_up(keys_of(shard, [3]))
    end_step(shard)
    assert [part.ids.tolist() for _, part in parts] == [[3]]


def test_what_belongs_to_no_row_is_in_the_first_part_alone() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1, default_row="mean"))], seed=0)
    shard.rebase(0)
    shard.look_up(keys_of(shard, [1]))
    end_step(shard)
    shard.look_up(keys_of(shard, [2, 3, 4]))
    end_step(shard)
    parts = [part for _, part in shard.state(since=0, rows=2)]
    assert [(len(part.removed), len(part.evicted)) for part in parts] == [(1, 1), (0, 0)]


def test_the_totals_of_an_increment_replace_those_of_its_base() -> None:
    table = replace(TABLE, eviction=Eviction(age=1, every=1, default_row="mean"))
    shard, again = TableShard([table], seed=0), TableShard([table], seed=0)
    for number in range(6):
        shard.look_up(keys_of(shard, [number]))
        end_step(shard)
        if number == 2:
            again.load("t", dict(shard.state())["t"], step=3)
    again.load("t", dict(shard.state(since=3))["t"], step=6)
    assert shard.evicted[0, 0] == 5 and np.array_equal(again.evicted, shard.evicted)
    assert ids_in(again) == [5]


def test_counters_of_a_state_stay_as_they_were() -> None:
    shard = TableShard([replace(TABLE, admission=Admission(count=5, cells=2**12))], seed=0)
    counters = dict(shard.state())["t"].sketch
    shard.look_up(keys_of(shard, [1, 2]))
    end_step(shard)
    assert not counters.any() and dict(shard.state())["t"].sketch.any()


def test_first_values_depend_on_seed_table_and_id_alone() -> None:
    one = TableShard([TABLE, replace(TABLE, name="other", init_scale=0.5)], seed=0)
    many = one.values(one.look_up(keys_of(one, list(range(4000)))).unique)
    again = TableShard([replace(TABLE, name="other", init_scale=0.5), TABLE], seed=0)
    alone = again.values(again.look_up(keys_of(again, [3999, 5], table=1)).unique)
    assert torch.equal(many[[3999, 5]], alone)
    assert many.abs().max() <= TABLE.init_scale
    assert many.std().item() == pytest.approx(TABLE.init_scale / 3**0.5, rel=0.05)
    assert many.mean().item() == pytest.approx(0, abs=TABLE.init_scale / 20)
    others = one.values(one.look_up(keys_of(one, list(range(4000)), table=1)).unique)
    assert others.abs().max() > 0.4
    assert not torch.equal(others / 50, many)
    seeded = TableShard([TABLE], seed=1)
    assert not torch.equal(seeded.values(seeded.look_up(keys_of(seeded, [5])).unique), many[[5]])


def test_admission_by_probability_depends_on_occurrences_alone() -> None:
    shard = TableShard([replace(TABLE, admission=Admission(probability=0.1))], seed=0)
    shard.look_up(keys_of(shard, list(range(5000)) + list(range(2000)) * 4))
    assert not ids_in(shard)
    end_step(shard)
    found = np.array(ids_in(shard))
    assert (found < 2000).mean() * len(found) / 2000 == pytest.approx(1 - 0.9**5, abs=0.04)
    assert (found >= 2000).mean() * len(found) / 3000 == pytest.approx(0.1, abs=0.02)


def test_occurrences_before_the_count_give_no_chance_of_a_row() -> None:
    rule = Admission(count=4, probability=0.5, cells=2**16)
    shard = TableShard([replace(TABLE, admission=rule)], seed=0)
    shard.look_up(keys_of(shard, list(range(3000)) * 4))  # one draw each
    end_step(shard)
    assert len(ids_in(shard)) / 3000 == pytest.approx(0.5, abs=0.03)
    shard.look_up(keys_of(shard, list(range(5000, 8000)) * 3))
    end_step(shard)
    shard.look_up(keys_of(shard, list(range(5000, 8000)) * 2))
    end_step(shard)
    assert (np.array(ids_in(shard)) >= 5000).sum() / 3000 == pytest.approx(0.75, abs=0.03)


def test_ids_of_different_tables_are_different() -> None:
    shard = TableShard([TABLE, replace(TABLE, name="other")], seed=0)
    rows = [shard.look_up(keys_of(shard, [1, 2], table)).unique for table in (0, 1)]
    assert len({*rows[0].tolist(), *rows[1].tolist()}) == 4
    assert ids_in(shard) == ids_in(shard, "other") == [1, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=50), min_size=1, max_size=6))
def test_a_full_sketch_never_counts_too_few(calls: list[list[int]]) -> None:
    sketch, exact = CountMinSketch(1), dict[int, int]()
    for ids in calls:
        unique = sorted(set(ids))
        hashes = Keys.of(np.array(unique), np.zeros(len(unique), np.int64), np.array([salt_of("x")])).hashes
        counts = np.array([ids.count(number) for number in unique])
        for number, count in zip(unique, counts.tolist(), strict=True):
            exact[number] = exact.get(number, 0) + count
        assert (sketch.add(hashes, counts) >= [exact[number] for number in unique]).all()


def test_a_sketch_takes_the_least_crowded_counter() -> None:
    """20,000 ids share counters with 7 % of the others for each hash function, with hardly any for all four."""
    ids = np.arange(20_000)
    keys = Keys.of(ids, np.zeros_like(ids), np.array([salt_of("x")]))
    counts = 1 + ids % 3
    assert (CountMinSketch(2**18).add(keys.hashes, counts) == counts).mean() > 0.999


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_small_updates_of_rounded_rows_add_up(dtype: str) -> None:
    """Updates far below half a unit in the last place, which rounding to nearest would lose every time."""
    table = replace(TABLE, width=64, dtype=dtype, init_scale=1.0, lr=2e-5)
    shard = TableShard([table], seed=0)
    rows = shard.look_up(keys_of(shard, list(range(50)))).unique
    first = shard.values(rows)
    for _ in range(100):
        shard.update(rows, torch.ones(50, 64))
        end_step(shard)
    moved = first - shard.values(rows)
    assert moved.mean().item() == pytest.approx(100 * 2e-5, rel=0.15)
    exact = TableShard([replace(table, dtype="float32")], seed=0)
    unit = 1 / 127 if dtype == "int8" else 2**-11
    values = exact.values(exact.look_up(keys_of(exact, list(range(50)))).unique)
    torch.testing.assert_close(first, values, rtol=0, atol=unit / 2 * 1.001)


@pytest.mark.parametrize("size", [2e-8, 3.1e-6, 5.9e-5, 6.2e-5, 0.3])
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_to_halves_is_right_in_the_mean(size: float, sign: int) -> None:
    """Below 6.1e-5 halves have a fixed distance, of which the first size is a third."""
    values = torch.full((1000, 64), sign * size)
    noise = np.random.default_rng(0).random((1000, 64))
    found = RowFormat("float16", 64).encode(values, noise)
    near = values[0, 0].half()
    unit = max(abs(float(near)) * 2**-10, 2**-24)
    assert found.double().mean().item() == pytest.approx(sign * size, abs=unit / 100)
    assert (found.double() - sign * size).abs().max() < unit


@pytest.mark.parametrize(
    ("dtype", "bytes_of_a_row"), [("float64", 512), ("float32", 256), ("float16", 128), ("int8", 68)]
)
def test_rows_take_the_memory_of_their_type(dtype: str, bytes_of_a_row: int) -> None:
    shard = TableShard([replace(TABLE, width=64, dtype=dtype)], seed=0)
    rows = shard.look_up(keys_of(shard, [1])).unique
    stored = shard.store.values(rows)
    assert stored.element_size() * stored.numel() == bytes_of_a_row


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_single_int8_row_is_read(width: int) -> None:
    shard = TableShard([replace(TABLE, width=width, dtype="int8", init_scale=1.0)], seed=0)
    alone = shard.values(shard.look_up(keys_of(shard, [1])).unique)
    assert alone.shape == (1, width)
    assert torch.equal(alone, shard.values(shard.look_up(keys_of(shard, [2, 1])).unique)[[1]])


def test_rows_of_another_shape_are_not_loaded() -> None:
    shard = TableShard([TABLE], seed=0)
    shard.look_up(keys_of(shard, [1]))
    state = dict(shard.state())["t"]
    for other in (replace(TABLE, width=3), replace(TABLE, dtype="float32"), replace(TABLE, optimizer="adagrad")):
        with pytest.raises(ValueError, match="table 't'"):
            TableShard([other], seed=0).load("t", state, step=1)


def test_each_step_has_the_draws_of_its_own_occurrences() -> None:
    rule = Admission(count=2, probability=0.1, cells=2**16)
    shard = TableShard([replace(TABLE, admission=rule)], seed=0)
    for _ in range(6):  # five draws: the first occurrence gives none
        shard.look_up(keys_of(shard, list(range(3000))))
        end_step(shard)
    assert len(ids_in(shard)) / 3000 == pytest.approx(1 - 0.9**5, abs=0.03)


def test_a_process_takes_the_counters_of_its_own_buckets() -> None:
    whole, half = CountMinSketch(2**14), CountMinSketch(2**14, rank=0, world=2)
    whole.counts[:] = np.arange(whole.counts.size).reshape(whole.counts.shape)
    half.load(whole.buckets, whole.counts)
    assert np.array_equal(half.counts, whole.counts[::2])
    again = CountMinSketch(2**14)
    for rank in (1, 0):
        again.load(whole.buckets[rank::2], whole.counts[rank::2])
    assert np.array_equal(again.counts, whole.counts)


def test_the_counters_of_all_processes_are_those_of_one() -> None:
    ids = np.arange(4000)
    hashes = Keys.of(ids, np.zeros_like(ids), np.array([salt_of("x")])).hashes
    whole = CountMinSketch(2**14)
    whole.add(hashes, 1 + ids % 3)
    for rank in range(3):
        own, mine = CountMinSketch(2**14, rank=rank, world=3), owners_of(hashes, 3) == rank
        own.add(hashes[mine], (1 + ids % 3)[mine])
        assert np.array_equal(own.counts, whole.counts[rank::3])


def test_ids_that_were_seen_as_often_as_the_frequency_stay() -> None:
    shard = TableShard([replace(TABLE, eviction=Eviction(age=1, every=1, frequency=3))], seed=0)
    shard.look_up(keys_of(shard, [1, 1, 2, 2, 2]))
    end_step(shard)
    end_step(shard)
    assert ids_in(shard) == [2]
