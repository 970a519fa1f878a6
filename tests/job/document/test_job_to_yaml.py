"""Jobs as text: what is written is read back as the same job."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.job import load_job
from stoker.job.document.job_to_yaml import dump_job, scalar
from stoker.job.document.yaml_document import parse_value

PLAIN = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
VALUES = st.recursive(
    PLAIN | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS.filter(bool), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_a_value_is_read_back_as_it_was(value: object) -> None:
    assert parse_value(scalar(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-8, "1e-8"), (5e-4, "0.0005"), (1.0, "1"), ("on", "on"), ("true", '"true"'), ("1e-4", '"1e-4"'),
     ("a/b-c_1.jsonl", "a/b-c_1.jsonl"), ("train[:10]", '"train[:10]"'), ("a: b", '"a: b"'), ([], "[]")],
)  # fmt: skip
def test_values_look_as_one_would_write_them(value: object, text: str) -> None:
    assert scalar(value) == text


@pytest.mark.parametrize(
    "text",
    [
        "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\n",
        "task: sft\nmodel: m\n"
        "data:\n  - {path: a, weight: 1, columns: {instruction: 'q: x'}}\n  - {path: b, weight: 2}\n"
        "tune: {method: lora, targets: [q, v]}\nsteps: 9\nevaluate: {data: [x, {path: y, format: text}]}\n",
        "task: pretrain\nmodel: llama-10m\ndata: sotu\nepochs: 0.5\ntrain: {warmup: 3}\n",
        "task: sft\nmodel: {name: m, revision: '1'}\ndata: x\ntune: qlora\n",
        "task: sft\nmodel: m\ndata: x\ntrain: {optimizer: sgd, schedule: constant}\n",
        "task: pretrain\nmodel: m\ndata: x\ntrain: {optimizer: adafactor}\n",
        "task: ppo\nmodel: m\ndata: x\nsteps: 9\nppo: {rewards: numeric, value_clip: null}\n",
        "task: module\nmodule:\n  model: a:b\n  loss: a:b\n  data: a:b\n"
        "  arguments: {width: 3, deep: [1, {a: null}]}\n",
    ],
)
def test_a_resolved_job_written_out_is_the_same_job(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    job = load_job(path).job
    written = tmp_path / "resolved.yaml"
    written.write_text(dump_job(job))
    again = load_job(written)
    assert again.job == job
    assert all(origin.source == "file" or origin.why for origin in again.origins.values())
