"""Jobs on a base in fewer bits: they train, go on exactly, and every layout computes what one process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run, write_job
from tokenizers import Tokenizer

from stoker.checkpoint.load_run import open_run
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.train.prepare import prepare
from stoker.train.run import train_run
from tiny_llama import save_tiny_llama

LAYOUTS = {
    "ddp": ("parallel.data=2",),
    "zero2": ("parallel.data=2", "parallel.shard=zero2"),
    "zero3": ("parallel.data=2", "parallel.shard=zero3"),
    "context": ("parallel.context=2",),
}
CELLS = [("4bit", "ddp"), ("4bit", "zero2"), ("4bit", "zero3"), ("4bit", "context"), ("8bit", "zero3")]
CELLS += [("int8", "zero2"), ("int8", "zero3")]


def train_on(path: str, overrides: tuple[str, ...], name: str) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """(losses, what this process holds of the frozen base in bytes as a tensor, the fact about the base)."""
    base = Path(path)
    loaded = load_job(base / "job.yaml", [f"output={name}", *overrides])
    layout = layout_of(loaded.job)
    mesh = Mesh(layout, torch.device("cpu")) if layout.world > 1 else None
    prepared = prepare(loaded, base, mesh=mesh)
    folder = RunFolder(base / name)
    folder.path.mkdir(exist_ok=True)
    train_run(prepared, folder, base, quiet=True)
    held = {
        n: torch.tensor((p.to_local() if hasattr(p, "to_local") else p).numel())
        for n, p in prepared.task.model.named_parameters()
        if "base_layer.weight" in n or ".experts." in n
    }
    return [line["loss"] for line in folder.read_metrics()], held, prepared.facts["base"]


def quantised(sft: dict[str, Any], base: Path, form: str) -> None:
    shutil.copytree(sft["model"], base / "model", dirs_exist_ok=True)
    train = {**sft["train"], "precision": "auto"}
    block = {"name": str(base / "model"), "quantise": form}
    tune = {"method": "lora", "rank": 4}
    write_job(base, {**sft, "model": block, "tune": tune, "train": train, "evaluate": {"fraction": 0.2, "every": 2}})


@pytest.mark.parametrize(("form", "layout"), CELLS)
@pytest.mark.often("4bit-zero3", "int8-zero2")
def test_a_layout_computes_what_one_process_does(
    form: str, layout: str, sft: dict[str, Any], base: Path, pool: Pool
) -> None:
    if form.startswith("int"):
        pytest.importorskip("torchao")
    quantised(sft, base, form)
    alone, whole, _ = train_on(str(base), (), "alone")
    together, held, fact = pool.run(train_on, str(base), LAYOUTS[layout], "together", world=2)[0]
    assert together == pytest.approx(alone, rel=2e-5)
    assert together[-1] < together[0]
    name = next(iter(whole))
    if (form, layout) == ("4bit", "zero3"):
        assert int(held[name]) <= int(whole[name]) // 4 // 2 + 1  # four bytes in a number, two processes
        assert "sharded" in fact
    else:
        assert int(held[name]) == int(whole[name])
        assert ("holds them whole" in fact) == (layout not in {"ddp", "context"})


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.often("zero3")
def test_packed_experts_under_a_layout_compute_what_one_process_does(
    layout: str, sft: dict[str, Any], base: Path, pool: Pool, tokenizer: Tokenizer
) -> None:
    mixture = save_tiny_llama(base / "mixture", tokenizer, template=None, family="mixtral", num_local_experts=4)
    quantised({**sft, "model": str(mixture)}, base, "4bit")
    alone, whole, fact = train_on(str(base), (), "alone")
    together, held, _ = pool.run(train_on, str(base), LAYOUTS[layout], "together", world=2)[0]
    assert together == pytest.approx(alone, rel=2e-5) and together[-1] < together[0]
    assert "not quantised" not in fact
    experts = [name for name in whole if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        assert int(held[name]) == int(whole[name]) // (8 if layout == "zero3" else 1)  # four bytes in a number


@pytest.mark.parametrize("form", ["4bit", "8bit"])
@pytest.mark.slow
def test_a_run_goes_on_exactly(form: str, sft: dict[str, Any], base: Path) -> None:
    quantised(sft, base, form)
    job = load_job(base / "job.yaml").job
    assert job.steps is not None
    train_on(str(base), (), "whole")
    half = job.steps // 2
    train_on(str(base), (f"steps={half}", "train.schedule=constant"), "parts")
    train_on(str(base), ("train.schedule=constant",), "parts")
    train_on(str(base), ("train.schedule=constant",), "constant")
    ends = [open_run(name, base) for name in ("parts", "constant")]
    parts, constant = ({n: p for n, p in e.model.named_parameters() if "lora_" in n} for e in ends)
    assert parts and all(torch.equal(parts[name], constant[name]) for name in parts)


def test_qlora_by_one_word(sft: dict[str, Any], base: Path) -> None:
    ran = run(base, {**sft, "tune": "qlora"})
    assert ran.losses[-1] < ran.losses[0]
    assert "nf4 with double quantisation" in ran.prepared.facts["base"]
    assert "fp32" in ran.prepared.facts["base"]
