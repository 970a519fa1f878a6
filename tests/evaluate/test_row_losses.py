"""Rows of a run that are measured one by one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.data import build_cache
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
