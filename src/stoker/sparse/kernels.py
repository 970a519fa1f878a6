"""Kernels over a batch's ids and rows: compiled by numba if it is installed, else in NumPy and torch.

`array_kernels` documents each of them. Keys, row numbers and the order of sums are the same in both; `rowwise_adagrad`
may differ in the last bit.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from stoker.sparse import array_kernels


@cache
def kernels() -> ModuleType:
    """Returns `numba_kernels`, or `array_kernels` if numba is not installed; the first call imports numba."""
    if find_spec("numba") is None:
        return array_kernels
    try:
        from stoker.sparse import numba_kernels
    except ImportError as error:  # numba does not support this release of NumPy
        warnings.warn(f"numba cannot be used, so tables are slower: {error}", stacklevel=2)
        return array_kernels
    return numba_kernels
