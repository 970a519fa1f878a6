"""``check --fix``: what is beyond doubt is changed, everything else stays byte for byte."""

from __future__ import annotations

import pytest

from stoker.job.document.migrate import fix

GOOD = "version: 1\ntask: sft\nmodel: m\ndata: d\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# mine\n\ntask: sft # t\n", "# mine\n\nversion: 1\ntask: sft # t\n"),
        (
            GOOD + "train:\n  # rate\n  learning_rate: 1e-4  # x\n",
            GOOD + "train:\n  # rate\n  lr: 1e-4  # x\n",
        ),
        (GOOD + "learning_rate: 1e-4 # x\n", GOOD + "train:\n  lr: 1e-4 # x\n"),
        (
            GOOD + "lr: 1e-4\ntrain:\n    batch: 8\nseed: 1\n",
            GOOD + "train:\n    lr: 1e-4\n    batch: 8\nseed: 1\n",
        ),
        (GOOD + "tune: lora  # small\nlora_r: 8", GOOD + "tune:  # small\n  method: lora\n  rank: 8\n"),
        (GOOD + "tran:\n  lr: 1\n", GOOD + "train:\n  lr: 1\n"),
        (GOOD + "train: {learning_rate: 1}\n", GOOD + "train: {lr: 1}\n"),
        (
            "version: 1\r\ntask: sft\r\nepohcs: 1\r\ndata: d\r\n",
            "version: 1\r\ntask: sft\r\nepochs: 1\r\ndata: d\r\n",
        ),
        ("version: 1\nbase_model: m\ndatasets:\n- path: d\n", "version: 1\nmodel: m\ndata:\n- path: d\n"),
        ("version: 1\ndata:\n  file: d\n", "version: 1\ndata:\n  path: d\n"),
    ],
)
def test_what_is_certain_is_changed(before: str, after: str) -> None:
    fixed, changes = fix(before, "job.yaml")
    assert fixed == after
    assert changes
    assert fix(fixed, "job.yaml") == (after, [])


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD + "every: 4\n",  # under evaluate or checkpoint
        GOOD + "zzz: 4\n",
        GOOD + "bf16: true\n",  # another value is wanted
        GOOD + "train: {lr: 1}\nlearning_rate: 2\n",  # which of the two?
        GOOD + "train: {batch: 1}\nlearning_rate: 2\n",  # no line of its own to go to
        "{version: 1,\nlearning_rate: 2,\ntask: sft}\n",  # lines inside a bracket
        "{task: sft}\n",
    ],
)
def test_what_leaves_a_choice_stays(text: str) -> None:
    assert fix(text, "job.yaml") == (text, [])
