"""Rows of a run that are measured one by one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.data import build_cache, token_shards
from stoker.data.corpus import open_corpus
from stoker.data.text_codec import TextCodec
from stoker.errors import UserError
from stoker.evaluate.row_losses import rows_of
from stoker.job import load_job


def test_the_build_of_a_streamed_source_ends_when_the_held_out_rows_are_read(
    chatml: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_cache._build

    def endless(*given: Any, stop: threading.Event, **named: Any) -> None:
        build(*given, stop=stop, **named)
        stop.wait()

    rows = ({"instruction": f"What is {n}?", "output": f"Row {n} of this test."} for n in range(20))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(
        "task: sft\nmodel: llama-3m\ndata: {path: rows.jsonl, stream: true}\nsteps: 5\ntrain: {seq_len: 64}\n"
    )
    text, folder = SimpleNamespace(codec=chatml, seq_len=64), SimpleNamespace(path=tmp_path / "run")
    run: Any = SimpleNamespace(job=load_job(tmp_path / "job.yaml").job, text=text, folder=folder)
    monkeypatch.setattr(build_cache, "_build", endless)
    with pytest.raises(UserError, match="held no rows out"):
        rows_of(run, None, "auto", tmp_path)
    assert "stoker-tokenise" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("name", "content"), [("none.csv", "instruction,output\n"), ("none.json", "[]")])
def test_a_file_without_rows_is_named(name: str, content: str, chatml: TextCodec, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "job.yaml").write_text(
        f"task: sft\nmodel: llama-3m\ndata: rows.jsonl\nsteps: 5\n"
        f"evaluate: {{data: [{{path: {name}, format: instruction}}]}}\n"
    )
    loaded = load_job(tmp_path / "job.yaml")
    run: Any = SimpleNamespace(job=loaded.job, text=SimpleNamespace(codec=chatml, seq_len=64))
    with pytest.raises(UserError, match=f"{name} is empty; give a source that holds at least one row"):
        rows_of(run, name, "instruction", tmp_path)
    with pytest.raises(UserError, match=f"job.yaml:5:.*{name} is empty"):
        open_corpus(loaded.job, chatml, seq_len=64, base=tmp_path, loaded=loaded)


def test_the_reasons_of_dropped_rows_are_those_of_the_whole_source(
    chatml: TextCodec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cache, "CHUNK_ROWS", 1)
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 1)
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": ""}\n{"instruction": "a"}\n')
    (tmp_path / "job.yaml").write_text("task: sft\nmodel: llama-3m\ndata: rows.jsonl\nsteps: 5\n")
    text = SimpleNamespace(codec=chatml, seq_len=64)
    run: Any = SimpleNamespace(job=load_job(tmp_path / "job.yaml").job, text=text)
    with pytest.raises(UserError, match="every row is dropped: empty answer, missing column"):
        rows_of(run, "rows.jsonl", "instruction", tmp_path)
