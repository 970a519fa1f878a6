"""The documentation names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FROM_ROOT = re.compile(r"\b(?:src|tests|benchmarks|examples)/[\w./-]+\.(?:py|yaml)\b")
PACKAGES = sorted(path.name for path in (ROOT / "src" / "stoker").iterdir() if path.is_dir())
OF_THE_PACKAGE = re.compile(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`")
ALONE = re.compile(r"`(\w+\.py)`")  # beside a path

ADDED = re.compile(r"^```python title=.*$", re.MULTILINE)  # files that a page adds


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    text = ADDED.sub("", page.read_text(encoding="utf-8"))
    named = [*FROM_ROOT.findall(text), *(f"src/stoker/{path}" for path in OF_THE_PACKAGE.findall(text))]
    assert [path for path in named if not (ROOT / path).exists()] == []
    known = {
        path.name for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    }
    assert [name for name in ALONE.findall(text) if name not in known] == []
