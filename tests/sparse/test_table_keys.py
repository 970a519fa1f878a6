"""Keys without repetitions against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sparse.hashing import salt_of
from stoker.sparse.table_keys import Keys

IDS = st.one_of(st.integers(-2, 12), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=200), st.booleans())
def test_each_key_is_there_once_and_counted(pairs: list[tuple[int, int]], alike: bool) -> None:
    """Also where the two tables have the same hashes, so that different keys claim the same places time and again."""
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    salts = np.array([salt_of("a"), salt_of("a" if alike else "b")])
    keys = Keys.of(np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1]), salts)
    inverse, counts, unique = keys.deduplicated()
    found = list(zip(unique.ids.tolist(), unique.tables.tolist(), strict=True))
    assert len(set(found)) == len(found) == len(set(pairs))
    assert [found[place] for place in inverse] == pairs
    assert counts.tolist() == [pairs.count(pair) for pair in found]
    assert np.array_equal(unique.hashes[inverse], keys.hashes)
