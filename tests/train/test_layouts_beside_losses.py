"""What a run does beside its steps is the same in every layout: evaluation, samples, states on the host, dropout."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from stoker.checkpoint.chunks import chunk_of
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models import grouped_experts
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.parallel.tensor_parallel.tensor_rng import Apart
from stoker.runs.plan_record import read_comparison
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run

LAYOUTS = [
    (2, ("parallel.data=2",)),
    (4, ("parallel.data=2", "parallel.shard=zero3", "parallel.tensor=2")),
    (2, ("parallel.tensor=2", "parallel.sequence=false")),
    (4, ("parallel.pipeline=2", "parallel.data=2", "parallel.shard=zero2")),
    (2, ("parallel.pipeline=2", "parallel.schedule=zbv")),
    (2, ("parallel.context=2",)),
    (2, ("parallel.context=2", "parallel.context_by=ulysses")),
]
SELDOM = (0, 1, 2, 3, 5)  # exhaustive: the others move and split the same things
QUIET = ("evaluate.samples=0", "evaluate.every=9")
IDS = [" ".join(overrides).replace("parallel.", "") for _, overrides in LAYOUTS]


@dataclass(frozen=True)
class Found:
    """What a run left behind."""

    losses: list[float]
    evaluated: list[tuple[float, float]]
    samples: list[Any]
    whole: dict[str, torch.Tensor]  # parameters that this process holds whole


def run(path: str, overrides: tuple[str, ...], name: str) -> Found:
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"output={name}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / name)
    folder.path.mkdir(exist_ok=True)
    with in_float64() if loaded.job.train.precision == "fp64" else nullcontext():
        train_run(prepared, folder, base, quiet=True)
    events = folder.read_events()
    model = prepared.task.model
    return Found(
        [line["loss"] for line in folder.read_metrics()],
        [(e["loss"], e["accuracy"]) for e in events if e["event"] == "evaluated"],
        [e["samples"] for e in events if e["event"] == "sampled"],
        {n: chunk_of(p).tensor.clone() for n, p in model.named_parameters() if n not in prepared.shards.pieces},
    )


@pytest.fixture
def job(sft: dict[str, Any], base: Path) -> Path:
    """A job of a model with four blocks whose heads do not divide, that is evaluated and asked while it learns."""
    write_model(sft["model"], base / "model", hidden_size=36, num_attention_heads=6, num_key_value_heads=3, head_dim=6)
    write_job(base, job_of(sft, base))
    return base


def write_model(like: str, to: Path, **changes: Any) -> None:
    shutil.copytree(like, to)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(like, num_hidden_layers=4, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(to)


def job_of(sft: dict[str, Any], base: Path) -> dict[str, Any]:
    return {
        **sft,
        "model": str(base / "model"),
        "steps": 3,
        "train": {
            **sft["train"],
            "batch": 8,
            "micro_batch": 1,
            "precision": "fp64",
            "schedule": "constant",
            "warmup": 0,
        },
        "evaluate": {"fraction": 0.2, "samples": 2, "every": 3},
    }


@pytest.mark.parametrize(
    ("world", "overrides"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if i in SELDOM else []) for i, case in enumerate(LAYOUTS)],
    ids=IDS,
)
@pytest.mark.slow
def test_evaluation_and_samples_are_those_of_one_process(
    world: int, overrides: tuple[str, ...], job: Path, pool: Pool
) -> None:
    one = run(str(job), (), "one")
    many = pool.run(run, str(job), overrides, "many", world=world, timeout=250)[0]
    assert many.losses == pytest.approx(one.losses, abs=1e-10)
    assert [loss for loss, _ in many.evaluated] == pytest.approx([loss for loss, _ in one.evaluated], abs=1e-10)
    assert [accuracy for _, accuracy in many.evaluated] == [accuracy for _, accuracy in one.evaluated]
    assert len(one.samples) == 2 and len(one.samples[0]) == 2  # before the first step, and after the last
    assert many.samples == one.samples


@pytest.mark.slow
@pytest.mark.parametrize(("world", "overrides"), [(1, ()), LAYOUTS[1], LAYOUTS[3]], ids=["alone", IDS[1], IDS[3]])
@pytest.mark.often("pipeline=2 data=2 shard=zero2")
def test_an_optimizer_on_the_host_takes_the_same_steps(
    world: int, overrides: tuple[str, ...], job: Path, pool: Pool
) -> None:
    one = run(str(job), QUIET, "one")
    more = (*overrides, *QUIET, "parallel.offload=optimizer")
    begun = pool.run(run, str(job), (*more, "steps=2"), "many", world=world, timeout=250)[0]
    gone_on = pool.run(run, str(job), more, "many", world=world, timeout=250)[0]  # its moments come back
    assert len(begun.losses) == 2
    assert gone_on.losses == pytest.approx(one.losses, abs=1e-10)


@pytest.mark.slow
def test_mixed_precision_stays_near_one_process(job: Path, pool: Pool) -> None:
    bf16 = ("train.precision=bf16", *QUIET)
    one = run(str(job), bf16, "one")
    for number, (world, overrides) in enumerate((*LAYOUTS[:4], LAYOUTS[5])):
        many = pool.run(run, str(job), (*overrides, *bf16), f"many{number}", world=world, timeout=250)[0]
        assert many.losses == pytest.approx(one.losses, rel=3e-2), overrides  # bfloat16 has 8 bits
        record = read_comparison(RunFolder(job / f"many{number}"))
        assert record is not None and record.predicted is not None


@pytest.mark.slow
def test_dropout_drops_the_same_where_processes_agree(sft: dict[str, Any], base: Path, pool: Pool) -> None:
    write_model(sft["model"], base / "model", attention_dropout=0.3)
    write_job(base, {**job_of(sft, base), "tune": {"method": "lora", "dropout": 0.3}})
    first, second = pool.run(run, str(base), (*LAYOUTS[2][1], *QUIET), "many", world=2)
    assert first.whole.keys() == second.whole.keys() and first.whole
    for name, tensor in first.whole.items():  # one different mask, and they would drift apart
        assert torch.equal(tensor, second.whole[name]), name
    assert first.losses == second.losses


def test_numbers_differ_within_a_region_and_agree_after_it() -> None:
    def drawn(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        column, row = nn.Linear(2, 2), nn.Linear(2, 2)
        Apart(nn.Sequential(nn.Dropout(0.5)), index, torch.device("cpu")).around(column, row)
        before = torch.rand(3)
        column(torch.ones(2))
        inside = torch.rand(3)
        row(torch.ones(2))
        return before, inside, torch.rand(3)

    (before, inside, after), (other_before, other_inside, other_after) = drawn(0), drawn(1)
    assert torch.equal(before, other_before) and torch.equal(after, other_after)
    assert not torch.equal(inside, other_inside)


def tokens_laid_out(path: str, overrides: tuple[str, ...]) -> tuple[list[int], bool]:
    """Tokens of the micro-batches of the first rows, and whether the experts' products follow autocast."""
    moe._grouped_mm = grouped_experts._grouped_mm  # as in a process that has prepared no model
    base = Path(path)
    loaded = load_job(base / "job.yaml", overrides)
    prepared = prepare(loaded, base, mesh=Mesh(layout_of(loaded.job), torch.device("cpu")))
    task: Any = prepared.task
    rows = [part.inputs.ids.numel() for i in range(0, 16, 4) for part in task.parts(i, i + 4)]
    return rows, moe._grouped_mm is grouped_experts.grouped_product


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_without_adapters_lay_out_the_same_rows(
    schedule: str, sft: dict[str, Any], base: Path, pool: Pool
) -> None:
    write_model(sft["model"], base / "model")
    rows = ({"prompt": f"the sea is blue and cold today {i}", "completion": f"yes {i}"} for i in range(40))
    (base / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tune = {"method": "lora", "dropout": 0.3, "layers": "2-"}  # the first stage has no dropout
    write_job(base, {**sft, "model": str(base / "model"), "tune": tune})
    overrides = ("train.micro_batch=4", "train.batch=16", "parallel.pipeline=2", f"parallel.schedule={schedule}")
    one, other = pool.run(tokens_laid_out, str(base), overrides, world=2)
    dropless, _ = pool.run(tokens_laid_out, str(base), (*overrides, "tune.dropout=0"), world=2)
    assert one == other
    assert sum(one[0]) > sum(dropless[0])  # common beginnings are not shared


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_products_of_experts_follow_autocast_in_every_layout(
    layout: str, sft: dict[str, Any], base: Path, pool: Pool
) -> None:
    write_job(base, sft)
    found = pool.run(tokens_laid_out, str(base), (f"parallel.{layout}=2",), world=2)
    assert [registered for _, registered in found] == [True, True]
