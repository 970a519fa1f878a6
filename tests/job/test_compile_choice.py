"""Which jobs are compiled where they leave it open, and in which layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.job.compile_choice import compile_choice, compiles_in
from stoker.job.layout import Layout
from stoker.job.load_job import load_job

JOB = "task: pretrain\nmodel: llama-3m\ndata: sotu\nsteps: 100\n"
GPU: dict[str, Any] = {"model_type": "llama", "precision": "bf16", "nvidia": True}


@pytest.mark.parametrize(
    ("keys", "device", "choice"),
    [
        ((), {}, "unsplit"),
        (("steps=99",), {}, "never"),
        (("train.pack=false",), {}, "never"),
        (("tune=lora",), {}, "never"),
        ((), {"nvidia": False}, "never"),
        ((), {"precision": "fp32"}, "never"),
        ((), {"model_type": "gemma2"}, "never"),
        ((), {"model_type": "mistral"}, "never"),
        (("train.compile=true", "steps=1"), {"nvidia": False}, "always"),
        (("parallel.compile=false",), {}, "never"),
    ],
)
def test_what_a_job_chooses(tmp_path: Path, keys: tuple[str, ...], device: dict[str, Any], choice: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    assert compile_choice(load_job(tmp_path / "job.yaml", keys).job, **{**GPU, **device}) == choice


def test_layouts_that_split_blocks_or_rows_are_compiled_on_request() -> None:
    plain = [Layout(), Layout(data=4, shard="zero3", shard_size=4)]
    split = [
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(context=2),
        Layout(recompute="full"),
        Layout(offload="optimizer"),
    ]
    assert all(compiles_in("unsplit", layout) for layout in plain)
    assert not any(compiles_in("unsplit", layout) for layout in split)
    assert all(compiles_in("always", layout) for layout in [*plain, *split])
    assert not any(compiles_in("never", layout) for layout in [*plain, *split])
