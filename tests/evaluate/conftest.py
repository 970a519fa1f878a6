"""Fixtures of the evaluation tests: a folder with tiny runs that the command has trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_rows import QUESTIONS, write_lines
from tokenizers import Tokenizer

from stoker.cli.main import main
from tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def base(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model ``tiny``, a run ``good`` that knows its answers, and ``bad`` that does not."""
    base = tmp_path_factory.mktemp("evaluate")
    save_tiny_llama(base / "tiny", tokenizer)
    write_lines(base / "rows.jsonl", [{"prompt": q, "completion": a} for _ in range(4) for q, a in QUESTIONS])
    write_lines(base / "asked.jsonl", [{"prompt": q, "expected": a} for _ in range(4) for q, a in QUESTIONS])
    common = "task: sft\nmodel: tiny\ndata: rows.jsonl\ntune: full\n"
    common += "train: {lr: 1e-2, batch: 12, seq_len: 64, precision: fp32, warmup: 0, schedule: constant}\n"
    common += "evaluate: {fraction: 0}\n"
    (base / "good.yaml").write_text(common + "steps: 40\n")
    (base / "bad.yaml").write_text(common + "steps: 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "good.yaml", "--json"]) == 0
        assert main(["train", "bad.yaml", "--json"]) == 0
    return base


@pytest.fixture
def here(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in the folder of the runs."""
    monkeypatch.chdir(base)
    return base
