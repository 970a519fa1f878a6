"""The name of an exported GGUF file, and the time for its check."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.export.gguf_replay import ask_llamacpp
from stoker.checkpoint.export.replay import ReplayRequest
from stoker.checkpoint.export.write_export import gguf_name
from stoker.errors import RunFailed


def test_large_files_get_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("llama.cpp", timeout)

    monkeypatch.setattr(subprocess, "run", ends)
    (tmp_path / "model.gguf").touch()
    os.truncate(tmp_path / "model.gguf", 140 << 30)
    with pytest.raises(RunFailed, match=r"gave no answer within \d{4,} s"):
        ask_llamacpp(tmp_path / "model.gguf", ReplayRequest((), (), ()))


def test_the_name_of_the_file_keeps_a_version() -> None:
    assert gguf_name("Qwen/Qwen2.5-0.5B-Instruct", "run") == "Qwen2.5-0.5B-Instruct-run"
    assert gguf_name("models/base.gguf", "run") == "base-run"
