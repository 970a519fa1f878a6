"""Chinese pages keep up with the English ones: the same headings by level, the same commands, the same links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAIRS = (("README.md", "README.zh.md"), ("docs/quickstart.md", "docs/quickstart.zh.md"))
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HAN = re.compile(r"[\u4e00-\u9fff]")


def headings(text: str) -> list[int]:
    """The level of each heading, blocks of code left out."""
    return [len(line.split(" ")[0]) for line in BLOCK.sub("", text).splitlines() if re.match(r"#+ ", line)]


def commands(text: str) -> list[str]:
    """The lines of blocks of code without their comments."""
    lines = [line.split(" #")[0].rstrip() for block in BLOCK.findall(text) for line in block.splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line]


def verbs(text: str) -> list[str]:
    """The commands of tables and sentences, by their first line of code."""
    return sorted(set(re.findall(r"`(stoker [a-z]+)", BLOCK.sub("", text))))


def links(text: str) -> list[str]:
    """Where links of a page lead, but to the page's other language."""
    found = re.findall(r"\]\(([\w./-]+\.md)\)", text)
    return sorted({link.replace(".zh.md", ".md") for link in found} - {"README.md", "quickstart.md"})


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_the_same_in_both_languages(english: str, chinese: str) -> None:
    one, two = ((ROOT / name).read_text(encoding="utf-8") for name in (english, chinese))
    assert headings(one) == headings(two)
    assert commands(one) == commands(two)
    assert verbs(one) == verbs(two)
    assert links(one) == links(two)


@pytest.mark.parametrize("chinese", [chinese for _, chinese in PAIRS])
def test_headings_are_translated(chinese: str) -> None:
    text = BLOCK.sub("", (ROOT / chinese).read_text(encoding="utf-8"))
    titles = [line for line in text.splitlines() if re.match(r"#+ ", line)]
    assert [title for title in titles if not HAN.search(title) and title != "# Stoker"] == []


def test_differences_are_noticed() -> None:
    text = "# A\n\n```\nstoker x  # why\n```\n\n`stoker y`\n"
    assert (headings(text), commands(text), verbs(text)) == ([1], ["stoker x"], ["stoker y"])
