"""64-bit ids of values, without a vocabulary.

An integer, or a text that is written as one (``17`` or ``17.0``, not ``017`` or ``+17``), is that integer, so CSV and
JSON of the same log give the same ids, also where a program wrote a column with gaps as floats; from 2^63 to 2^64 it is
the signed integer of the same 64 bits. Spaces around a text are not part of it. Any other text is the first 63 bits of
its BLAKE2b digest of 8 bytes, little-endian, over UTF-8: of n texts of a feature, two have the same id with a
probability below n^2 / 2^64.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from stoker.splitmix64 import GOLDEN, mix64

LOWEST, HIGHEST = -(2**63), 2**64 - 1
_POSITIVE = 2**63 - 1
_SHOWN = 40  # characters of a value in a reason
_REMEMBERED = 1 << 20  # cached ids of a feature's values


class NoIdError(ValueError):
    """A value that is not an id; the message gives the reason, a short stable phrase first."""


def id_of(value: Any) -> int:
    """Returns the id of a value of a row.

    Raises:
        NoIdError: it is an integer beyond 64 bits, or neither an integer nor a text.
    """
    if isinstance(value, str):
        text = value.strip()
        whole = text.removesuffix(".0")
        digits = whole.removeprefix("-")
        is_integer = digits.isascii() and digits.isdigit() and (digits[0] != "0" or whole == "0")
        return _within(whole) if is_integer else text_id(text)
    if isinstance(value, int):
        return _within(str(int(value)))
    if isinstance(value, float) and value.is_integer():
        return _within(str(int(value)))
    kind = f"the fraction {value}" if isinstance(value, float) else f"a value of type {type(value).__name__}"
    raise NoIdError(f"not an id: {kind}")


def text_id(text: str) -> int:
    """Returns the id of a text that is not an integer: 63 bits."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _POSITIVE


def _within(digits: str) -> int:
    number = int(digits) if len(digits) <= _SHOWN else HIGHEST + 1
    if not LOWEST <= number <= HIGHEST:
        raise NoIdError(f"id out of range: {digits[:_SHOWN]} has more than 64 bits")
    return number if number <= _POSITIVE else number - 2**64


def is_missing(value: Any) -> bool:
    """Returns whether a row has no value: null, an empty cell or one of spaces alone, NaN."""
    if isinstance(value, str):
        return not value or value.isspace()
    return value is None or (isinstance(value, float) and math.isnan(value))


class IdsOfValues(dict[Any, int]):
    """A cache of `id_of`. A dict treats 1, 1.0 and True as the same key, as `id_of` does."""

    def __missing__(self, value: Any) -> int:
        found = id_of(value)
        if len(self) >= _REMEMBERED:
            self.clear()
        self[value] = found
        return found


def pair_ids(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the ids of pairs, which depend on the order within the pair; int64 like the ids themselves."""
    with np.errstate(over="ignore"):
        once = mix64(first.astype(np.int64).view(np.uint64) * GOLDEN + GOLDEN)
        return (mix64((once ^ second.astype(np.int64).view(np.uint64)) * GOLDEN + GOLDEN)).view(np.int64)
