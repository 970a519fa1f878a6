"""The layout that a job asks for; which numbers of micro-batches torch's own schedules take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batch_solver import solve
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from stoker.errors import UserError
from stoker.job import load_job
from stoker.job.document.job_to_yaml import dump_job, scalar
from stoker.job.document.yaml_document import parse_document
from stoker.job.keys.key_paths import dotted, leaves
from stoker.job.layout import LOOPED, Layout, ScheduleName, layout_of
from stoker.job.load_job import check_document
from stoker.job.resolution.batch_solver import BatchError, divisors
from stoker.job.resolution.island_count import islands_of, reason_for

SFT = "task: sft\nmodel: smollm2-135m\ndata: my.jsonl\n"
MODULE = "task: module\nmodule: {model: 'a:b', loss: 'a:b', data: 'a:b'}\n"
SCHEDULES: dict[ScheduleName, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


@pytest.mark.parametrize(
    ("text", "layout", "described"),
    [
        ("", Layout(), "data 1"),
        ("parallel: auto\n", Layout(), "data 1"),
        ("parallel: {data: auto, tensor: 1, sequence: auto, stages: auto}\n", Layout(), "data 1"),
        ("parallel: {data: 4, shard: zero3, shard_size: 2}\n",
         Layout(data=4, shard="zero3", shard_size=2), "data 4 (zero3 over 2)"),
        ("parallel: {data: 4, shard: zero2}\n", Layout(data=4, shard="zero2", shard_size=4), "data 4 (zero2)"),
        ("parallel: {tensor: 2}\n", Layout(tensor=2, sequence=True), "tensor 2 + sequence"),
        ("parallel: {tensor: 2, sequence: false}\n", Layout(tensor=2), "tensor 2"),
        ("parallel: {context: 2, shard: zero3}\n",
         Layout(context=2, shard="zero3"), "data 1 (zero3) x context 2 (gather)"),
        ("parallel: {context: 2, context_by: ulysses}\n",
         Layout(context=2, context_by="ulysses"), "context 2 (ulysses)"),
        ("parallel: {pipeline: 2, stages: [3, 5]}\n", Layout(pipeline=2, stages=(3, 5)), "pipeline 2 (1f1b, 3-5)"),
        ("parallel: {pipeline: 2, schedule: zbv, tensor: 2, data: 2, recompute: none, offload: optimizer}\n",
         Layout(data=2, tensor=2, sequence=True, pipeline=2, schedule="zbv", offload="optimizer"),
         "data 2 x tensor 2 + sequence x pipeline 2 (zbv), offload optimizer"),
        ("parallel: {devices: [0, 2, 4, 6], tensor: 2, recompute: selective}\n",
         Layout(data=2, tensor=2, sequence=True, recompute="selective"), None),
        ("train: {batch: 8, micro_batch: 2, accumulation: 1}\n", Layout(data=4), "data 4"),
    ],
)  # fmt: skip
def test_a_job_has_its_layout(tmp_path: Path, text: str, layout: Layout, described: str | None) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SFT + text)
    found = layout_of(load_job(path).job)
    assert found == layout
    assert described in (None, found.describe())
    assert found.world == found.data * found.tensor * found.pipeline * found.context


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """A process group of four that sends nothing: enough to build a pipeline's stages."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


def test_torchs_schedules_take_the_numbers_of_micro_batches_that_we_say(fake_ranks: int) -> None:
    for name, theirs in SCHEDULES.items():
        layout = Layout(pipeline=fake_ranks, schedule=name)
        first = (0, layout.stage_count - 1) if name == "zbv" else range(0, layout.stage_count, fake_ranks)
        stages = [PipelineStage(nn.Linear(1, 1), i, layout.stage_count, torch.device("cpu")) for i in first]
        assert len(stages) == layout.stages_per_process
        for count in range(1, 30):
            try:
                get_schedule_class(theirs)(stages if name in LOOPED else stages[0], count)  # type: ignore[arg-type]
                taken = True
            except ValueError:
                taken = False
            assert layout.takes(count) == taken, (name, count)


SIZES = st.integers(1, 24)
CORNER = st.none() | SIZES


@given(CORNER, CORNER, CORNER, CORNER, st.none() | st.integers(8, 20_000),
       st.builds(Layout, pipeline=st.integers(1, 6), schedule=st.sampled_from(list(SCHEDULES))))  # fmt: skip
def test_a_batch_suits_its_pipeline_or_the_error_is_deserved(
    batch: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    data: int | None,
    seq_len: int | None,
    pipeline: Layout,
) -> None:
    corners = {"batch": batch, "micro_batch": micro_batch, "accumulation": accumulation, "data_parallel": data}
    try:
        solved = solve(**corners, seq_len=seq_len, pipeline=pipeline)
    except BatchError as error:
        try:
            plain = solve(**corners, seq_len=seq_len)
        except BatchError:
            return  # the corners contradict each other by themselves
        if "schedule" in error.message:
            assert micro_batch or accumulation or batch
            share = plain.batch // plain.data_parallel
            free = not (micro_batch or accumulation)
            possible = [share // size for size in divisors(share) if free and (not seq_len or size * seq_len <= 8192)]
            assert not any(map(pipeline.takes, possible))
        return
    assert solved.batch == solved.micro_batch * solved.accumulation * solved.data_parallel
    assert pipeline.takes(solved.accumulation)
    share = solved.batch // solved.data_parallel
    busy = [n for n in divisors(share) if n >= pipeline.stage_count and pipeline.takes(n)]
    if not micro_batch and not accumulation and busy:
        assert solved.accumulation >= pipeline.stage_count


def test_what_the_pipeline_changes_in_the_batch() -> None:
    def solved(schedule: ScheduleName, pipeline: int, **corners: int) -> tuple[int, int, int]:
        found = solve(**corners, pipeline=Layout(pipeline=pipeline, schedule=schedule), seq_len=512)
        return found.batch, found.micro_batch, found.accumulation

    assert solved("1f1b", 2) == (8, 4, 2)
    assert solved("zbv", 2) == (8, 2, 4)
    assert solved("interleaved", 2, batch=12) == (12, 3, 4)
    assert solved("1f1b", 8, data_parallel=2) == (16, 1, 8)
    assert solved("1f1b", 4, micro_batch=2) == (8, 2, 4)
    assert solved("gpipe", 4, batch=4, accumulation=1) == (4, 4, 1)
    with pytest.raises(BatchError, match="needs at least 4 micro-batches a step, and accumulation is 2") as caught:
        solved("1f1b", 4, batch=8, micro_batch=4)
    assert "write accumulation 4 with micro_batch 2, or accumulation 8 with micro_batch 1" in caught.value.suggestion
    with pytest.raises(BatchError, match="equal rounds of 2 or more, and accumulation is 5"):
        solved("zero-bubble", 2, micro_batch=1, accumulation=5)
    with pytest.raises(BatchError, match="write batch 8 with accumulation 4, or `schedule: gpipe`"):
        solved("1f1b", 4, batch=6, data_parallel=2)


BLOCKS = st.fixed_dictionaries(
    {},
    optional={
        "data": st.integers(1, 4) | st.just("auto"),
        "shard": st.sampled_from(["none", "zero1", "zero2", "zero3"]),
        "shard_size": st.integers(1, 4),
        "tensor": st.integers(1, 3),
        "sequence": st.booleans(),
        "async_tensor": st.booleans(),
        "pipeline": st.integers(1, 3),
        "schedule": st.sampled_from(list(SCHEDULES)),
        "stages": st.lists(st.integers(1, 4), min_size=1, max_size=6),
        "context": st.integers(1, 2),
        "context_by": st.sampled_from(["gather", "ulysses"]),
        "expert": st.integers(1, 3),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "offload": st.sampled_from(["none", "optimizer", "params", "activations"]),
        "devices": st.lists(st.integers(0, 5), min_size=1, max_size=6),
    },
)
TRAIN = st.fixed_dictionaries(
    {},
    optional={
        "batch": st.integers(1, 16),
        "micro_batch": st.integers(1, 4),
        "accumulation": st.integers(1, 6),
        "optimizer": st.sampled_from(["adamw", "adafactor"]),
        "precision": st.sampled_from(["bf16", "fp16", "fp64"]),
        "compile": st.booleans(),
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from([SFT, SFT + "tune: {method: lora, dora: true}\n", SFT + "tune: qlora\n", MODULE]), BLOCKS, TRAIN)
@pytest.mark.slow
def test_a_layout_is_whole_or_its_problems_are_told_at_their_places(
    head: str, parallel: dict[str, object], train: dict[str, object]
) -> None:
    text = f"{head}parallel: {scalar(parallel)}\ntrain: {scalar(train)}\n"
    lines = text.splitlines()
    try:
        loaded = check_document(parse_document(text, "job.yaml"))
    except UserError as error:
        for problem in error.problems:
            assert problem.suggestion, problem
            assert 0 < problem.column <= len(lines[problem.line - 1]), problem
        return
    layout, job = layout_of(loaded.job), loaded.job
    assert layout.data % layout.shard_size == 0
    assert layout.takes(int(job.train.accumulation))
    assert job.train.batch == int(job.train.micro_batch) * int(job.train.accumulation) * layout.data
    assert layout.stages is None or len(layout.stages) == layout.stage_count
    assert job.parallel.devices == "auto" or len(set(job.parallel.devices)) == layout.world
    again = check_document(parse_document(dump_job(job), "job.yaml"))
    assert again.job == job
    assert {dotted(path) for path, _ in leaves(job)} == set(loaded.origins)


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        ({"compress": "bf16"}, "has no effect on one copy of the model"),
        ({"data": 2, "compress_rank": 2}, "has no effect without `compress: powersgd`"),
        ({"data": 2, "shard": "zero2", "compress": "powersgd"}, "`shard` splits it"),
        ({"data": 2, "shard": "zero1", "compress": "bf16"}, "in the type in which they are sent"),
        ({"data": 2, "shard": "zero2", "prefetch": 2}, "has no effect without `shard: zero3`"),
        ({"data": 2, "shard": "zero3", "pipeline": 2, "prefetch": 2}, "has no effect with `pipeline`"),
        ({"data": 2, "pipeline": 2, "compress": "powersgd"}, "`pipeline` splits it"),
        ({"data": 2, "sync": {"every": 5, "islands": 2}, "compress": "bf16"}, "each island has one copy"),
        ({"data": 4, "sync": {"every": 5, "islands": 1}}, "4 copies of the model cannot form 1 island "),
        ({"data": 4, "sync": {"every": 5, "islands": 3}}, "4 copies of the model cannot form 3 islands "),
        ({"data": 4, "shard": "zero2", "sync": {"every": 5}}, "needs several copies of the model"),
    ],
)
def test_keys_that_would_have_no_effect(tmp_path: Path, parallel: dict[str, Any], told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"task": "sft", "model": "m", "data": "d.jsonl", "steps": 20, "parallel": parallel}))
    with pytest.raises(UserError) as error:
        load_job(path)
    assert told in str(error.value)


def test_islands_are_evaluated_when_they_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("task: sft\nmodel: m\ndata: d.jsonl\nsteps: 120\nparallel: {data: 4, sync: {every: 5}}\n")
    with pytest.raises(UserError, match=r"`evaluate.every: 12` falls between two synchronisations.*a multiple of 5"):
        load_job(path, ["evaluate.every=12"])
    assert load_job(path, ["evaluate.every=10"]).job.evaluate.every == 10
    assert load_job(path).job.evaluate.every == 15  # a tenth of the steps is 12


@pytest.mark.parametrize(("task", "micro_batch"), [("sft", 8), ("dpo", 4), ("reward", 4)])
def test_both_answers_of_a_pair_count_in_a_pass(tmp_path: Path, task: str, micro_batch: int) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"task: {task}\nmodel: m\ndata: d.jsonl\nsteps: 2\ntrain: {{batch: 8, seq_len: 1024}}\n")
    assert load_job(path).job.train.micro_batch == micro_batch  # of at most 8,192 tokens


@pytest.mark.parametrize(
    ("copies", "nodes", "islands", "why"),
    [
        (8, 1, 8, "each copy of the model is one on one node"),
        (8, 4, 4, "each node is one"),
        (6, 4, 2, "each 2 of the 4 nodes are one"),
        (3, 2, 3, "each copy of the model is one, as 3 cannot be shared out over 2 nodes"),
    ],
)
def test_islands_begin_and_end_with_nodes(copies: int, nodes: int, islands: int, why: str) -> None:
    assert (islands_of(copies, nodes), reason_for(copies, nodes)) == (islands, why)
