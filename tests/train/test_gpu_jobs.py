"""On a GPU: jobs train as on the CPU, go on on the other device, and what comes out is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_job
from tokenizers import Tokenizer

from stoker.hardware.process_device import open_device
from stoker.launch.process_pool import Pool
from stoker.runs.run_folder import RunFolder
from tiny_llama import save_tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def stoker(base: Path, *words: str, gpu: bool = True) -> str:
    """What a command prints, in a process of its own."""
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "stoker", *words]
    done = subprocess.run(command, cwd=base, env={**os.environ, **hidden}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(base: Path, run: str) -> list[float]:
    return [line["loss"] for line in RunFolder(base / run).read_metrics()]


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_job_trains_as_on_the_cpu_and_goes_on_there(base: Path, sft: dict[str, Any], tune: str) -> None:
    job = str(write_job(base, {**sft, "tune": tune, "checkpoint": {"every": 4}}))
    stoker(base, "train", job, "output=cpu", gpu=False)
    stoker(base, "train", job, "output=gpu")
    assert losses(base, "gpu") == pytest.approx(losses(base, "cpu"), rel=2e-3)
    stoker(base, "train", job, "output=gpu", "steps=16", gpu=False)
    stoker(base, "train", job, "output=gpu", "steps=20")
    assert len(losses(base, "gpu")) == 20


@pytest.mark.parametrize(
    "key", ["train.precision=bf16", "train.precision=fp16", "train.compile=true", "train.float8=rowwise"]
)
def test_other_arithmetic_trains_alike(base: Path, sft: dict[str, Any], key: str) -> None:
    job = str(write_job(base, sft))
    stoker(base, "train", job, "output=plain")
    stoker(base, "train", job, "output=other", key)
    assert losses(base, "other") == pytest.approx(losses(base, "plain"), rel=0.05)


def test_moments_in_8_bits_train_as_on_the_cpu(base: Path, sft: dict[str, Any], tokenizer: Tokenizer) -> None:
    model = save_tiny_llama(base / "model", tokenizer, template=None)  # whose rows have whole blocks
    job = str(write_job(base, {**sft, "model": str(model), "tune": "full"}))
    stoker(base, "train", job, "output=cpu", "train.optimizer_states=8bit", gpu=False)
    stoker(base, "train", job, "output=gpu", "train.optimizer_states=8bit")
    assert losses(base, "gpu") == pytest.approx(losses(base, "cpu"), rel=0.02)


@pytest.mark.parametrize("layout", ["recompute=full", "recompute=selective", "offload=optimizer"])
def test_layouts_of_one_gpu(base: Path, sft: dict[str, Any], layout: str) -> None:
    job = str(write_job(base, sft))
    stoker(base, "train", job, "output=plain")
    stoker(base, "train", job, "output=other", f"parallel.{layout}")
    assert losses(base, "other") == pytest.approx(losses(base, "plain"), rel=2e-3)


def test_the_deterministic_run_repeats_itself_and_goes_on_to_the_bit(base: Path, sft: dict[str, Any]) -> None:
    constant = {**sft["train"], "schedule": "constant", "warmup": 0}  # so that `steps` may be raised
    job = str(write_job(base, {**sft, "tune": "full", "train": constant}))
    for name, steps in (("first", 12), ("second", 6), ("second", 12)):
        keys = [f"output={name}", f"steps={steps}", "train.deterministic=true", "train.precision=bf16"]
        stoker(base, "train", job, *keys)
    assert losses(base, "first") == losses(base, "second")


def _grows_in_place() -> bool:
    open_device(torch.device("cuda", 0))
    kept = torch.ones(1 << 20, device="cuda")
    return bool(kept.sum() > 0) and all(block["is_expandable"] for block in torch.cuda.memory_snapshot())


def test_memory_is_of_segments_that_grow_in_place() -> None:
    with Pool(1, device="cuda") as pool:
        assert pool.run(_grows_in_place, world=1) == [True]


def test_what_comes_out_is_evaluated_exported_and_talks(base: Path, sft: dict[str, Any]) -> None:
    stoker(base, "train", str(write_job(base, sft)), "output=run")
    assert json.loads(stoker(base, "eval", "run", "rows.jsonl", "--json"))["loss"] > 0
    stoker(base, "export", "run", "--to", "exported")
    assert (base / "exported" / "config.json").is_file()
    assert stoker(base, "chat", "run", "--prompt", "the sea", "--max-tokens", "4")


def _sum_on_gpu(size: int) -> float:
    return float(torch.ones(size, device="cuda").sum())


def test_processes_of_a_pool_use_the_gpu() -> None:
    with Pool(1, device="cuda") as pool:
        assert pool.run(_sum_on_gpu, 3, world=1) == [3.0]
