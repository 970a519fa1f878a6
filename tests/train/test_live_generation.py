"""Answers from the weights in training, before and after a step, under layouts as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from stoker.generate.generation_engine import GenerationEngine
from stoker.generate.request import BASE, Request, Sampling
from stoker.job.layout import layout_of
from stoker.job.load_job import load_job
from stoker.launch.process_pool import Pool
from stoker.parallel.float64_mode import in_float64
from stoker.parallel.mesh import Mesh
from stoker.train.prepare import prepare
from stoker.verify.layout_cases import MATRIX, reference_of
from stoker.verify.toy_job import make_twin

REQUESTS, CONTEXT, MEMORY = 7, 64, 2**30
LEARNING_RATE = 0.05
OFTEN = ("zero3 + tensor + LoRA",)
SELDOM = ("DDP", "zero1", "zero2", "zero3", "hybrid 2 x 2", "tensor 2")


@dataclass(frozen=True)
class Found:
    """Tokens with their log-probabilities, by request, before and after a step, and without the adapter."""

    before: dict[int, list[tuple[int, float]]]
    after: dict[int, list[tuple[int, float]]]
    base: dict[int, list[tuple[int, float]]]


def asked(vocabulary: int, adapter: str | None = None) -> list[Request]:
    generator = np.random.default_rng(3)
    return [
        Request(
            tuple(generator.integers(2, vocabulary, 3 + 4 * number).tolist()),
            max_tokens=3 + 5 * ((number * 3) % 4),  # processes end at different times
            sampling=Sampling(temperature=float(number % 2), seed=number),
            adapter=adapter,
        )
        for number in range(REQUESTS)
    ]


def generated(job_file: str, adapted: bool) -> Found:
    """What this process answers; each data-parallel process has some of the requests."""
    path = Path(job_file)
    with in_float64():
        loaded = load_job(path)
        layout = layout_of(loaded.job)
        mesh = None if layout.one_process else Mesh(layout, torch.device("cpu"))
        prepared = prepare(loaded, path.parent, mesh=mesh)
        engine, task = prepared.engine, prepared.task
        decoder = engine.decoder(CONTEXT)
        assert decoder is not None and task.language is not None
        generate = GenerationEngine(decoder, rows=3, memory=MEMORY)
        size = -(-REQUESTS // layout.data)
        first = mesh.data_index * size if mesh is not None else 0
        vocabulary = task.language.model.config.vocab_size

        def answers(adapter: str | None = None) -> dict[int, list[tuple[int, float]]]:
            mine = asked(vocabulary, adapter)[first : first + size]
            return {
                first + i: [(token.id, token.log_probability) for token in generation.tokens]
                for i, generation in enumerate(generate.run(mine))
            }

        before = answers()
        own = engine.share(0, 4, 4)
        parts = [part for i in range(*own) for part in task.parts(i, i + 1)]
        engine.train(parts, engine.count(parts), torch.amp.GradScaler("cpu", enabled=False))
        with torch.no_grad():
            for weight in task.model.parameters():
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=LEARNING_RATE)
        generate.forget()
        return Found(before, answers(), answers(BASE) if adapted else {})


def twin_job(name: str, folder: Path) -> tuple[str, str, int]:
    """The files of a layout's job and of its one process, and the number of processes."""
    config = AutoConfig.for_model("llama", num_attention_heads=8, num_key_value_heads=2)
    (folder / "job.yaml").write_text("task: sft\nmodel: some/model\ndata: none.jsonl\nsteps: 5\n")
    twin = make_twin(load_job(folder / "job.yaml"), folder, folder, config=config)
    cell = next(cell for cell in MATRIX if cell.name == name)
    return str(twin.job_file(cell)), str(twin.job_file(reference_of(cell), beside=cell)), cell.world


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SELDOM)])
@pytest.mark.slow
def test_answers_under_a_layout_are_those_of_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    job, reference, world = twin_job(name, tmp_path)
    adapted = "LoRA" in name
    one = pool.run(generated, reference, adapted, world=1, timeout=250)[0]
    assert any(one.before[i] != one.after[i] for i in range(REQUESTS))
    if adapted:
        assert any(one.base[i] != one.after[i] for i in range(REQUESTS))
    for found in pool.run(generated, job, adapted, world=world, timeout=250):
        for kind in ("before", "after", "base"):
            mine, expected = getattr(found, kind), getattr(one, kind)
            assert mine or kind == "base"
            for number, tokens in mine.items():
                assert [i for i, _ in tokens] == [i for i, _ in expected[number]], (kind, number)
                assert [p for _, p in tokens] == pytest.approx([p for _, p in expected[number]], abs=1e-9)
