"""Fixtures of the training tests: a tiny language model in a folder, rows and a job for it; a click log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click_logs import write_clicks
from running import write_rows
from tokenizers import Tokenizer

from tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Llama in float32 and a byte-level tokenizer with the ChatML template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "tie_word_embeddings": True}
    return save_tiny_llama(folder, tokenizer, template=None, **sizes)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An empty folder that jobs are run from, with 40 rows of data in it."""
    write_rows(tmp_path / "rows.jsonl", 40)
    return tmp_path


@pytest.fixture
def sft(tiny_model: Path) -> dict[str, Any]:
    """A job for twelve steps on the rows, without anything held out."""
    return {
        "task": "sft",
        "model": str(tiny_model),
        "data": "rows.jsonl",
        "steps": 12,
        "output": "run",
        "train": {"batch": 4, "lr": 1e-2, "seq_len": 64, "precision": "fp32"},
        "evaluate": {"fraction": 0.0},
    }


@pytest.fixture
def clicks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a click log, the current one."""
    write_clicks(tmp_path / "clicks.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path
