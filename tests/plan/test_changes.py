"""What would make a job fit: each change does, none smaller does, by trying all smaller ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.cluster_file import load_cluster
from stoker.plan.answer.changes import SEQ_STEP, changes, least_number
from stoker.plan.search import search
from stoker.plan.setting import TrainingWork
from stoker.plan.shapes.model_names import shape_named

JOBS = [
    ("llama3-70b", "8xA100-40GB", 65536, 8),
    ("llama3-8b", "1xT4", 2048, 8),
    ("gpt-neox-20b", "2xA100-40GB", 2048, 12),
    ("llama3-8b", "1xA100-80GB", 65536, 4),
]


@pytest.mark.parametrize(("model", "on", "seq_len", "batch"), JOBS)
@pytest.mark.slow
def test_every_change_fits_and_none_smaller_does(model: str, on: str, seq_len: int, batch: int) -> None:
    work, cluster = TrainingWork(shape_named(model), seq_len, batch), load_cluster(on)
    assert not search(work, cluster).plans
    given = changes(work, cluster, on=on)
    assert given and [change.factor for change in given] == sorted(change.factor for change in given)
    for change in given:
        assert change.plan.fits
        if change.words.startswith("--on"):
            asked = load_cluster(change.words.removeprefix("--on "))
            assert (asked.gpus, asked.device) == (change.plan.setting.cluster.gpus, change.plan.setting.cluster.device)
            if asked.device == cluster.device and asked.per_node == cluster.per_node:
                for nodes in range(cluster.nodes + 1, asked.nodes):
                    assert not search(work, cluster.with_nodes(nodes)).plans
        if change.words.startswith("train.seq_len="):
            length = int(change.words.removeprefix("train.seq_len="))
            assert change.plan.setting.work.seq_len == length < seq_len
            assert not search(replace(work, seq_len=length + SEQ_STEP), cluster).plans
        if change.words.startswith("tune="):
            assert change.plan.setting.work.tuning == change.words.removeprefix("tune=")


def test_a_batch_that_the_devices_do_not_divide() -> None:
    """Seven rows of 512 tokens over 13 devices: neither rows, nor heads, nor blocks can be divided by 13."""
    work, cluster = TrainingWork(shape_named("gpt2"), 512, 7), replace(load_cluster("8xH100"), per_node=13)
    assert not search(work, cluster).plans
    given = changes(work, cluster, on="13xH100")
    (batch,) = [change for change in given if change.words.startswith("train.batch=")]
    assert batch.words == "train.batch=13" and batch.plan.setting.layout.data == 13


@pytest.mark.parametrize(
    ("suits", "above", "found"),
    [
        (lambda n: n >= 3, 1, 3),
        (lambda n: n >= 2, 1, 2),
        (lambda n: n >= 50, 2, 50),
        (lambda n: n in (6, 8), 2, 6),
        (lambda n: n >= 1000, 3, 1000),
        (lambda n: False, 1, None),
    ],
)
def test_the_least_number_that_suits(suits: object, above: int, found: int | None) -> None:
    assert least_number(suits, above=above, most=4096) == found  # type: ignore[arg-type]
