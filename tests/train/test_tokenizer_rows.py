"""A model whose tokenizer has more tokens than its embedding, such as Gemma 3 1B with its tokens for images."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from running import run, write_job, write_rows
from tokenizers import Tokenizer

from stoker.cli.main import main
from stoker.data import build_cache
from stoker.errors import UserError
from tiny_llama import save_tiny_llama


@pytest.fixture
def job(sft: dict[str, Any], tokenizer: Tokenizer, base: Path) -> dict[str, Any]:
    """A job whose model has no embedding of the tokenizer's last token."""
    save_tiny_llama(base / "smaller", tokenizer, vocab_size=tokenizer.get_vocab_size() - 1)
    return {**sft, "model": str(base / "smaller")}


def add_row_with_last_token(tokenizer: Tokenizer, file: Path) -> None:
    text = tokenizer.decode([tokenizer.get_vocab_size() - 1], skip_special_tokens=False)
    row = {"prompt": "Please.", "completion": f"Please{text}"}
    file.write_text(file.read_text() + json.dumps(row) + "\n")


def test_a_token_without_embedding_may_be_absent_from_the_data(job: dict[str, Any], base: Path) -> None:
    ran = run(base, job)
    assert ran.outcome.state == "done"
    assert "1 of its " in ran.prepared.facts["tokenizer"]


def test_a_token_in_the_data_needs_an_embedding(job: dict[str, Any], tokenizer: Tokenizer, base: Path) -> None:
    add_row_with_last_token(tokenizer, base / job["data"])
    with pytest.raises(UserError, match=f"the data has .* with id {tokenizer.get_vocab_size() - 1}; create one with"):
        run(base, job)


def test_the_audit_reports_it(
    job: dict[str, Any],
    tokenizer: Tokenizer,
    base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(base)
    write_job(base, job)
    assert main(["data", "job.yaml", "--samples", "0"]) == 0
    add_row_with_last_token(tokenizer, base / job["data"])
    assert main(["data", "job.yaml", "--samples", "0"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "job.yaml:2:1: the tokenizer has" in printed and f"with id {tokenizer.get_vocab_size() - 1}" in printed


def test_whether_a_stream_has_it_is_not_known_and_its_build_ends(
    job: dict[str, Any], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_cache._build

    def endless(*given: Any, stop: threading.Event, **named: Any) -> None:
        build(*given, stop=stop, **named)
        stop.wait()

    monkeypatch.setattr(build_cache, "_build", endless)
    write_rows(base / job["data"], 20, salt=1000)  # rows that no other test has cached
    with pytest.raises(UserError, match="new rows, or do not stream"):
        run(base, {**job, "data": [{"path": job["data"], "stream": True}]})
    assert "stoker-tokenise" not in {thread.name for thread in threading.enumerate()}
