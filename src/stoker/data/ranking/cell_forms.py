"""Cells that lost their form on the way to the file: lists as texts in brackets, as pandas writes ``[12, 3]`` to CSV,
and integers as floats, as pandas makes them of a column with missing values.

A text in brackets would be one id, or parts with a bracket would be. Floats lose their last digits from 2^53 on:
different ids may have become one, and none is the integer that a request will have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.data.ranking.features import STATED, Column

LARGEST_EXACT = 2**53  # the largest float64 below which each integer is one
SOME = 0.01  # share of such floats among the values of a column, from which on it is refused
MOSTLY = 0.95  # share of texts in brackets among the texts of a column, likewise
FORMS = ("id", "ids", "sequence")  # kinds of columns that are counted
SHOWN = 40  # characters of a cell in a message
_EXPONENT = re.compile(r"-?\d(\.\d+)?e\+\d+")  # as Python writes floats; hexadecimal digits have no plus


@dataclass
class CellForms:
    """Counts of the cells of a column of ids.

    Attributes:
        values: cells with a value.
        texts: texts among them.
        lists: texts in brackets.
        floats: floats beyond 2^53.
        some_list: the first text in brackets with a comma; empty without one.
        some_float: the first such float.
    """

    values: int = 0
    texts: int = 0
    lists: int = 0
    floats: int = 0
    some_list: str = ""
    some_float: str = ""

    def count(self, value: Any) -> None:
        """Adds a cell."""
        if value is None:
            return
        self.values += 1
        if isinstance(value, str):
            text = value.strip()
            self.texts += bool(text)
            if text[:1] == "[" and text[-1] == "]":
                self.lists += 1
                if not self.some_list and "," in text:
                    self.some_list = text[:SHOWN]
            if "e+" not in text or not _EXPONENT.fullmatch(text):
                return
            value = float(text)
        if isinstance(value, float) and LARGEST_EXACT < abs(value) < math.inf:
            self.floats += 1
            self.some_float = self.some_float or str(value)[:SHOWN]


def count_forms(forms: Mapping[str, CellForms], row: Mapping[str, Any]) -> None:
    """Adds the cells of a row, by column."""
    for name, form in forms.items():
        form.count(row.get(name))


def lost_forms(columns: Mapping[str, Column], forms: Mapping[str, CellForms]) -> Iterator[tuple[str, str, str]]:
    """Yields (column, message, suggestion) of columns whose cells lost their form.

    A text in brackets is right where the job states that a text is one id.
    """
    for name, form in forms.items():
        column = columns[name]
        is_text = column.kind == "id" and column.why == STATED
        if form.some_list and form.lists >= MOSTLY * form.texts and not is_text:
            message = f"the values of {name} are texts such as {form.some_list!r}, and not lists"
            hint = "write `|` between the values and no brackets, or JSON lines; or state `kind: id` for one id a text"
            yield name, message, hint
        if column.kind == "id" and form.floats and form.floats >= SOME * form.values:
            message = f"the ids of {name} are floats such as {form.some_float}, whose last digits are lost"
            hint = "write integers or texts, as pandas does from `Int64`; or state `kind: dense` for quantities"
            yield name, message, hint
