"""Compiled kernels against the vectorised reference."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sparse import Feature, JaggedIds, SparseEmbeddings, TableSettings, array_kernels, numba_kernels
from stoker.sparse.id_index import IdIndex
from stoker.sparse.kernels import kernels

KEYS = st.lists(st.tuples(st.integers(-3, 40), st.integers(0, 2)), max_size=300)


@settings(max_examples=40, deadline=None)
@given(KEYS, KEYS)
def test_keys_are_the_same(pairs: list[tuple[int, int]], there: list[tuple[int, int]]) -> None:
    salts = np.array([1, 1, 2**63 + 5], np.uint64)  # the same ids of two tables have the same hashes
    keys = [np.ascontiguousarray(column) for column in np.array(pairs, np.int64).reshape(-1, 2).T]
    hashes = array_kernels.hashes(*keys, salts)
    assert np.array_equal(hashes, numba_kernels.hashes(*keys, salts))
    compared(array_kernels.deduplicate(*keys, hashes), numba_kernels.deduplicate(*keys, hashes))
    index = IdIndex(salts)
    if there:
        ids, tables = np.ascontiguousarray(np.array(there, np.int64).T)
        rows = index.insert(ids, tables, index.hashes(ids, tables))
        index.remove(np.unique(rows)[::3])  # searches continue past deleted entries
    compared(array_kernels.find(index._pairs, *keys, hashes), numba_kernels.find(index._pairs, *keys, hashes))


def compared(these: tuple[np.ndarray, ...], others: tuple[np.ndarray, ...]) -> None:
    assert all(np.array_equal(one, other) for one, other in zip(these, others, strict=True))


@pytest.mark.parametrize("lengths", [None, (1, 0, 3, 2, 0, 4)])
def test_gradients_of_sums_are_the_same(lengths: tuple[int, ...] | None) -> None:
    """Of three features the second has no gradient, and the third a strided one."""
    random = torch.Generator().manual_seed(0)
    bags = None if lengths is None else torch.tensor(lengths)
    at = torch.randint(0, 4, (6 if bags is None else int(bags.sum()),), generator=random)
    weights = None if bags is None else torch.rand(len(at), generator=random, dtype=torch.float64)
    wide = torch.rand(3, 20, generator=random, dtype=torch.float64)
    grads = (torch.rand(2, 5, generator=random, dtype=torch.float64), None, wide[:, 5:10])
    given = (at, 5, grads, (2, 1, 3), bags, weights, torch.empty(0, 5, dtype=torch.float64))
    expected = array_kernels.sum_bags(*given)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(numba_kernels.sum_bags(*given), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_training_is_the_same(dtype: str, close: float, decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = trained(dtype, decay)
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels.cache_clear()
    try:
        assert kernels() is array_kernels
        assert torch.allclose(trained(dtype, decay), compiled, rtol=close, atol=close)
    finally:
        kernels.cache_clear()
        monkeypatch.undo()
    assert kernels() is numba_kernels


def trained(dtype: str, decay: float) -> torch.Tensor:
    """Returns the rows after five steps on lists of ids and on single ids."""
    table = TableSettings("t", 8, lr=0.3, dtype=dtype, weight_decay=decay, init_scale=1.0)
    features = {"list": Feature("t", "mean"), "one": Feature("t")}
    embeddings = SparseEmbeddings([table], features, seed=1)
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        ids, ones = torch.randint(0, 9, (12,), generator=random), torch.randint(0, 9, (4,), generator=random)
        rows = embeddings({"list": JaggedIds(ids, torch.tensor([3, 0, 5, 4])), "one": JaggedIds.single(ones)})
        (rows["list"] * rows["one"]).square().sum().backward()
        embeddings.apply_gradients()
    found = embeddings.state().tables["t"]
    return found.values[found.ids.argsort()]


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    values, state = np.ones((3, 2), np.float32), np.zeros((3, 1), np.float32)
    values[0] = np.inf
    numba_kernels.rowwise_adagrad(values, state, np.arange(3), torch.ones(3, 2), lr=0.5, eps=0.0)
    assert values.tolist() == [[np.inf, np.inf], [0.5, 0.5], [0.5, 0.5]]


def test_a_numba_that_cannot_be_loaded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stoker.sparse.numba_kernels")
    monkeypatch.delattr("stoker.sparse.numba_kernels")
    monkeypatch.setattr("stoker.sparse.kernels.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "numba", None)
    kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="numba cannot be used, so tables are slower"):
            assert kernels() is array_kernels
    finally:
        kernels.cache_clear()
