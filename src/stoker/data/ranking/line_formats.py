"""Parses lines of click logs that are not JSON and have no header: Criteo's TSV, libsvm, libffm.

- ``criteo``: a label, 13 numbers I1 to I13 and 26 texts C1 to C26, separated by tabs; empty cells are missing values
  (Criteo, "Display Advertising Challenge", 2014, and the "1TB Click Logs", which have the same columns).
- ``libsvm``: ``label index:value ...``, also with ``qid:number``; one feature ``features`` of weighted ids
  (Chang and Lin, 2011, "LIBSVM").
- ``libffm``: ``label field:index:value ...``; a feature ``f<field>`` of weighted ids for each field
  (Juan et al., 2016, "Field-aware Factorization Machines for CTR Prediction").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal

from stoker.data.ranking.numbers import number_of

LineFormat = Literal["criteo", "libsvm", "libffm"]
CRITEO_NUMBERS = tuple(f"I{number}" for number in range(1, 14))
CRITEO_TEXTS = tuple(f"C{number}" for number in range(1, 27))
CRITEO = ("label", *CRITEO_NUMBERS, *CRITEO_TEXTS)
SHOWN = 40  # characters of a token in a reason

_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_LIBSVM = re.compile(rf"{_NUMBER}(\s+qid:\d+)?(\s+\d+:{_NUMBER})+\s*(#.*)?")
_LIBFFM = re.compile(rf"{_NUMBER}(\s+\d+:\d+:{_NUMBER})+\s*")


class BadLineError(ValueError):
    """A line that does not fit its format; the message gives the reason."""


def line_format_of(line: str) -> LineFormat | None:
    """Returns the format of a file's first line; None if it has none of these."""
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) == len(CRITEO) and cells[0] in ("0", "1") and all(_is_number(c) for c in cells[1:14]):
        return "criteo"
    text = line.strip()
    if _LIBFFM.fullmatch(text):
        return "libffm"
    return "libsvm" if _LIBSVM.fullmatch(text) else None


def criteo_row(line: str) -> dict[str, Any]:
    """Returns the columns of a line of Criteo's logs, empty cells as None.

    Raises:
        BadLineError: there are not 40 cells.
    """
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) != len(CRITEO):
        raise BadLineError(f"wrong number of cells: {len(cells)}, lines of Criteo have {len(CRITEO)}")
    return {name: cell or None for name, cell in zip(CRITEO, cells, strict=True)}


def libsvm_row(line: str) -> dict[str, Any]:
    """Parses ``{"label": ..., "features": [[index, value], ...]}``, with an optional ``qid``.

    Raises:
        BadLineError: a token is not ``index:value``.
    """
    label, *tokens = line.partition("#")[0].split() or [""]
    row: dict[str, Any] = {"label": label}
    pairs = []
    for token in tokens:
        name, _, value = token.partition(":")
        if name == "qid":
            row["qid"] = value
        else:
            pairs.append([_index(name, token), _weight(value, token)])
    return {**row, "features": pairs}


def libffm_row(line: str) -> dict[str, Any]:
    """Parses ``{"label": ..., "f<field>": [[index, value], ...], ...}``.

    Raises:
        BadLineError: a token is not ``field:index:value``.
    """
    label, *tokens = line.split() or [""]
    row: dict[str, Any] = {"label": label}
    for token in tokens:
        parts = token.split(":")
        if len(parts) != 3:
            raise BadLineError(f"not field:index:value: {token[:SHOWN]!r}")
        field = f"f{_index(parts[0], token)}"
        row.setdefault(field, []).append([_index(parts[1], token), _weight(parts[2], token)])
    return row


PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "criteo": criteo_row,
    "libsvm": libsvm_row,
    "libffm": libffm_row,
}


def _is_number(cell: str) -> bool:
    return not cell or cell.removeprefix("-").isdigit()


def _index(text: str, token: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= SHOWN):
        raise BadLineError(f"not an index before the colon: {token[:SHOWN]!r}")
    return int(text)


def _weight(text: str, token: str) -> float:
    value = number_of(text)
    if not math.isfinite(value):
        raise BadLineError(f"not a number behind the colon: {token[:SHOWN]!r}")
    return value
