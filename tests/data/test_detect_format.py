"""Which format rows are taken for, and the advice where they have none."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.data.formats.all_formats import FORMATS
from stoker.data.formats.detect_format import detect
from stoker.errors import UserError


def test_the_format_of_most_rows_is_taken() -> None:
    rows: list[dict[str, Any] | str] = [
        {"text": "x"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "c"},
    ]
    assert detect(rows) == "prompt"
    assert detect(["a document"]) == "text"


def test_unknown_columns_are_named_with_the_nearest_format() -> None:
    with pytest.raises(UserError) as caught:
        detect([{"Instruction_text": "Hi", "outputs": "Ho"}])
    [problem] = caught.value.problems
    assert "'Instruction_text', 'outputs'" in problem.message
    assert all(name in problem.message for name in FORMATS)
    assert "the nearest is instruction" in problem.suggestion
    assert "{instruction: Instruction_text, output: outputs}" in problem.suggestion
    with pytest.raises(UserError, match="no row to tell"):
        detect([])


def test_the_nearest_format_of_pairs_is_one_of_pairs() -> None:
    with pytest.raises(UserError) as caught:
        detect([{"prompt": "Hi", "expected": "Ho"}], use="pairs")
    [problem] = caught.value.problems
    assert "known are preference (chosen, rejected)" in problem.message and "instruction" not in problem.message
    assert "the nearest is preference" in problem.suggestion and "chosen: ..." in problem.suggestion


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"Frage": "Wie alt?", "Antwort": "Zehn Jahre.", "Nr": 3}, "{instruction: Frage, output: Antwort}"),
        ({"id": "7", "问题": "多大?", "答案": "十岁了。"}, "{instruction: 问题, output: 答案}"),
        ({"nr": 1, "Inhalt": "Es war einmal."}, "{text: Inhalt}"),
        ({"nr": 1, "dialog": [{"from": "human", "value": "Hi"}]}, "{conversations: dialog}"),
        ({"nr": 1, "dialog": [{"role": "user", "content": "Hi"}]}, "{messages: dialog}"),
    ],
)
def test_columns_of_other_names_are_proposed_by_what_they_hold(row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UserError) as caught:
        detect([row])
    assert f"`columns: {wanted}`" in caught.value.problems[0].suggestion
