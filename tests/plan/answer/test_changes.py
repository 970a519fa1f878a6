"""What would make a job fit: each change does, none smaller does, by trying all smaller ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.hardware.machines.cluster_file import load_cluster
from stoker.hardware.measured.planner_correction import Correction
from stoker.plan.answer.changes import SEQ_STEP, changes, least_number
from stoker.plan.search import search
from stoker.plan.setting import TrainingWork
from stoker.plan.shapes.model_names import shape_named
from stoker.plan.trainable_params import Adapters

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


@pytest.mark.parametrize("rows", [1, 2])
def test_shorter_rows_fit_where_a_sample_has_several(rows: int) -> None:
    work, cluster = TrainingWork(shape_named("gpt2"), 2**19, 1, rows=rows), load_cluster("1xT4")
    (shorter,) = [change for change in changes(work, cluster, on="1xT4") if change.what == "shorter rows"]
    length = shorter.plan.setting.work.seq_len
    assert shorter.words == f"train.seq_len={length}" and shorter.plan.fits
    assert not search(replace(work, seq_len=length + SEQ_STEP), cluster).plans


def test_a_prefix_fits_without_recomputation() -> None:
    """Stoker does not recompute blocks with a prefix."""
    adapters = Adapters(tokens=16, deep=True)
    work = TrainingWork(shape_named("llama3-8b"), 2048, 8, tuning="prefix", adapters=adapters)
    given = changes(work, load_cluster("1xT4"), on="1xT4")
    assert {"a device with more memory"} <= {change.what for change in given}


def test_another_device_is_planned_without_the_measurements_of_this_one() -> None:
    measured = Correction("T4-16GB", 0, "bf16", "full", compute=7.0, memory=0.01)
    cluster = replace(load_cluster("1xT4"), corrections=(measured,))
    work = TrainingWork(shape_named("llama3-8b"), 2048, 8)
    (device,) = [change for change in changes(work, cluster, on="1xT4") if change.words == "--on 1x1xB200-180GB-SXM"]
    assert device.plan.setting.cluster.corrections == ()


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
