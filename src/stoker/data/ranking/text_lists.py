"""Lists that a program wrote as texts in brackets, such as ``[12, 3]`` in the cells of a CSV file of pandas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.data.ranking.features import Column
from stoker.data.ranking.ranking_block import RankingBlock
from stoker.errors import Problem

MOSTLY = 0.95  # share of texts in brackets among the values of such a column


def text_list_problems(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], settings: RankingBlock
) -> Iterator[Problem]:
    """Yields the features whose values are such texts, unless they are stated to be single ids: a whole text, or a part
    with a bracket, would be an id.
    """
    for column in columns:
        if column.kind not in ("id", "ids", "sequence") or settings.stated(column.name).kind == "id":
            continue
        texts = [value.strip() for row in rows if isinstance(value := row.get(column.name), str) and value.strip()]
        lists = [text for text in texts if text[0] == "[" and text[-1] == "]"]
        several = next((text for text in lists if "," in text), None)
        if several is not None and len(lists) >= MOSTLY * len(texts):
            message = f"the values of {column.name} are texts such as {several[:40]!r}, and not lists"
            hint = "write `|` between the values and no brackets, or JSON lines; or state `kind: id` for one id a text"
            stated = [index for index, feature in enumerate(settings.features) if feature.name == column.name]
            yield Problem(message, hint, key=f"ranking.features[{stated[0]}].name" if stated else "data[0].path")
