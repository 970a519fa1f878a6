"""The index of ids against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sparse.hashing import salt_of
from stoker.sparse.id_index import FULL, IdIndex
from stoker.sparse.index_entry import EMPTY

INT64 = st.integers(-(2**63), 2**63 - 1)
# small and extreme ids, and those whose bits are NaNs
IDS = st.one_of(st.integers(-3, 30), INT64, st.sampled_from([0x7FF8000000000001, 0x7FF0000000000001, -1, -2]))
OPERATIONS = st.lists(st.tuples(st.booleans(), st.lists(st.tuples(IDS, st.integers(0, 2)), max_size=40)), max_size=12)


def index_of() -> IdIndex:
    return IdIndex(np.array([salt_of(number) for number in range(3)]))


def arrays(keys: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(keys, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def found(index: IdIndex, keys: list[tuple[int, int]]) -> list[int]:
    ids, tables = arrays(keys)
    return index.find(ids, tables, index.hashes(ids, tables)).tolist()


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_it_is_a_dictionary(operations: list[tuple[bool, list[tuple[int, int]]]]) -> None:
    index, model, ever = index_of(), dict[tuple[int, int], int](), set[tuple[int, int]]()
    for is_insertion, keys in operations:
        ever |= set(keys)
        if is_insertion:
            new = [key for key in keys if key not in model]
            ids, tables = arrays(new)
            rows = index.insert(ids, tables, index.hashes(ids, tables)).tolist()
            for key, row in zip(new, rows, strict=True):
                assert model.setdefault(key, row) == row
        else:
            index.remove(np.array([model.pop(key) for key in set(keys) if key in model], np.int64))
        assert found(index, sorted(ever)) == [model.get(key, 0) for key in sorted(ever)]
        assert len(set(model.values())) == len(model) == len(index)
        assert sorted(model.values()) == index.rows.tolist()
        assert 0 not in model.values()


def test_many_ids_are_found_while_it_grows_and_shrinks() -> None:
    index = index_of()
    ids = np.random.default_rng(0).permutation(60_000).astype(np.int64)
    tables = ids % 3
    for part in np.array_split(np.arange(len(ids)), 7):
        index.insert(ids[part], tables[part], index.hashes(ids[part], tables[part]))
    rows = index.find(ids, tables, index.hashes(ids, tables))
    assert sorted(rows.tolist()) == list(range(index.first, index.first + len(ids)))
    assert np.array_equal(index.ids[rows], ids)
    for _ in range(20):  # entries of removed ids are used again: nothing grows
        index.remove(rows[:30_000])
        rows[:30_000] = index.insert(ids[:30_000], tables[:30_000], index.hashes(ids[:30_000], tables[:30_000]))
    assert np.array_equal(rows, index.find(ids, tables, index.hashes(ids, tables)))
    assert index.top == index.first + len(ids)
    assert index.bytes < 60_000 * 100


def test_searches_end_however_many_ids_have_passed_through() -> None:
    """Entries that are neither used nor deleted end the search for an absent id."""
    index = index_of()
    for first in range(0, 20_000, 100):
        ids, tables = np.arange(first, first + 100), np.zeros(100, np.int64)
        index.remove(index.insert(ids, tables, index.hashes(ids, tables)))
        assert np.mean(index._pairs[:, 1] == EMPTY) >= 1 - FULL
    assert len(index) == 0 and len(index._pairs) == 4096


def test_equal_ids_and_hashes_of_two_tables_are_different() -> None:
    index = IdIndex(np.zeros(2, np.uint64))
    ids, tables = np.tile(np.arange(100), 2), np.repeat(np.arange(2), 100)
    rows = index.insert(ids, tables, index.hashes(ids, tables))
    assert len(set(rows.tolist())) == 200
    assert np.array_equal(index.find(ids, tables, index.hashes(ids, tables)), rows)
