"""The job when devices are lost: the same batch over fewer data-parallel processes, or planned again."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.job import LoadedJob, load_job
from stoker.job.layout import layout_of
from stoker.launch.auto_parallel import this_processor, with_plan
from stoker.launch.run_spec import RunSpec
from stoker.launch.shrink import leave_out, left_out, with_fewer
from stoker.runs.shared_memory import shared_memory

JOB = """
task: pretrain
model: llama-10m
data: rows.jsonl
steps: 2
train: {batch: 24, seq_len: 128}
"""


def load(folder: Path, parallel: str, *overrides: str) -> LoadedJob:
    (folder / "job.yaml").write_text(f"{JOB}parallel: {parallel}\n")
    return load_job(folder / "job.yaml", overrides)


@pytest.mark.parametrize(
    ("parallel", "overrides", "left", "now", "micro_batch", "accumulation"),
    [
        ("{data: 4}", [], 3, "data 3", 8, 1),
        ("{data: 4}", ["train.micro_batch=2", "train.accumulation=3"], 3, "data 3", 2, 4),
        ("{data: 8}", ["train.micro_batch=3"], 7, "data 6", 4, 1),  # more processes come before the micro-batch
        ("{data: 4, shard: zero3}", [], 3, "data 3 (zero3)", 8, 1),
        ("{data: 2, shard: zero3}", [], 1, "data 1", 24, 1),
        ("{data: 2, shard: zero3, context: 2}", [], 3, "data 1 (zero3) x context 2 (gather)", 24, 1),
        ("{data: 4, tensor: 2}", [], 7, "data 3 x tensor 2 + sequence", 8, 1),
        ("{data: 4, tensor: 2}", [], 5, "data 2 x tensor 2 + sequence", 12, 1),
    ],
)
def test_the_batch_stays(
    tmp_path: Path, parallel: str, overrides: list[str], left: int, now: str, micro_batch: int, accumulation: int
) -> None:
    job = load(tmp_path, parallel, *overrides)
    fewer = with_fewer(job, job.document, devices=None, left=left, cluster_of=this_processor)
    assert fewer is not None
    train = fewer.job.train
    assert layout_of(fewer.job).describe() == now
    assert (train.batch, train.micro_batch, train.accumulation) == (24, micro_batch, accumulation)


@pytest.mark.parametrize("keys", ["compress: bf16", "compress: powersgd, compress_rank: 2", "sync: {every: 5}"])
def test_one_copy_needs_nothing_that_is_between_copies(tmp_path: Path, keys: str) -> None:
    job = load(tmp_path, f"{{data: 2, {keys}}}")
    fewer = with_fewer(job, job.document, devices=None, left=1, cluster_of=this_processor)
    assert fewer is not None and layout_of(fewer.job).one_process


@pytest.mark.parametrize(("left", "now"), [(7, "data 6 (zero3 over 2)"), (3, "data 3 (zero3)"), (2, "data 2 (zero3)")])
def test_groups_of_shards_stay_where_several_are_left(tmp_path: Path, left: int, now: str) -> None:
    job = load(tmp_path, "{data: 8, shard: zero3, shard_size: 2}")
    fewer = with_fewer(job, job.document, devices=None, left=left, cluster_of=this_processor)
    assert fewer is not None and layout_of(fewer.job).describe() == now


def test_a_batch_that_followed_from_the_micro_batch_stays(tmp_path: Path) -> None:
    job = load(tmp_path, "{data: 4}", "train.batch=auto", "train.micro_batch=2", "train.accumulation=3")
    fewer = with_fewer(job, job.document, devices=None, left=3, cluster_of=this_processor)
    assert job.job.train.batch == 24 and fewer is not None and fewer.job.train.batch == 24


def test_states_stay_on_the_host_where_one_copy_is_left(tmp_path: Path) -> None:
    job = load(tmp_path, "{data: 2, shard: zero3, offload: params}")
    fewer = with_fewer(job, job.document, devices=None, left=1, cluster_of=this_processor)
    assert fewer is not None and layout_of(fewer.job).offload == "optimizer"


def test_the_devices_that_are_left_are_named(tmp_path: Path) -> None:
    job = load(tmp_path, "{data: 2, tensor: 2, devices: [4, 5, 6, 7]}")
    fewer = with_fewer(job, job.document, devices=[4, 6, 7], left=3, cluster_of=this_processor)
    assert fewer is not None and fewer.job.parallel.devices == [4, 6]
    assert layout_of(fewer.job).describe() == "tensor 2 + sequence"


def test_nothing_is_left_to_shrink(tmp_path: Path) -> None:
    job = load(tmp_path, "{tensor: 4}")
    assert with_fewer(job, job.document, devices=None, left=3, cluster_of=this_processor) is None


def test_what_was_planned_is_planned_anew(tmp_path: Path) -> None:
    read = load(tmp_path, "auto")
    planned = with_plan(read, cluster=this_processor(4))
    assert layout_of(planned.job).world == 4
    fewer = with_fewer(planned, read.document, devices=None, left=3, cluster_of=this_processor)
    assert fewer is not None and layout_of(fewer.job).world == 3
    assert fewer.job.train.batch == planned.job.train.batch and "planner" in fewer.plan
    named = with_fewer(planned, read.document, devices=[0, 2, 3], left=3, cluster_of=this_processor)
    assert named is not None and named.job.parallel.devices == [0, 2, 3]


@pytest.mark.parametrize(("stated", "now"), [([], "tensor 3"), (["parallel.tensor=2"], "tensor 2")])
def test_a_plan_for_fewer_devices_may_split_otherwise_or_leave_some_out(
    stated: list[str], now: str, tmp_path: Path
) -> None:
    """Eight rows cannot be spread over three copies."""
    read = load(tmp_path, "auto", "train.batch=8", "train.micro_batch=2", *stated)
    planned = with_plan(read, cluster=this_processor(4))
    for devices in (None, [0, 2, 3]):
        fewer = with_fewer(planned, read.document, devices=devices, left=3, cluster_of=this_processor)
        assert fewer is not None and fewer.job.train.batch == 8 and "planner" in fewer.plan
        assert layout_of(fewer.job).describe().startswith(now)
        assert fewer.job.parallel.devices == ("auto" if devices is None else devices[: layout_of(fewer.job).world])
    assert with_fewer(planned, read.document, devices=None, left=0, cluster_of=this_processor) is None


def test_devices_are_reported_once(tmp_path: Path) -> None:
    """After the next failure, the same ranks have other devices."""
    spec = RunSpec(load(tmp_path, "{data: 4}"), tmp_path, tmp_path / "run")
    leave_out(spec, [1])  # no supervisor reads it
    with shared_memory(spec.output):
        assert left_out(spec) == []
        leave_out(spec, [1, 3])
        assert left_out(spec) == [1, 3]
        assert left_out(spec) == []
