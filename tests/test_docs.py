"""The documentation names files that exist, and its generated pages are written."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from stoker.cli.main import VERBS
from stoker.job.schema import Job

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


def test_the_generated_pages_have_every_verb_and_every_key() -> None:
    pytest.importorskip("mkdocs")
    pages = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    keys, verbs = ("\n".join(pages[name]()) for name in ("key_lines", "verb_lines"))
    assert [name for name in Job.model_fields if f"`{name}`" not in keys] == []
    assert [verb for verb in VERBS if f"stoker {verb}" not in verbs] == []
    assert list(pages["glossary_lines"]())
