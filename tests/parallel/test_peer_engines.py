"""Stoker's layouts against other engines: DeepSpeed's ZeRO, and the tensor parallelism that transformers has itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from stoker.data.corpus import open_corpus
from stoker.job.load_job import load_job
from stoker.job.resolved import ResolvedJob
from stoker.launch.process_pool import Pool
from stoker.models.text import open_text_side
from stoker.parallel.float64_mode import in_float64
from stoker.train.optim.lr_schedule import Schedule, warmup_steps
from stoker.verify.layout_cases import Cell
from stoker.verify.toy_config import SIZES
from stoker.verify.toy_job import LayoutVariant, Twin, make_twin
from stoker.verify.verify_run import run_and_trace

STEPS = 5
RUN = LayoutVariant(clip=0.1, by_steps=True)
ROUNDING = 2e-5  # relative, of losses in float32 after a few steps
EVEN = 132  # vocabulary: transformers splits even ones only
Documents = list[tuple[Tensor, Tensor]]
"""(token ids, which of them are trained) of each document."""


# -- what runs in the processes ----------------------------------------------------------------------------


def steps_of(job_file: str) -> tuple[ResolvedJob, list[Documents]]:
    """A twin's job and the documents of each of its steps."""
    path = Path(job_file)
    loaded = load_job(path)
    text = open_text_side(loaded, path.parent)
    corpus = open_corpus(loaded.job, text.codec, seq_len=text.seq_len, base=path.parent, loaded=loaded)
    batch = loaded.job.train.batch
    steps = []
    for step in range(STEPS):
        rows = [d.row for i in range(step * batch, (step + 1) * batch) for d in corpus.sequences[i]]
        steps.append([(torch.from_numpy(r.ids.astype(np.int64)), torch.from_numpy(np.array(r.trained))) for r in rows])
    return loaded.job, steps


def summed_loss(model: Callable[..., Any], documents: Documents) -> Tensor:
    """The cross entropy of all trained tokens, each document by itself."""
    losses = []
    for ids, trained in documents:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1][trained[1:]]
        losses.append(nn.functional.cross_entropy(logits, ids[1:][trained[1:]], reduction="sum"))
    return torch.stack(losses).sum()


def targets_of(documents: Documents) -> int:
    return sum(int(trained[1:].sum()) for _, trained in documents)


def optimizer_of(model: nn.Module, job: ResolvedJob) -> torch.optim.AdamW:
    train = job.train
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, foreach=False)  # type: ignore[arg-type]


def schedule_of(job: ResolvedJob) -> Schedule:
    train = job.train
    return Schedule(train.lr, STEPS, warmup_steps(train.warmup, STEPS), train.schedule, train.min_lr)


def deepspeed_losses(jobs: list[tuple[str, int]]) -> list[list[float]]:
    """The losses of DeepSpeed's ZeRO, of (job file, stage) one after the other: its groups outlive no call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    return [_zero(*job) for job in jobs]


def _zero(job_file: str, stage: int) -> list[float]:
    """Each process takes its share of each step's documents."""
    import deepspeed

    rank, world = dist.get_rank(), dist.get_world_size()
    job, steps = steps_of(job_file)
    assert job.model is not None
    model = AutoModelForCausalLM.from_pretrained(job.model.name, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_of(model, job),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": job.train.clip,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    schedule = schedule_of(job)
    losses = []
    for step, documents in enumerate(steps, start=1):
        for group in engine.optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        loss = summed_loss(engine, documents[rank::world]) / targets_of(documents)
        engine.backward(loss * world)  # it takes the mean over the processes
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    return losses


def native_losses(job_file: str) -> list[float]:
    """The losses of transformers' own tensor parallelism, every process with all documents."""
    from transformers.distributed import DistributedConfig

    job, steps = steps_of(job_file)
    assert job.model is not None
    with in_float64():
        parallel = DistributedConfig(tp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(
            job.model.name, dtype=torch.float64, distributed_config=parallel
        ).train()
        optimizer, schedule = optimizer_of(model, job), schedule_of(job)
        losses = []
        for step, documents in enumerate(steps, start=1):
            loss = summed_loss(model, documents) / targets_of(documents)
            optimizer.zero_grad()
            loss.backward()
            squares = [_whole(torch.linalg.vector_norm(p.grad)) ** 2 for p in model.parameters()]
            factor = min(1.0, job.train.clip / (float(sum(squares)) ** 0.5 + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr(step)
                for p in group["params"]:
                    p.grad.mul_(factor)
            optimizer.step()
            losses.append(float(_whole(loss.detach())))
    return losses


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# -- the tests ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Pool]:
    """DeepSpeed and transformers keep process groups in globals: they get processes of their own."""
    with Pool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def even_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", EVEN)


def twin_of(family: str, folder: Path, **more: Any) -> Twin:
    """A twin with an even vocabulary."""
    (folder / "job.yaml").write_text("task: sft\nmodel: a/b\ndata: none.jsonl\nsteps: 9\n")
    config = AutoConfig.for_model(family, **more)
    return make_twin(load_job(folder / "job.yaml"), folder, folder, steps=STEPS, config=config)


GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.mark.slow
@pytest.mark.timeout(600)  # it compiles its collectives
@pytest.mark.exhaustive
def test_zero_of_deepspeed_agrees(pool: Pool, own_pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its collectives for the CPU when it runs, and there is no compiler")
    paths: dict[tuple[str, int], str] = {}
    for family in ("llama", "gpt2"):
        (tmp_path / family).mkdir()
        twin = twin_of(family, tmp_path / family)
        for stage in (1, 2, 3):
            cell = Cell("", {"data": 2, "shard": f"zero{stage}"}, accumulation=2)
            paths[family, stage] = str(twin.job_file(cell, RUN))
    jobs = [(path, stage) for (_, stage), path in paths.items()]
    theirs = own_pool.run(deepspeed_losses, jobs, world=2, timeout=600)[0]  # it compiles first
    for path, losses in zip(paths.values(), theirs, strict=True):
        ours = pool.run(run_and_trace, path, world=2)[0]
        assert ours is not None
        assert ours.losses == pytest.approx(losses, rel=ROUNDING)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", GROUPED),
        pytest.param("qwen3", GROUPED, marks=pytest.mark.exhaustive),
        pytest.param("gpt_neox", {}, marks=pytest.mark.exhaustive),
        pytest.param("glm4", GROUPED, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
@pytest.mark.exhaustive
def test_tensor_parallelism_of_transformers_agrees(
    family: str, more: dict[str, Any], pool: Pool, own_pool: Pool, tmp_path: Path
) -> None:
    path = twin_of(family, tmp_path, **more).job_file(Cell("", {"tensor": 2}, accumulation=2), RUN)
    ours = pool.run(run_and_trace, str(path), world=2)[0]
    assert ours is not None
    theirs = own_pool.run(native_losses, str(path), world=2)[0]
    assert ours.losses == pytest.approx(theirs, rel=1e-9)
