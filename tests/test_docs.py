"""The documentation names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM_ROOT = re.compile(r"\b(?:src|tests|benchmarks|examples)/[\w./-]+\.(?:py|yaml)\b")
OF_THE_PACKAGE = re.compile(
    r"`((?:job|runs|hardware|plan|data|models|parallel|checkpoint|resilience|train|launch|verify|rehearse|cli|sparse)/[\w/]+\.py)`"
)

ADDED = re.compile(r"^```python title=.*$", re.MULTILINE)  # files that a page adds


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    text = ADDED.sub("", page.read_text(encoding="utf-8"))
    named = [*FROM_ROOT.findall(text), *(f"src/stoker/{path}" for path in OF_THE_PACKAGE.findall(text))]
    assert [path for path in named if not (ROOT / path).exists()] == []
