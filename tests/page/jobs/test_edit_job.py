"""Edits of a job's YAML keep its comments, and give what the same override gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from browsing import Browser

from stoker.errors import UserError
from stoker.job.blocks.parallel_block import ParallelBlock
from stoker.job.document.shorthand import expand_shorthands
from stoker.job.document.yaml_document import parse_document
from stoker.job.recipes import FOLDER, recipe_names
from stoker.page.app import STATIC
from stoker.page.jobs import edit_job
from stoker.page.jobs.edit_job import apply_edits

JOB = """\
# What it is for.
task: sft
model: smollm2-135m  # small
data: my.jsonl
tune: lora
steps: 60
train: {lr: 5e-4, batch: 8}
evaluate:
  every: 20  # steps
"""
# Keys of `parallel` that no plan sets.
NOT_LAYOUT = {"async_tensor", "compress", "compress_rank", "prefetch", "sync"}


def test_a_plan_that_is_taken_replaces_every_key_of_the_layout() -> None:
    listed = re.search(r"const LAYOUT = (\[.*?\]);", (STATIC / "plan.js").read_text())
    assert listed and set(json.loads(listed[1])) == set(ParallelBlock.model_fields) - NOT_LAYOUT


def values(text: str) -> Any:
    """The job as data, with its short forms written out."""
    return expand_shorthands(parse_document(text, file="job.yaml")).data


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("steps", 5, {"steps": 5}),
        ("train.lr", 0.1, {"train": {"lr": 0.1, "batch": 8}}),
        ("train.seq_len", 64, {"train": {"lr": 5e-4, "batch": 8, "seq_len": 64}}),
        ("evaluate.every", 7, {"evaluate": {"every": 7}}),
        ("checkpoint.keep", 3, {"checkpoint": {"keep": 3}}),
        ("model", "llama-10m", {"model": {"name": "llama-10m"}}),
        ("model.name", "llama-10m", {"model": {"name": "llama-10m"}}),
        ("model.tokenizer", "x", {"model": {"name": "smollm2-135m", "tokenizer": "x"}}),
        ("tune.rank", 4, {"tune": {"method": "lora", "rank": 4}}),
        ("data", "other.csv", {"data": [{"path": "other.csv"}]}),
        ("data.path", "other.csv", {"data": [{"path": "other.csv"}]}),
        ("data.train_on", "last", {"data": [{"path": "my.jsonl", "train_on": "last"}]}),
    ],
)
def test_one_key(key: str, value: Any, found: dict[str, Any]) -> None:
    text = apply_edits(JOB, [(key, value)])
    assert values(text) == {**values(JOB), **found}
    assert "# What it is for." in text
    assert "# steps" in text


@pytest.mark.parametrize("written", ["f.csv", "{path: f.csv}", "[f.csv]", "[{path: f.csv}]"])
def test_a_source_gets_keys_however_it_is_written(written: str) -> None:
    wanted = [{"path": "f.csv", "columns": {"output": "Antwort"}}]
    edit = {"output": "Antwort"}
    assert values(apply_edits(f"data: {written}\n", [("data[0].columns", edit)]))["data"] == wanted
    found = values(apply_edits(f"evaluate: {{data: {written}}}\n", [("evaluate.data[0].columns", edit)]))
    assert found["evaluate"]["data"] == wanted


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("f.csv", "b.csv"),
        ("{path: f.csv, split: test}", [{"path": "b.csv", "split": "test"}]),
        ("[{path: f.csv, split: test}]", [{"path": "b.csv", "split": "test"}]),
    ],
)
def test_a_file_for_a_stage_keeps_the_other_keys_of_its_source(written: str, found: Any) -> None:
    text = f"task: sft\nstages:\n  - {{name: one}}\n  - name: two\n    data: {written}\n"
    edited = values(apply_edits(text, [("stages[0].data", "a.csv"), ("stages[1].data", "b.csv")]))
    assert edited["stages"] == [{"name": "one", "data": "a.csv"}, {"name": "two", "data": found}]
    removed = values(apply_edits(text, [("stages[1].data", None)]))
    assert removed["stages"] == [{"name": "one"}, {"name": "two"}]


def test_nothing_edited_is_the_same_text() -> None:
    for name in recipe_names():
        text = (FOLDER / f"{name}.yaml").read_text()
        assert apply_edits(text, []) == text, name


def test_every_recipe_takes_a_file() -> None:
    for name in recipe_names():
        text = (FOLDER / f"{name}.yaml").read_text()
        sources = values(text).get("data") or []
        if "stages:" in text or len(sources) > 1:
            continue
        data = values(apply_edits(text, [("data", "mine.jsonl")]))["data"]
        assert data == [{**(sources[0] if sources else {}), "path": "mine.jsonl"}], name


def test_removing() -> None:
    assert "evaluate" not in values(apply_edits(JOB, [("evaluate.every", None)]))
    assert values(apply_edits(JOB, [("train.lr", None)]))["train"] == {"batch": 8}
    assert "model" not in values(apply_edits(JOB, [("model.name", None)]))
    assert values(apply_edits(JOB, [("dpo.beta", None)])) == values(JOB)


@pytest.mark.parametrize(
    ("text", "key", "left"),
    [
        ("data: [{path: a.jsonl, weight: 2}]\n", "data[0].weight", {"data": [{"path": "a.jsonl"}]}),
        ("data: [{path: a.jsonl, weight: 2}]\n", "data.weight", {"data": [{"path": "a.jsonl"}]}),
        ("data: [{path: a, weight: 2}, {path: b}]\n", "data[1].path", {"data": [{"path": "a", "weight": 2}]}),
        ("data: [a.jsonl, b.jsonl]\n", "data[0].path", {"data": ["b.jsonl"]}),
        ("data: a.jsonl\nsteps: 3\n", "data.path", {"steps": 3}),
        ("data: [a.jsonl]\nsteps: 3\n", "data[0]", {"steps": 3}),
        ("data: [a.jsonl]\n", "data[4].path", {"data": ["a.jsonl"]}),
    ],
)
def test_removing_from_sources(text: str, key: str, left: dict[str, Any]) -> None:
    assert parse_document(apply_edits(text, [(key, None)]), file="job.yaml").data == left


def test_removing_from_one_of_several_sources_is_refused() -> None:
    with pytest.raises(UserError, match="2 sources"):
        apply_edits("data: [a.jsonl, b.jsonl]\n", [("data.path", None)])


def test_removing_what_was_set_gives_the_text_again() -> None:
    once = apply_edits(JOB, [])
    assert apply_edits(apply_edits(once, [("checkpoint.keep", 3)]), [("checkpoint.keep", None)]) == once


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("steps: 3\n", "steps.x", "has no keys"),
        ("data: [a.jsonl, b.jsonl]\n", "data.path", "2 sources"),
        ("a: [\n", "steps", "YAML"),
        ("- a\n", "steps", "has no keys"),
        ("steps: 3\n", "train..lr", "is not a key"),
        ("data: [a.jsonl]\n", "data[5].path", "`data` has no item 5: there are 1"),
        ("data: [a.jsonl]\n", "data[5]", "`data` has no item 5: there are 1"),
        ("stages: [a]\n", "stages.x", "`stages` is a list"),
        ("stages: [{a: 1}]\n", "stages.x.y", "`stages` is a list"),
        ("train: {lr: 1}\n", "train[0].lr", "`train` is not a list"),
    ],
)
def test_wrong(text: str, key: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_edits(text, [(key, 1)])
    problem = caught.value.problems[0]
    assert words in problem.message + problem.suggestion


@pytest.mark.parametrize(
    ("text", "key", "found"),
    [
        ("data:\n  path: a  # mine\n", "data[0].path", [{"path": "b"}]),
        ("data:\n  path: a  # mine\n", "data[1].path", [{"path": "a"}, {"path": "b"}]),
        ("data: a\n", "data[0].path", [{"path": "b"}]),
        ("data: [a]\n", "data[1].path", [{"path": "a"}, {"path": "b"}]),
        ("task: sft\n", "data[0].path", [{"path": "b"}]),
    ],
)
def test_an_item_of_a_list(text: str, key: str, found: list[dict[str, str]]) -> None:
    after = apply_edits(text, [(key, "b")])
    assert values(after)["data"] == found
    assert after.count("# mine") == text.count("# mine")


def test_an_invalid_value_does_not_prevent_edits() -> None:
    text = "steps: 99999999999999999999  # too many\nseed: 3\n"
    assert apply_edits(text, [("seed", 4)]) == text.replace("3", "4")
    assert values(apply_edits(text, [("steps", 5)])) == {"steps": 5, "seed": 3}
    with pytest.raises(UserError, match="given twice"):
        apply_edits("steps: 3\nsteps: 4\n", [("steps", 5)])


ALIASES = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefgh")
)
MERGES = f"a: &a {{{', '.join(f'k{n}: 1' for n in range(1000))}}}\n" + "".join(f"b{n}: {{<<: *a}}\n" for n in range(60))


@pytest.mark.parametrize("text", [ALIASES, MERGES, "a: " + "[" * 500 + "]" * 500], ids=["aliases", "merges", "depth"])
def test_a_text_without_bounds_is_refused_before_it_is_edited(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_job, "YAML", None)
    with pytest.raises(UserError, match=r"more than 50,000 values|nested too deeply"):
        apply_edits(text, [("steps", 5)])


def test_an_edit_needs_the_role_run(make_page: Callable[..., Browser]) -> None:
    body = {"yaml": JOB, "edits": []}
    assert make_page(users=True).login("viewer").post("/api/edit", body).status_code == 403
    assert make_page(users=True).login("runner").post("/api/edit", body).status_code == 200


def test_large_integers_keep_their_digits(page: Browser) -> None:
    number = 2**53 + 1
    answer = page.post("/api/edit", {"yaml": JOB, "edits": [{"key": "seed", "value": str(number)}]}).json()
    assert values(answer["yaml"])["seed"] == number


def test_over_the_api(page: Browser) -> None:
    answer = page.post("/api/edit", {"yaml": JOB, "edits": [{"key": "steps", "value": 7}]})
    assert answer.json() == {"yaml": apply_edits(JOB, [("steps", 7)])}
    wrong = page.post("/api/edit", {"yaml": "steps: [", "edits": [{"key": "steps", "value": 7}]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["line"] == 1
    for edits in (None, {}, [1], [{"key": "steps"}], [{"key": 1, "value": 2}]):
        assert page.post("/api/edit", {"yaml": JOB, "edits": edits}).status_code == 400
