"""The mutations fit the source: each changes a line that is there once, under a job or a test that is there."""

from __future__ import annotations

from pathlib import Path

import mutants

ROOT = Path(__file__).resolve().parents[2]


def test_every_mutation_changes_a_line_of_the_source() -> None:
    catalogue = mutants.read_catalogue()
    assert len(catalogue.mutations) >= 192
    assert catalogue.problems(ROOT / "src") == []
    assert all(mutation.old != mutation.new for mutation in catalogue.mutations)


def test_what_does_not_fit_is_named() -> None:
    one = mutants.Mutation("one", "train/step.py", "self", "other", "why", job="job")
    gone = mutants.Mutation("one", "train/gone.py", "old", "new", "why", test="tests/gone.py")
    first, second, *rest = mutants.Catalogue({}, {"job": ""}, [one, gone]).problems(ROOT / "src")
    assert first == "one: the name is taken twice"
    assert second.startswith("one: train/step.py has 'self' ") and len(rest) == 2
