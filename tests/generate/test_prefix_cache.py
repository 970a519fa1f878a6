"""The cache of prompts' keys and values: the longest common prefix, and which sequences leave."""

from __future__ import annotations

import numpy as np
import torch

from stoker.generate.prefix_cache import Prefixes
from stoker.generate.row_cache import Kept

TOKEN_BYTES = 2 * 4  # a key and a value of one head of size 1, in float32


def ids(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64)


def kept(sequence: np.ndarray) -> Kept:
    """Keys that equal the ids, and values that are their negatives, shape (1, T, 1)."""
    keys = torch.from_numpy(sequence).float()[None, :, None]
    return ((keys, -keys),)


def cache_of(tokens: int, *sequences: np.ndarray) -> Prefixes:
    """A cache for a number of tokens, with sequences in their order."""
    prefixes = Prefixes(tokens * TOKEN_BYTES)
    for sequence in sequences:
        prefixes.remember(None, sequence, kept(sequence))
    return prefixes


def known(prefixes: Prefixes, *numbers: int, adapter: str | None = None) -> list[int]:
    """The tokens of a sequence whose keys and values are in the cache."""
    found = prefixes.longest(adapter, ids(*numbers))
    if found is None:
        return []
    ((keys, values),), length = found
    assert torch.equal(values, -keys) and keys.shape == (1, length, 1)
    return keys.flatten().int().tolist()


def test_the_longest_common_prefix_of_the_adapter_is_found() -> None:
    prefixes = cache_of(99, ids(1, 2, 3, 4), ids(1, 2, 9), ids(5, 6))
    assert known(prefixes, 1, 2, 3, 7) == [1, 2, 3]
    assert known(prefixes, 1, 2, 9, 4) == [1, 2, 9]
    assert known(prefixes, 1, 2) == [1, 2]
    assert known(prefixes, 2, 1) == []
    assert known(prefixes, 1, 2, adapter="a") == []
    prefixes.remember("a", ids(1), kept(ids(1)))
    assert known(prefixes, 1, 2, adapter="a") == [1] and known(prefixes, 1, 2) == [1, 2]
    prefixes.forget()
    assert known(prefixes, 1, 2) == []


def test_the_least_recently_used_sequence_leaves_first() -> None:
    prefixes = cache_of(6, ids(1, 2), ids(3, 4), ids(5, 6))
    assert known(prefixes, 1, 2) == [1, 2]
    prefixes.remember(None, ids(7), kept(ids(7)))
    assert known(prefixes, 3, 4) == []
    assert [known(prefixes, n) for n in (1, 5, 7)] == [[1], [5], [7]]


def test_a_sequence_above_the_budget_is_not_kept_and_drops_no_other() -> None:
    prefixes = cache_of(3, ids(1, 2), ids(1, 2, 3, 4))
    assert known(prefixes, 1, 2, 3) == [1, 2]


def test_a_sequence_replaces_those_that_it_continues_and_no_others() -> None:
    prefixes = cache_of(5, ids(1, 2), ids(1, 8), ids(1, 2, 3))
    assert known(prefixes, 1, 8) == [1, 8] and known(prefixes, 1, 2, 3) == [1, 2, 3]
    assert len(prefixes._held) == 2


def test_what_is_kept_does_not_change_with_the_cache_that_it_came_from() -> None:
    prefixes, given = Prefixes(99), kept(ids(1, 2))
    prefixes.remember(None, ids(1, 2), given)
    given[0][0].zero_()
    assert known(prefixes, 1, 2) == [1, 2]
