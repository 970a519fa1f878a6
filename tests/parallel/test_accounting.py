"""What each layout moves in a step of training, counted, against the closed forms: to the byte, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from communication import Held, ModelShape, StepShape, communication
from torch import Tensor
from torch.distributed.tensor import DTensor
from traffic import Traffic
from transformers import LlamaConfig
from volume import Flow, Volume, Volumes, added

from stoker.job.layout import Layout, layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.models.families import family_of
from stoker.models.tuning.adapters import unwrap
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.runs.run_folder import RunFolder
from stoker.runs.step_metrics import StepMetrics
from stoker.train.distributed import Distributed
from stoker.train.loop import Loop
from stoker.train.prepare import prepare
from stoker.train.prepared import Prepared
from stoker.train.run import train_run
from stoker.verify.layout_cases import MATRIX, Cell
from stoker.verify.toy_job import LayoutVariant, make_twin

DOUBLE = 8  # bytes: twins train in float64
FLOAT, HALF = 4, 2
STEP = 3  # is counted: in the second one DDP orders its buckets again
LORA = {"method": "lora", "rank": 4}
CELLS = (
    *MATRIX,
    Cell("zero1, accumulation 4", {"data": 2, "shard": "zero1"}, accumulation=4),
    Cell("zero3, accumulation 4", {"data": 2, "shard": "zero3"}, accumulation=4),
    Cell("hybrid zero2, accumulation 2", {"data": 4, "shard": "zero2", "shard_size": 2}, accumulation=2),
    Cell("tensor 2, recompute", {"tensor": 2, "sequence": False, "recompute": "full"}),
    Cell("tensor 2 + sequence, recompute", {"tensor": 2, "sequence": True, "recompute": "full"}),
    Cell("tensor 2 + sequence + LoRA", {"tensor": 2, "sequence": True}, tune=LORA),
    Cell("tensor 2 + LoRA, recompute", {"tensor": 2, "sequence": False, "recompute": "full"}, tune=LORA),
    Cell("context 2 + zero3", {"context": 2, "data": 2, "shard": "zero3"}),
    Cell("context 2, recompute", {"context": 2, "recompute": "full"}),
    Cell("tensor 2 + sequence + context 2", {"tensor": 2, "context": 2}),
    Cell("pipeline + context", {"pipeline": 2, "context": 2}),
    Cell("pipeline + zero3", {"pipeline": 2, "data": 2, "shard": "zero3"}),
    Cell("pipeline + DDP", {"pipeline": 2, "data": 2}),
    Cell("interleaved + zero3", {"pipeline": 2, "schedule": "interleaved", "data": 2, "shard": "zero3"}),
)


class Meter:
    """Counts one step of a run, and notes the rows that it was made of."""

    def __init__(self, groups: dict[Any, dist.ProcessGroup | None]) -> None:
        self.traffic = Traffic(groups)
        self.tokens: tuple[int, ...] = ()
        self.targets: tuple[int, ...] = ()

    @contextmanager
    def watching(self) -> Iterator[None]:
        take_step, lay_out = Loop._step, Distributed._laid_out

        def counted_step(loop: Loop, step: int) -> StepMetrics:
            with self.traffic if step == STEP else nullcontext():
                return take_step(loop, step)

        def noted_rows(together: Distributed, *arguments: Any, **options: Any) -> Any:
            parts = lay_out(together, *arguments, **options)
            if together._task.model.training:  # else they are evaluated
                self.tokens = tuple(part.inputs.ids.numel() for part in parts)  # type: ignore[attr-defined]
                self.targets = tuple(len(part.inputs.targets) for part in parts)  # type: ignore[attr-defined]
            return parts

        with patch.object(Loop, "_step", counted_step), patch.object(Distributed, "_laid_out", noted_rows):
            yield


def counted(job_file: str) -> tuple[Volumes, Volumes]:
    """(what the step moved on this process, the closed form)."""
    path = Path(job_file)
    low = load_job(path).job.train.precision == "bf16"
    with nullcontext() if low else in_float64():
        loaded = load_job(path)
        layout = layout_of(loaded.job)
        mesh = Mesh(layout, torch.device("cpu"))
        prepared = prepare(loaded, path.parent, mesh=mesh)
        sharding = {}
        if layout.shard != "none":
            names = mesh.sharding.mesh_dim_names or ()
            sharding = {name: mesh.sharding.get_group(name) for name in names}
        meter = Meter({**mesh.groups, **sharding, "world": dist.group.WORLD})
        folder = RunFolder(path.parent / str(loaded.job.output))
        folder.path.mkdir(exist_ok=True)
        with meter.watching():
            train_run(prepared, folder, path.parent, quiet=True)
    ones = (1,) * len(meter.tokens)  # the vocabulary is small: one chunk a row
    sizes = (HALF, FLOAT, FLOAT, FLOAT) if low else (DOUBLE, DOUBLE, DOUBLE, DOUBLE)
    shape = shape_of(prepared, mesh)
    expected = communication(layout, shape, StepShape(meter.tokens, meter.targets, ones, *sizes))
    if low and layout.tensor > 1:  # embeddings are summed in the type of their weights
        wider = Volume(0, (FLOAT - HALF) * sum(meter.tokens) * shape.width)
        kinds = ("reduce-scatter", "all-gather") if layout.sequence else ("all-reduce",)
        expected = added(expected, {Flow("tensor", kind): wider for kind in kinds})
    if sharding.get("shard") is dist.group.WORLD:  # fully_shard takes the group of all processes where it can
        expected = added(*({Flow(flow.axis.replace("world", "shard"), flow.kind): v} for flow, v in expected.items()))
    return meter.traffic.volumes, expected


def shape_of(prepared: Prepared, mesh: Mesh) -> ModelShape:
    """The part of the model that this process holds."""
    layout = mesh.layout
    parts = list(prepared.task.model) if layout.pipeline > 1 else [prepared.task.model]  # type: ignore[call-overload]
    config = unwrap(parts[0]).config
    family = family_of(config)
    assert family is not None and isinstance(prepared.engine, Distributed)
    partial = {id(t.parameter) for t in prepared.engine._gradients._trained if t.partial}
    tied = [t.parameter for t in prepared.engine._gradients._trained if t.tied]

    def held(parameters: Any) -> tuple[Held, ...]:
        return tuple(Held(tuple(p.shape), p.requires_grad, id(p) in partial) for p in parameters)

    blocks = [list(block.parameters()) for part in parts for block in unwrap(part).get_submodule(family.blocks)]  # type: ignore[union-attr]
    inside = {id(p) for block in blocks for p in block}
    outside = [held(p for p in part.parameters() if id(p) not in inside) for part in parts]
    stages = layout.stages_of(mesh.at("pipe"))
    size = config.hidden_size // config.num_attention_heads
    return ModelShape(
        blocks=tuple(held(block) for block in blocks),
        outside=tuple(outside),
        width=config.hidden_size,
        query_width=size * config.num_attention_heads // layout.tensor,
        key_value_width=size * max(1, config.num_key_value_heads // layout.tensor),
        embeds=0 in stages,
        heads=layout.stage_count - 1 in stages,
        input_gradient=prepared.job.tune.method == "full",
        boundaries=boundaries(layout, stages),
        tied=part_of(tied[0]).numel() if len(tied) == 1 else 0,
    )


def part_of(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def boundaries(layout: Layout, stages: list[int]) -> int:
    """Boundaries between a process' stages and those of others."""
    ends = [(stage, stage + 1) for stage in range(layout.stage_count - 1)]
    return sum((first in stages) != (second in stages) for first, second in ends)


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[] if i % 2 else pytest.mark.exhaustive) for i, cell in enumerate(CELLS)],
)
@pytest.mark.often("1f1b", "context 2, gather", "tensor 2 + sequence, recompute", "zero3", "uneven tokens")
def test_a_layout_moves_what_the_closed_forms_say(pool: Pool, cell: Cell, config: LlamaConfig, tmp_path: Path) -> None:
    check(pool, cell, config, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "sequence": False}, {"tensor": 2}, {"context": 2}, {"context": 2, "context_by": "ulysses"}],
    ids=["tensor", "sequence", "gather", "ulysses"],
)
@pytest.mark.often("tensor", "gather")
def test_products_in_bfloat16_send_two_bytes(
    pool: Pool, layout: dict[str, Any], config: LlamaConfig, tmp_path: Path
) -> None:
    """Rotated keys, and the head's input, which a norm gives in float32."""
    check(pool, Cell("bf16", layout, train={"precision": "bf16"}), config, tmp_path)


@pytest.mark.parametrize("shard", ["none", "zero3"])
@pytest.mark.slow
def test_a_tied_head_is_summed_over_the_ends(pool: Pool, shard: str, tmp_path: Path) -> None:
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)
    sharding = {"data": 2, "shard": shard} if shard != "none" else {}
    for moved in check(pool, Cell("tied", {"pipeline": 2, **sharding}), config, tmp_path):
        assert Flow("ends", "all-reduce") in moved


def check(pool: Pool, cell: Cell, config: LlamaConfig, folder: Path) -> list[Volumes]:
    original = folder / "original.yaml"
    original.write_text("task: pretrain\nmodel: some/model\ndata: none.jsonl\nsteps: 100\n")
    twin = make_twin(load_job(original), folder, folder, steps=STEP, config=config)
    found = pool.run(
        counted, str(twin.job_file(cell, LayoutVariant(clip=1.0, by_steps=True))), world=cell.world, timeout=100
    )
    for moved, expected in found:
        assert moved == expected
    return [moved for moved, _ in found]
