"""MovieLens-100K (Harper and Konstan, 2015) as RecBole's package ships it: ratings joined with their user and film.

GroupLens allows its use in research and forbids redistribution, so it is read from the package and never copied.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from stoker.data.files.rows import Raw

USER = ("age", "gender", "occupation", "zip_code")
SUFFIXES = (".inter", ".user", ".item")


def movielens_rows(folder: Path, source: str) -> Iterator[Raw]:
    """Yields the ratings in the order of their file, each with its user's and its film's columns; genres are a list."""
    users = {row["user_id"]: {name: row[name] for name in USER} for row in _table(folder / "ml-100k.user")}
    films = {
        row["item_id"]: {"release_year": row["release_year"], "genres": row["class"].split()}
        for row in _table(folder / "ml-100k.item")
    }
    for number, row in enumerate(_table(folder / "ml-100k.inter"), start=2):
        yield Raw(source, number, {**row, **users[row["user_id"]], **films[row["item_id"]]})


def _table(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows under a header of ``name:type``."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [cell.partition(":")[0] for cell in next(lines)]
        for cells in lines:
            yield dict(zip(names, cells, strict=True))
