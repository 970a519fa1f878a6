"""The loops over a batch's ids and rows: compiled by numba where it is installed, else NumPy and torch.

`array_kernels` says what each of them computes. Keys and row numbers are the same from both, and sums of several rows
are added in the same order; `rowwise_adagrad` may differ in the last bit.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from stoker.sparse import array_kernels


@cache
def kernels() -> ModuleType:
    """`numba_kernels`, or `array_kernels` where numba is not installed; numba is loaded by the first lookup."""
    if find_spec("numba") is None:
        return array_kernels
    try:
        from stoker.sparse import numba_kernels
    except ImportError as error:  # a release that does not know this NumPy
        warnings.warn(f"numba cannot be used, so tables are slower: {error}", stacklevel=2)
        return array_kernels
    return numba_kernels
