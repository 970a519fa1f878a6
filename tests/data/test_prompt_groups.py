"""Scored answers, one a row: joined by prompt, and every row counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stoker.data import build_cache, token_shards
from stoker.data.build_cache import find_format, open_cache
from stoker.data.files.rows import Raw, Rejected
from stoker.data.formats.all_formats import format_of, parse
from stoker.data.formats.prompt_groups import group_by_prompt, skip_rows
from stoker.data.sources import open_source
from stoker.data.text_codec import TextCodec
from stoker.data.tokenise import RowSettings
from stoker.job.blocks.source_block import SourceBlock

SETTINGS = RowSettings("scored", (), "all", "cut", 128)
ONE, ALIKE = (
    "a prompt with one scored answer, without another to compare it with",
    "all answers to the prompt have the same score",
)


def row(prompt: Any, answer: str, score: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, "score": score, **more}


def raws(*rows: dict[str, Any]) -> list[Raw]:
    return [Raw("file", number, value) for number, value in enumerate(rows, start=1)]


def test_answers_to_a_prompt_are_joined_wherever_they_are() -> None:
    rows = raws(row("A", "a1", 1), row("B", "b1", 2.5), row("A", "a2", "3"), row("A", "a3", -1), row("B", "b2", 0))
    first, second = group_by_prompt(rows, {})
    assert isinstance(first, Raw) and isinstance(second, Raw)
    assert (first.row, first.others) == (1, (3, 4)) and (second.row, second.others) == (2, (5,))
    assert first.value == {"prompt": "A", "answers": ["a1", "a2", "a3"], "scores": [1.0, 3.0, -1.0]}
    found = parse(first.value, "scored")  # type: ignore[arg-type]
    assert set(found.pairs) == {(1, 0, 2.0), (1, 2, 4.0), (0, 2, 2.0)}  # type: ignore[union-attr]


def test_a_prompt_is_another_one_in_another_file_or_with_another_system_message() -> None:
    turns = [{"role": "user", "content": "A"}]
    rows = raws(row("A", "a", 1), row("A", "b", 2, system="Be brief"), row(turns, "c", 1), row(turns, "d", 2))
    found = [item.row for item in group_by_prompt([*rows, Raw("other", 1, row("A", "e", 3))], {})]
    assert found == [1, 2, 3, 1]


def test_columns_may_have_other_names() -> None:
    names = {"prompt": "asked", "answer": "said", "score": "worth"}
    rows = raws(*({"asked": "A", "said": said, "worth": worth} for said, worth in (("x", 1), ("y", 2))))
    (found,) = group_by_prompt(rows, names)
    assert isinstance(found, Raw) and parse(found.value, "scored", names).pairs == ((1, 0, 1.0),)  # type: ignore


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (row("A", "a", "high"), "score is not a number"),
        (row("A", "a", float("nan")), "score is not a number"),
        (row("A", "a", 10**310), "score is not a number"),
        (row("A", "a", None), "score is not a number"),
        (row("A", "", 1), "empty answer"),
        (row("A", float("nan"), 1), "empty answer"),
        ({"prompt": "A", "answer": "a"}, "missing column: score"),
        ({"answer": "a", "score": 1}, "missing column: prompt"),
    ],
)
def test_a_row_that_cannot_be_used_leaves_the_others_to_its_prompt(wrong: dict[str, Any], reason: str) -> None:
    rejected, joined = group_by_prompt(raws(row("A", "x", 1), wrong, row("A", "y", 2)), {})
    assert rejected == Rejected("file", 2, reason)
    assert isinstance(joined, Raw) and joined.others == (3,)


def test_scores_make_a_format_only_where_answers_are_compared() -> None:
    assert format_of(row("A", "a", 1), {}) == "instruction"
    assert format_of(row("A", "a", 1), {}, "pairs") == "scored"
    assert format_of({"prompt": "A", "completion": "a", "reward": 1}, {}, "pairs") == "scored"
    both = {**row("A", "a", 1), "chosen": "x", "rejected": "y"}
    assert format_of(both, {}, "pairs") == "preference"


def test_every_row_is_used_or_dropped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatml: TextCodec
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    rows = [row(f"Where is {i}?", f"There, {i + n}.", n) for n in (0, 1) for i in range(20)]
    rows += [row("Alone?", "Yes.", 1), row("Alike?", "Yes.", 2), row("Alike?", "No.", 2), row("Odd?", "Yes.", "x")]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    source = open_source(SourceBlock(path="my.jsonl"), tmp_path)
    assert find_format(source, {}, "pairs") == "scored"
    cache = open_cache(source, chatml, SETTINGS)
    assert sum(summary.rows_in for summary in cache.summaries) == 44
    dropped = [each for summary in cache.summaries for each in summary.dropped]
    assert Counter(each.reason for each in dropped) == {ONE: 1, ALIKE: 2, "score is not a number": 1}
    assert {each.row for each in dropped} == {41, 42, 43, 44}
    assert cache.column("margin").tolist() == [1.0] * 40  # a pair for each of 20 prompts


def test_a_killed_build_goes_on_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chatml: TextCodec
) -> None:
    rows = group_by_prompt(raws(*(row(f"{i % 5}", f"a{i}", i) for i in range(20)), row("9", "b", "x")), {})
    found = list(rows)
    sizes = [1, 4, 4, 4, 4, 4]
    for done in range(7):
        assert list(skip_rows(found, sum(sizes[:done]))) == found[done:]
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 3)
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 6)
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps(row(f"Is it {i % 9}?", f"Yes, {i}.", i)) + "\n" for i in range(60)))
    source = open_source(SourceBlock(path="my.jsonl"), tmp_path)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "whole"))
    whole = open_cache(source, chatml, SETTINGS)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "killed"))
    batches = build_cache._batches

    def killed(*arguments: Any) -> Any:
        for number, batch in enumerate(batches(*arguments)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build_cache, "_batches", killed)
        open_cache(source, chatml, SETTINGS)
    again = open_cache(source, chatml, SETTINGS)
    assert sum(s.rows_in for s in again.summaries) == sum(s.rows_in for s in whole.summaries) == 60
    assert again.column("digest").tolist() == whole.column("digest").tolist()
