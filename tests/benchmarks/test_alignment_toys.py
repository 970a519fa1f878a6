"""The benchmark of toy tasks: one cell of it, and what it says of names that it does not know."""

from __future__ import annotations

import alignment_toys
import pytest


@pytest.mark.slow  # thirty rounds of answers
def test_a_cell_of_the_benchmark_reaches_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    found = alignment_toys.main(["--tasks", "avoid", "--algorithms", "grpo", "--seeds", "0", "--steps", "120"])
    ((cell, (score,)),) = found.items()
    assert cell == ("avoid", "grpo") and score > alignment_toys.GOAL
    said = capsys.readouterr().out
    assert "| avoid | " in said and "above 0.95 with every seed: 1 of 1" in said


@pytest.mark.parametrize("words", [["--tasks", "none"], ["--algorithms", "ppo,nothing"]])
def test_unknown_names_are_said(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"take of .*(avoid|reinforce)"):
        alignment_toys.main(words)
